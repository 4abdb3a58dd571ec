"""The client of one peer: sends requests, data and notifications, and receives the replies."""

from __future__ import annotations

import abc
import contextlib
import logging
import threading
from collections.abc import Callable

from baton_kv_transfer.transports.iovec import check_iovec
from baton_kv_transfer.transports.sockets.framed_socket import DATA, MAX_PAYLOAD_BYTES, FramedSocket
from baton_kv_transfer.transports.sockets.row_io import Rows
from baton_kv_transfer.transports.transfer import LOST_NOTIFICATION, Transfer, TransportError
from baton_kv_transfer.transports.transport import TransportContext

#: Kinds of messages. Each frame has the number of the transfer to which the frame belongs.
HELLO, READ, WRITE, NOTIF, ANSWER = range(DATA + 1, DATA + 6)

logger = logging.getLogger(__name__)


class PeerLink(abc.ABC):
    """A connection to one peer, which `post` opens if needed.

    Any thread may call `post` and `withdraw`. `post` calls `connect`. The transports' thread calls
    the other methods.
    """

    def __init__(self, context: TransportContext, peer: str) -> None:
        self._context = context
        self._thread = context.thread
        self.peer = peer
        #: Why the link was aborted; empty before.
        self.error = ""
        self._lock = threading.RLock()
        self._socket: FramedSocket | None = None
        self._transfers: dict[int, Transfer] = {}
        self._next_number = 0

    @abc.abstractmethod
    def connect(self) -> FramedSocket:
        """Begin to connect to the peer, send HELLO, and return the socket.

        Raises:
            OSError: the connection cannot be started.
        """

    def withdraw(self) -> None:  # noqa: B027
        """Revoke the peer's access to this process's memory. Call `abort` afterwards."""

    def on_lost(self, reason: str) -> None:  # noqa: B027
        """React to the loss of the connection. By default, do nothing."""

    def post(
        self,
        kind: int,
        payload: bytes,
        transfer: Transfer | None = None,
        *,
        outgoing: Rows | None = None,
        incoming: Rows | None = None,
    ) -> None:
        """Send a message, then the bytes of the rows `outgoing`.

        Bytes that the socket does not accept now are sent later. If the message cannot be sent,
        `transfer` ends in ERR. A lost message without a transfer is logged.

        Args:
            kind: kind of the message.
            payload: payload of the message.
            transfer: transfer that ends when the peer answers, or when `incoming` is filled. None:
                the message needs no answer.
            outgoing: rows whose bytes follow the message; None: no bytes follow.
            incoming: rows to fill with the bytes that the peer sends; None: the peer sends none.
        """
        error = self._post(kind, payload, transfer, outgoing, incoming)
        if error and transfer is not None:
            transfer.end(error)
            self._context.wakeup()
        elif error:
            logger.warning(LOST_NOTIFICATION, self.peer, error)

    def abort(self, reason: str) -> None:
        """Close the connection. All transfers in flight end in ERR, and later posts fail."""
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
            return (
                f"{len(payload)} bytes are more than a frame's {MAX_PAYLOAD_BYTES}: "
                "make several smaller transfers"
            )
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
                self._submit(lambda: self._lose(connection, reason))  # also ends this transfer
                return "" if transfer is not None else reason
            if connection.has_outgoing:
                self._submit(lambda: self._watch_writable(connection))
        return ""

    def _open(self) -> FramedSocket:
        connection = self._socket = self.connect()
        self._submit(lambda: self._watch(connection))
        return connection

    def _submit(self, command: Callable[[], None]) -> None:
        # A closed queue accepts no command. The transports' thread aborts all links at its end.
        with contextlib.suppress(TransportError):
            self._thread.commands.submit(command)

    # Called by the transports' thread

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
                    self._handle_answer(connection, kind, number, payload.decode(errors="replace"))
            self._watch_writable(connection)
        except OSError as error:
            self._lose(connection, f"connection to {self.peer} lost: {error}")

    def _handle_answer(self, connection: FramedSocket, kind: int, number: int, error: str) -> None:
        transfer = self._transfers.pop(number, None)
        if transfer is None:
            return
        with self._lock:
            stopped = connection.stop(number)
        if stopped and not error:
            error = "the peer answered before all bytes were moved"
        if kind == DATA and transfer.notif:  # a READ. The request of a WRITE has the notification
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
        level = logging.WARNING if unsent else logging.INFO
        logger.log(level, "KV transfer with %s ended: %s", self.peer, reason)
        for transfer in transfers.values():
            transfer.end(reason)
        self._context.wakeup()
        self.on_lost(reason)


def encode_request(notif: bytes, iovec: bytes) -> bytes:
    return len(notif).to_bytes(4, "little") + notif + iovec


def decode_request(request: bytes) -> tuple[bytes, bytes]:
    """Return the (notification, iovec) of a READ or WRITE request.

    Raises:
        ValueError: the request is malformed, has no runs, or is too long for one transfer.
    """
    end = 4 + int.from_bytes(request[:4], "little")
    check_iovec(request[end:])
    return request[4:end], request[end:]
