"""The asking side of a lane: requests, data and notifications to one peer, and what it answers, over one connection at a time."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from baton_kv_transfer.transports.base import TransportError
from baton_kv_transfer.transports.framed_socket import DATA, MAX_PAYLOAD_BYTES, FramedSocket
from baton_kv_transfer.transports.lane_protocol import ANSWER, NOTIF
from baton_kv_transfer.transports.lane_thread import LaneThread
from baton_kv_transfer.transports.rows import Rows
from baton_kv_transfer.transports.transfer import Transfer

logger = logging.getLogger(__name__)


class Link:
    """`post` is for any thread, the rest belongs to the lane's. The first post connects, and the first after a loss."""

    def __init__(
        self,
        thread: LaneThread,
        peer: str,
        connect: Callable[[], FramedSocket],
        wakeup: Callable[[], None],
        lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """
        Args:
            connect: begins a connection, and says hello; raises OSError.
            wakeup: called after a transfer ended.
            lost: called by the thread with why a connection ended.
        """
        self._thread = thread
        self._peer = peer
        self._connect = connect
        self._wakeup = wakeup
        self._lost = lost
        self._lock = threading.RLock()
        self._error = ""
        self._socket: FramedSocket | None = None
        self._transfers: dict[int, Transfer] = {}
        self._next_number = 0

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
            self._wakeup()
        elif error:
            logger.warning("notification to %s was lost: %s", self._peer, error)

    def give_up(self, reason: str) -> None:
        """Ends all that is under way; later posts end at once."""
        with self._lock:
            self._error = self._error or reason
            connection = self._socket
        if connection is not None:
            self._lose(connection, self._error)

    def _post(
        self, kind: int, payload: bytes, transfer: Transfer | None, outgoing: Rows | None, incoming: Rows | None
    ) -> str:
        if len(payload) > MAX_PAYLOAD_BYTES:
            return f"{len(payload)} bytes are more than a frame's {MAX_PAYLOAD_BYTES}: make several smaller transfers"
        with self._lock:
            if self._error:
                return self._error
            try:
                connection = self._socket or self._open()
            except OSError as failure:
                return f"no connection to {self._peer}: {failure}"
            self._next_number += 1
            number = self._next_number
            if transfer is not None:
                self._transfers[number] = transfer
            if incoming is not None:
                connection.expect(number, incoming)
            try:
                connection.send(kind, number, payload, outgoing)
            except OSError as failure:
                reason = f"connection to {self._peer} lost: {failure}"
                self._tell(lambda: self._lose(connection, reason))  # ends this one, too
                return "" if transfer is not None else reason
            if connection.has_outgoing:
                self._tell(lambda: self._watch_writable(connection))
        return ""

    def _open(self) -> FramedSocket:
        connection = self._socket = self._connect()
        self._tell(lambda: self._watch(connection))
        return connection

    def _tell(self, command: Callable[[], None]) -> None:
        with contextlib.suppress(TransportError):  # closed: the thread gives up all links last
            self._thread.mailbox.submit(command)

    # -- the lane's thread

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
            self._lose(connection, f"connection to {self._peer} lost: {error}")

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
        transfer.end(error and f"{transfer.op} of {self._peer}'s memory: {error}")
        self._wakeup()

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
        self._wakeup()
        self._lost(reason)
