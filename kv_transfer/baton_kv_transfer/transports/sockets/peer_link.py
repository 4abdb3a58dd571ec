"""The asking side of transports over sockets: requests, data and notifications to a peer, and its answers, over one connection."""

from __future__ import annotations

import abc
import contextlib
import logging
import threading
from collections.abc import Callable

from baton_kv_transfer.transports.iovec import check
from baton_kv_transfer.transports.sockets.framed_socket import DATA, MAX_PAYLOAD_BYTES, FramedSocket
from baton_kv_transfer.transports.sockets.rows import Rows
from baton_kv_transfer.transports.transfer import Transfer, TransportError
from baton_kv_transfer.transports.transport import TransportContext

HELLO, READ, WRITE, NOTIF, ANSWER = range(DATA + 1, DATA + 6)
"""Kinds of messages. A frame's number names the transfer that it asks for, answers, or has bytes of."""

logger = logging.getLogger(__name__)


class PeerLink(abc.ABC):
    """`post` and `withdraw` are for any thread, the rest is for the transport's. The first post connects, and the first after a loss."""

    def __init__(self, context: TransportContext, peer: str) -> None:
        self._context = context
        self._thread = context.thread
        self.peer = peer
        self.error = ""
        """Why it was given up."""
        self._lock = threading.RLock()
        self._socket: FramedSocket | None = None
        self._transfers: dict[int, Transfer] = {}
        self._next_number = 0

    @abc.abstractmethod
    def connect(self) -> FramedSocket:
        """Begins a connection, and sends HELLO. Raises OSError."""

    def withdraw(self) -> None:  # noqa: B027
        """Before it is given up by the thread."""

    def on_lost(self, reason: str) -> None:  # noqa: B027
        """After a connection ended."""

    def post(
        self,
        kind: int,
        payload: bytes,
        transfer: Transfer | None = None,
        *,
        outgoing: Rows | None = None,
        incoming: Rows | None = None,
    ) -> None:
        """Sends at once what the connection takes, the rest follows.

        Args:
            transfer: ends once it is answered, or `incoming` is filled.
            outgoing: rows whose bytes follow the message.
            incoming: rows to fill with what the peer sends.
        """
        error = self._post(kind, payload, transfer, outgoing, incoming)
        if error and transfer is not None:
            transfer.end(error)
            self._context.wakeup()
        elif error:
            logger.warning("notification to %s was lost: %s", self.peer, error)

    def give_up(self, reason: str) -> None:
        """Ends all that is under way; later posts end at once."""
        with self._lock:
            self.error = self.error or reason
            connection = self._socket
        if connection is not None:
            self._lose(connection, self.error)

    def _post(
        self,
        kind: int,
        payload: bytes,
        transfer: Transfer | None,
        outgoing: Rows | None,
        incoming: Rows | None,
    ) -> str:
        if len(payload) > MAX_PAYLOAD_BYTES:
            return f"{len(payload)} bytes are more than a frame's {MAX_PAYLOAD_BYTES}: make several smaller transfers"
        with self._lock:
            if self.error:
                return self.error
            try:
                connection = self._socket or self._open()
            except OSError as failure:
                return f"no connection to {self.peer}: {failure}"
            self._next_number += 1
            number = self._next_number
            if transfer is not None:
                self._transfers[number] = transfer
            if incoming is not None:
                connection.expect(number, incoming)
            try:
                connection.send(kind, number, payload, outgoing)
            except OSError as failure:
                reason = f"connection to {self.peer} lost: {failure}"
                self._submit(lambda: self._lose(connection, reason))  # ends this one, too
                return "" if transfer is not None else reason
            if connection.has_outgoing:
                self._submit(lambda: self._watch_writable(connection))
        return ""

    def _open(self) -> FramedSocket:
        connection = self._socket = self.connect()
        self._submit(lambda: self._watch(connection))
        return connection

    def _submit(self, command: Callable[[], None]) -> None:
        with contextlib.suppress(TransportError):  # closed: the thread gives up all links last
            self._thread.mailbox.submit(command)

    # -- the transport's thread

    def _watch(self, connection: FramedSocket) -> None:
        if connection is self._socket:
            self._thread.watch(connection.fileno(), lambda: self._serve(connection))
            self._watch_writable(connection)

    def _watch_writable(self, connection: FramedSocket) -> None:
        self._thread.watch_writable(connection.fileno(), connection.has_outgoing)

    def _serve(self, connection: FramedSocket) -> None:
        try:
            with self._lock:
                connection.flush()
            for kind, number, payload in connection.receive():
                if kind in (ANSWER, DATA):
                    self._take(connection, kind, number, payload.decode(errors="replace"))
            self._watch_writable(connection)
        except OSError as error:
            self._lose(connection, f"connection to {self.peer} lost: {error}")

    def _take(self, connection: FramedSocket, kind: int, number: int, error: str) -> None:
        transfer = self._transfers.pop(number, None)
        if transfer is None:
            return
        with self._lock:
            stopped = connection.stop(number)
        if stopped and not error:
            error = "it answered before all bytes were there"
        if kind == DATA and transfer.notif:  # a write's goes with its request
            self.post(NOTIF, transfer.notif)
        transfer.end(error and f"{transfer.op} of {self.peer}'s memory: {error}")
        self._context.wakeup()

    def _lose(self, connection: FramedSocket, reason: str) -> None:
        with self._lock:
            if connection is not self._socket:
                return
            self._socket = None
            self._thread.unwatch(connection.fileno())
            unsent = connection.has_outgoing
            connection.close()
            transfers, self._transfers = self._transfers, {}
        logger.log(logging.WARNING if unsent else logging.INFO, "%s", reason)
        for transfer in transfers.values():
            transfer.end(reason)
        self._context.wakeup()
        self.on_lost(reason)


def encode_request(notif: bytes, iovec: bytes) -> bytes:
    return len(notif).to_bytes(4, "little") + notif + iovec


def decode_request(request: bytes) -> tuple[bytes, bytes]:
    """(notification, iovec).

    Raises:
        ValueError: not a request, without runs, or for more than one transfer may move.
    """
    end = 4 + int.from_bytes(request[:4], "little")
    check(request[end:])
    return request[4:end], request[end:]
