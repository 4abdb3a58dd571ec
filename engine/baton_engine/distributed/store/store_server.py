"""The server of a store: a thread in the process that opens the store. Needs no torch.

A Get is answered when all of its keys are set. The server has no deadline for a Get. The client
closes the connection when its own deadline passes.

The thread shares its process with an engine, so the constants here limit the time and memory of
each client. If a request exceeds a limit, the request is refused or the client is disconnected.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from baton_engine.bounded_log import SparseLog
from baton_engine.distributed.store.client_connection import StoreClient
from baton_engine.distributed.store.values import Values
from baton_engine.distributed.store.wire import (
    RECEIVE_BYTES,
    Add,
    Append,
    CompareSet,
    Get,
    Request,
    Set,
    StoreAddress,
    StoreReply,
    listen,
    prepare,
)
from baton_protocol.options.config import pod_ip

logger = logging.getLogger(__name__)

#: Pause before the next accept when the process has no free descriptor.
ACCEPT_PAUSE_S = 0.1
#: Limit of connections. If half of the process's limit of file descriptors is lower, that half is
#: the limit.
MAX_CLIENTS = 4096
#: Limit of unauthenticated clients. If half of the limit of connections is lower, that half is the
#: limit. Above the limit, the oldest unauthenticated client is dropped.
MAX_UNAUTHENTICATED = 1024
#: A client that has not authenticated within this time is dropped. The time is long enough for a
#: client on a busy machine.
HANDSHAKE_TIMEOUT_S = 15.0
#: Limit of the buffers of all clients. Above the limit, the client with the largest buffers is
#: dropped.
MAX_BUFFERED_BYTES = 2**28
#: Bytes of pending answers to send before other events are handled.
TURN_BYTES = 2**22


def open_store(host: str | None = None, *, port: int = 0, secret: bytes = b"") -> StoreServer:
    """Start a rendezvous store.

    Args:
        host: the address to listen on. None: the pod's address.
        port: 0: any free port.
        secret: the secret that authenticates clients, see `handshake`. Empty: no authentication.

    Raises:
        OSError: the address is in use, or is not an address of this host.
    """
    return StoreServer(host or pod_ip(), port, secret)


class StoreServer:
    """A running rendezvous store. After `close`, all keys are lost and pending calls fail."""

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        self._secret = secret
        self._listener = listen(host, port)
        self._listener.setblocking(False)
        self.address = StoreAddress(*self._listener.getsockname()[:2])
        self._wakes, self._wake = socket.socketpair()
        self._outdated: deque[Callable[[str], bool]] = deque()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        #: Time from which new connections are accepted again. None: they are accepted now.
        self._accept_again_at: float | None = None
        self._values = Values()
        #: Bytes in the buffers of each client.
        self._clients: dict[StoreClient, int] = {}
        self._num_buffered = 0
        #: Deadlines of handshakes, the oldest first.
        self._unauthenticated: dict[StoreClient, float] = {}
        #: Waiting clients by the first key that they miss.
        self._waiting: dict[str, set[StoreClient]] = {}
        #: Clients to check again, because their missing key was set.
        self._due: deque[StoreClient] = deque()
        self._log = SparseLog(logger)
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_clients = min(MAX_CLIENTS, descriptors // 2)
        self._max_unauthenticated = min(MAX_UNAUTHENTICATED, self._max_clients // 2)
        self._decoder = msgspec.msgpack.Decoder(Request)
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def forget(self, is_outdated: Callable[[str], bool]) -> None:
        """Remove all keys for which `is_outdated` returns True. Thread-safe.

        The store's thread removes the keys, possibly after this method has returned.
        """
        self._outdated.append(is_outdated)
        with contextlib.suppress(OSError):  # the store is closed
            self._wake.send(b"\0")

    def close(self) -> None:
        """Close the store and its connections. Idempotent."""
        self._wake.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                for key, events in self._selector.select(self._select_timeout_s()):
                    if key.fileobj is self._wakes:
                        if not self._wakes.recv(RECEIVE_BYTES):
                            return  # `close` was called
                        while self._outdated:
                            self._values.forget(self._outdated.popleft())
                    elif key.fileobj is self._listener:
                        self._accept()
                    elif key.data in self._clients:  # not dropped since `select`
                        self._handle(key.data, events)
                self._answer_due_clients()
                self._check_deadlines(time.monotonic())
        finally:
            for client in self._clients:
                client.socket.close()
            for own in (self._listener, self._wakes, self._selector):
                own.close()

    def _select_timeout_s(self) -> float | None:
        """Return the maximum number of seconds to wait for socket events. None: no limit."""
        if self._due:
            return 0.0
        times = [
            *([] if self._accept_again_at is None else [self._accept_again_at]),
            *list(self._unauthenticated.values())[:1],
        ]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _check_deadlines(self, now: float) -> None:
        if self._accept_again_at is not None and now >= self._accept_again_at:
            self._accept_again_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        for client, deadline in list(self._unauthenticated.items()):
            if now < deadline:
                break
            self._drop(
                client,
                TimeoutError(f"it did not authenticate within {HANDSHAKE_TIMEOUT_S:g} s"),
            )

    # Connections

    def _accept(self) -> None:
        try:
            connection, (host, port, *_) = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # the client has disconnected
        except OSError as error:
            self._log.warning(
                "the rendezvous store cannot accept a connection and tries again in %s s: %s",
                ACCEPT_PAUSE_S,
                error,
            )
            self._selector.unregister(self._listener)  # `select` would return it at once
            self._accept_again_at = time.monotonic() + ACCEPT_PAUSE_S
            return
        address = f"{host}:{port}"
        if len(self._clients) >= self._max_clients:
            self._log.warning(
                "the rendezvous store refused a client at %s: the limit of %s clients is reached",
                address,
                self._max_clients,
            )
            connection.close()
            return
        try:
            connection.setblocking(False)
            prepare(connection)
        except OSError:
            connection.close()
            return
        client = StoreClient(connection, address, self._secret)
        self._clients[client] = 0
        self._selector.register(connection, selectors.EVENT_READ, client)
        if client.authentication is not None:
            self._unauthenticated[client] = time.monotonic() + HANDSHAKE_TIMEOUT_S
            if len(self._unauthenticated) > self._max_unauthenticated:
                self._drop(
                    next(iter(self._unauthenticated)),
                    OverflowError("it is the oldest of too many unauthenticated clients"),
                )

    def _handle(self, client: StoreClient, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                client.flush()
            if events & selectors.EVENT_READ and (payload := client.receive()) is not None:
                self._take(client, payload)
        except Exception as error:  # caused by this client's bytes; other clients must continue
            self._drop(client, error)
        else:
            self._update(client)

    def _update(self, client: StoreClient) -> None:
        """Update the selector and the count of buffered bytes after I/O with a client.

        If the buffers of all clients together exceed MAX_BUFFERED_BYTES, drop the clients with the
        largest buffers.
        """
        if client not in self._clients:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.outgoing else 0)
        if self._selector.get_key(client.socket).events != events:
            self._selector.modify(client.socket, events, client)
        self._num_buffered += client.num_buffered - self._clients[client]
        self._clients[client] = client.num_buffered
        while self._num_buffered > MAX_BUFFERED_BYTES:
            heaviest = max(self._clients, key=self._clients.__getitem__)
            self._drop(
                heaviest,
                OverflowError(
                    "its buffers are the largest, and the buffers of all clients hold "
                    f"{self._num_buffered} bytes"
                ),
            )

    def _drop(self, client: StoreClient, error: Exception) -> None:
        if not isinstance(error, EOFError | ConnectionError):
            self._log.warning(
                "the rendezvous store dropped a client at %s: %s", client.address, error
            )
        self._num_buffered -= self._clients.pop(client)
        self._unauthenticated.pop(client, None)
        self._forget_waiting(client)
        self._selector.unregister(client.socket)
        client.socket.close()

    # Requests

    def _take(self, client: StoreClient, payload: bytes) -> None:
        if client.authentication is not None:
            client.send(client.authentication.answer(payload))
            if client.authentication.is_complete:
                client.authentication = None
                del self._unauthenticated[client]
            return
        request = self._decoder.decode(payload)
        if isinstance(request, Get):
            client.waits_for = request.keys
            self._answer_or_wait(client)
            return
        try:
            answer = self._values.apply(request)
        except ValueError as error:
            answer = StoreReply(error=str(error))
        client.send(answer)
        if not answer.error and isinstance(request, Set | Add | Append | CompareSet):
            for key in request.values if isinstance(request, Set) else [request.key]:
                self._due.extend(self._waiting.pop(key, ()))

    def _answer_due_clients(self) -> None:
        sent = 0
        while self._due and sent < TURN_BYTES:
            client = self._due.popleft()
            if client in self._clients and client.waits_for is not None:
                try:
                    sent += self._answer_or_wait(client)
                except (OSError, ValueError) as error:
                    self._drop(client, error)
                else:
                    self._update(client)

    def _answer_or_wait(self, client: StoreClient) -> int:
        """Answer the client's Get, or register the client for the first key that is missing.

        Returns:
            Number of bytes of the values in the answer. 0 if a key is missing or Get is refused.
        """
        assert client.waits_for is not None
        try:
            missing = self._values.missing(client.waits_for)
            if missing is not None:
                self._waiting.setdefault(missing, set()).add(client)
                client.missing = missing
                return 0
            answer = self._values.get(client.waits_for)
        except ValueError as error:
            answer = StoreReply(error=str(error))
        client.waits_for = None
        client.send(answer)
        return sum(map(len, answer.values))

    def _forget_waiting(self, client: StoreClient) -> None:
        waiting = self._waiting.get(client.missing)
        if waiting is not None:
            waiting.discard(client)
            if not waiting:
                del self._waiting[client.missing]
