"""The server for peers that connect: authenticates peers and dispatches their requests."""

from __future__ import annotations

import abc
import errno
import logging
import socket
import weakref
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from baton_kv_transfer.transports.sockets.framed_socket import MAX_PAYLOAD_BYTES, FramedSocket
from baton_kv_transfer.transports.sockets.peer_link import ANSWER, HELLO
from baton_kv_transfer.transports.transfer import CopyError, Region
from baton_kv_transfer.transports.transport import TransportContext

MAX_HELLO_BYTES = 4096
HELLO_TIMEOUT_S = 5.0
#: Limit of connections that have not sent HELLO. Above this limit, the oldest one is closed.
MAX_UNAUTHENTICATED = 128
#: Limit of the unfinished transfers of one client.
MAX_UNFINISHED = 2**14
#: Limit of the total size of the requests of one client's unfinished transfers.
MAX_UNFINISHED_BYTES = 2 * MAX_PAYLOAD_BYTES
#: MAX_UNFINISHED_BYTES is not checked for requests of up to this size. This saves computing a sum.
_SMALL_REQUEST_BYTES = 4096
#: A client is disconnected if more than this number of bytes of answers waits to be sent to it.
MAX_UNSENT_BYTES = 2**24
#: Pause before the next accept, after the process had no free file descriptor or memory.
ACCEPT_PAUSE_S = 1.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class PeerClient:
    """A peer that has connected to the server."""

    #: Messages from and to the peer.
    connection: FramedSocket
    #: Address or process of the peer, for the log.
    where: str
    #: Name of the peer's agent; empty until the peer's HELLO was accepted.
    name: str = field(default="", init=False)

    def close(self) -> None:
        self.connection.close()


_Client = TypeVar("_Client", bound=PeerClient)


class PeerServer(abc.ABC, Generic[_Client]):
    """The server of one transport, and its clients.

    The transports' thread calls all methods except the constructor.
    """

    #: Packed data with which a peer can connect.
    address: bytes
    _listener: socket.socket

    def __init__(self, context: TransportContext) -> None:
        self._context = context
        self._thread = context.thread
        self._clients: list[_Client] = []

    @abc.abstractmethod
    def forget_region(self, region: Region) -> None:
        """End the clients' operations on a deregistered region. See Transport."""

    @abc.abstractmethod
    def _make_client(self, end: socket.socket, where: Any) -> _Client | None:
        """Return the client of an accepted connection; None: refuse the connection.

        Args:
            end: the socket. The caller closes it after a refusal or an error.
            where: address of the client.

        Raises:
            OSError: the connection is lost.
        """

    @abc.abstractmethod
    def _check_hello(self, client: _Client, payload: bytes) -> str:
        """Check HELLO, the first message of a client, and return the client's name.

        Raises:
            ConnectionError: the message does not prove that the client has this agent's metadata.
            CopyError: the client's memory cannot be read.
        """

    @abc.abstractmethod
    def _handle_message(self, client: _Client, kind: int, number: int, payload: bytes) -> None:
        """Carry out a message of a client whose HELLO was accepted.

        The message begins a transfer, ends a transfer, or is a notification to deliver.

        Raises:
            ConnectionError, ValueError: the message is invalid.
        """

    def close(self) -> None:
        """Accept no more clients, and disconnect all clients."""
        self._thread.unwatch(self._listener.fileno())
        self._listener.close()
        self.disconnect_all()

    def disconnect_all(self) -> None:
        for client in list(self._clients):
            self._drop(client, "this agent cut all its peers off")

    def _listen(self, listener: socket.socket) -> None:
        """Accept clients until the listening socket is closed."""
        self._thread.watch(listener.fileno(), lambda: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        try:
            end, where = listener.accept()
        except OSError as error:  # the client has disconnected, or resources are exhausted
            if error.errno in _EXHAUSTED:  # the socket stays readable
                self._thread.unwatch(listener.fileno())
                self._thread.call_later(ACCEPT_PAUSE_S, lambda: self._listen(listener))
            return
        try:
            client = self._make_client(end, where)
        except OSError:
            client = None
        if client is None:
            end.close()
        else:
            self._add(client)

    def _add(self, client: _Client) -> None:
        unauthenticated = [each for each in self._clients if not each.name]
        if len(unauthenticated) >= MAX_UNAUTHENTICATED:
            self._drop(unauthenticated[0], "too many clients have sent no HELLO")
        self._clients.append(client)
        self._thread.watch(client.connection.fileno(), lambda: self._serve(client))
        reference = weakref.ref(client)  # the timer must not keep the buffers of a lost client
        self._thread.call_later(HELLO_TIMEOUT_S, lambda: self._drop_unauthenticated(reference()))

    def _drop_unauthenticated(self, client: _Client | None) -> None:
        if client is not None and not client.name:
            self._drop(client, f"no HELLO within {HELLO_TIMEOUT_S:g} s")

    def _serve(self, client: _Client) -> None:
        try:
            client.connection.flush()
            for kind, number, payload in client.connection.receive():
                if client.name:
                    self._handle_message(client, kind, number, payload)
                elif kind != HELLO:
                    raise ConnectionError("its first message is not HELLO")
                else:
                    client.name = self._check_hello(client, payload)
                    client.connection.max_payload_bytes = MAX_PAYLOAD_BYTES
            self._watch_writable(client)
        except (
            OSError,
            ValueError,
            OverflowError,
            RecursionError,
            msgspec.DecodeError,
            CopyError,
        ) as error:
            self._drop(client, str(error))
        except Exception as error:  # caused by this client's bytes; other clients must continue
            logger.exception(
                "agent %s is disconnected, because its request caused an error here", client.name
            )
            self._drop(client, repr(error))

    def _check_unfinished(self, unfinished: Collection[bytes], request: bytes) -> None:
        """Check the limits of a client's unfinished transfers before another one begins.

        Args:
            unfinished: iovecs of the unfinished transfers.
            request: the request for another transfer.

        Raises:
            ConnectionError: a limit is exceeded.
        """
        is_small = len(request) <= _SMALL_REQUEST_BYTES
        if len(unfinished) >= MAX_UNFINISHED or not (
            is_small or sum(map(len, unfinished)) + len(request) <= MAX_UNFINISHED_BYTES
        ):
            raise ConnectionError(f"{len(unfinished)} of its transfers have not finished")

    def _answer(self, client: _Client, number: int, error: str) -> None:
        try:
            client.connection.send(ANSWER, number, error.encode())
            if client.connection.num_unsent > MAX_UNSENT_BYTES:
                raise ConnectionError("it does not read its answers")
            self._watch_writable(client)
        except OSError as failure:
            self._drop(client, str(failure))

    def _watch_writable(self, client: _Client) -> None:
        self._thread.watch_writable(client.connection.fileno(), client.connection.has_outgoing)

    def _drop(self, client: _Client, reason: str) -> None:
        if client not in self._clients:
            return
        agent = client.name or "an unknown agent"
        logger.info("the KV transfer connection of %s at %s ended: %s", agent, client.where, reason)
        self._clients.remove(client)
        self._thread.unwatch(client.connection.fileno())
        client.close()
        self._thread.take_jobs(client)
