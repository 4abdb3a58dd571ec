"""The store in which ranks meet: keys and values, held by a thread of the process that opens it. Needs no torch.

It tells a client that waits for keys when the last of them comes. Deadlines are the clients': who gives up closes its connection.
The thread shares its process with an engine, so no client gets more of its time or memory than the constants here say; who wants
more is dropped, or told so.
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

from baton_engine.distributed.store.client_connection import StoreClient
from baton_engine.distributed.store.values import Values
from baton_engine.distributed.store.wire import (
    RECEIVE_BYTES,
    Add,
    Answer,
    Append,
    CompareSet,
    Get,
    Request,
    Set,
    StoreAddress,
    listen,
    prepare,
)
from baton_engine.untrusted import SparseLog
from baton_protocol.config import pod_ip

logger = logging.getLogger(__name__)

ACCEPT_PAUSE_S = 0.1
"""Without a descriptor for it, a connection is left where it is so long."""
MAX_CLIENTS = 4096
"""And at most half of the descriptors that the process may have."""
MAX_STRANGERS = 1024
"""Connections that have not shown yet that they have the secret, and at most half of the clients. If more come, the oldest go."""
PROOF_TIMEOUT_S = 15.0
"""It takes a moment, or two on a machine that is very busy."""
MAX_BUFFERED_BYTES = 2**28
"""Of messages that are not complete, and of answers that are not fetched. If there is more, the client with most of it goes."""
TURN_BYTES = 2**22
"""Of answers to clients that have waited, after which the others have their turn."""


def open_store(host: str | None = None, *, port: int = 0, secret: bytes = b"") -> StoreServer:
    """Starts a store.

    Args:
        host: the one address to listen on; None: the pod's.
        port: 0: any free one.
        secret: who does not have it, too, is no client; see `store_proof`. Empty: everybody is.

    Raises:
        OSError: the address is not free, or none of this host's.
    """
    return StoreServer(host or pod_ip(), port, secret)


class StoreServer:
    """Lives, with its keys, until it is closed. Its clients' calls fail at once then."""

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
        self._accept_again_at: float | None = None
        """The listener is not watched until then."""
        self._values = Values()
        self._clients: dict[StoreClient, int] = {}
        """With the bytes that are kept for each."""
        self._num_buffered = 0
        self._strangers: dict[StoreClient, float] = {}
        """Those that are to prove something, until when; the oldest first."""
        self._waiting: dict[str, set[StoreClient]] = {}
        """By the first key that each misses."""
        self._due: deque[StoreClient] = deque()
        """Whose key has come."""
        self._log = SparseLog(logger)
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_clients = min(MAX_CLIENTS, descriptors // 2)
        self._max_strangers = min(MAX_STRANGERS, self._max_clients // 2)
        self._decoder = msgspec.msgpack.Decoder(Request)
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def forget(self, is_outdated: Callable[[str], bool]) -> None:
        """Removes the keys of which that is true, in a moment. From any thread; idempotent."""
        self._outdated.append(is_outdated)
        with contextlib.suppress(OSError):  # it is closed
            self._wake.send(b"\0")

    def close(self) -> None:
        """Idempotent."""
        self._wake.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                for key, events in self._selector.select(self._patience()):
                    if key.fileobj is self._wakes:
                        if not self._wakes.recv(RECEIVE_BYTES):
                            return  # it is closed
                        while self._outdated:
                            self._values.forget(self._outdated.popleft())
                    elif key.fileobj is self._listener:
                        self._accept()
                    elif key.data in self._clients:  # else it was dropped for what another one did
                        self._attend(key.data, events)
                self._answer_those_due()
                self._look_at_the_clock(time.monotonic())
        finally:
            for client in self._clients:
                client.socket.close()
            for own in (self._listener, self._wakes, self._selector):
                own.close()

    def _patience(self) -> float | None:
        """Seconds until there is something to do though nobody says anything."""
        if self._due:
            return 0.0
        times = [
            *([] if self._accept_again_at is None else [self._accept_again_at]),
            *list(self._strangers.values())[:1],
        ]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _look_at_the_clock(self, now: float) -> None:
        if self._accept_again_at is not None and now >= self._accept_again_at:
            self._accept_again_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        for client, deadline in list(self._strangers.items()):
            if now < deadline:
                break
            self._drop(
                client,
                TimeoutError(
                    f"it has not shown within {PROOF_TIMEOUT_S:g} s that it has the service's key"
                ),
            )

    # Connections

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it is gone again
        except OSError as error:
            self._log.warning("a store cannot take a connection: %s", error)
            self._selector.unregister(self._listener)  # it would be ready all the time
            self._accept_again_at = time.monotonic() + ACCEPT_PAUSE_S
            return
        if len(self._clients) >= self._max_clients:
            self._log.warning("a store refused a client: it has %s already", self._max_clients)
            connection.close()
            return
        try:
            connection.setblocking(False)
            prepare(connection)
        except OSError:
            connection.close()
            return
        client = StoreClient(connection, self._secret)
        self._clients[client] = 0
        self._selector.register(connection, selectors.EVENT_READ, client)
        if client.admission is not None:
            self._strangers[client] = time.monotonic() + PROOF_TIMEOUT_S
            if len(self._strangers) > self._max_strangers:
                self._drop(
                    next(iter(self._strangers)),
                    OverflowError("others came that had no key to show either"),
                )

    def _attend(self, client: StoreClient, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                client.flush()
            if events & selectors.EVENT_READ and (payload := client.receive()) is not None:
                self._take(client, payload)
        except (
            Exception
        ) as error:  # whatever it is, it comes of this client's bytes, and the others must go on
            self._drop(client, error)
        else:
            self._watch(client)

    def _watch(self, client: StoreClient) -> None:
        """After anything was received from it or is to be sent to it."""
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
                    f"of {self._num_buffered} bytes that are kept for clients most are its"
                ),
            )

    def _drop(self, client: StoreClient, error: Exception) -> None:
        if not isinstance(error, EOFError | ConnectionError):
            self._log.warning("a store dropped a client: %s", error)
        self._num_buffered -= self._clients.pop(client)
        self._strangers.pop(client, None)
        self._forget_waiting(client)
        self._selector.unregister(client.socket)
        client.socket.close()

    # Requests

    def _take(self, client: StoreClient, payload: bytes) -> None:
        if client.admission is not None:
            client.send(client.admission.answer(payload))
            if client.admission.is_complete:
                client.admission = None
                del self._strangers[client]
            return
        request = self._decoder.decode(payload)
        if isinstance(request, Get):
            client.waits_for = request.keys
            self._answer_or_wait(client)
            return
        try:
            answer = self._values.apply(request)
        except ValueError as error:
            answer = Answer(error=str(error))
        client.send(answer)
        if not answer.error and isinstance(request, Set | Add | Append | CompareSet):
            for key in request.values if isinstance(request, Set) else [request.key]:
                self._due.extend(self._waiting.pop(key, ()))

    def _answer_those_due(self) -> None:
        sent = 0
        while self._due and sent < TURN_BYTES:
            client = self._due.popleft()
            if client in self._clients and client.waits_for is not None:
                try:
                    sent += self._answer_or_wait(client)
                except (OSError, ValueError) as error:
                    self._drop(client, error)
                else:
                    self._watch(client)

    def _answer_or_wait(self, client: StoreClient) -> int:
        """Returns the bytes of the answer's values."""
        assert client.waits_for is not None
        try:
            missing = self._values.missing(client.waits_for)
            if missing is not None:
                self._waiting.setdefault(missing, set()).add(client)
                client.missing = missing
                return 0
            answer = self._values.get(client.waits_for)
        except ValueError as error:
            answer = Answer(error=str(error))
        client.waits_for = None
        client.send(answer)
        return sum(map(len, answer.values))

    def _forget_waiting(self, client: StoreClient) -> None:
        waiting = self._waiting.get(client.missing)
        if waiting is not None:
            waiting.discard(client)
            if not waiting:
                del self._waiting[client.missing]
