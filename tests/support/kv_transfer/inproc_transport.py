"""A transport inside one process. The thread that starts a transfer copies the bytes.

For the tests of agents.
"""

from __future__ import annotations

import ctypes
import itertools
import threading

from baton_kv_transfer.transports.iovec import pack
from baton_kv_transfer.transports.transfer import Region, Transfer
from baton_kv_transfer.transports.transport import Transport, TransportContext

_lock = threading.Lock()
_transports: dict[bytes, InprocTransport] = {}
_serial = itertools.count()


class InprocTransport(Transport):
    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._peers: dict[str, bytes] = {}
        self._memory_lock = threading.Lock()  # held while a peer accesses this side's memory
        self._listen()

    def forget_region(self, region: Region) -> None:
        with self._memory_lock:  # a peer's running copy ends first
            pass

    def add_peer(self, name: str, address: bytes) -> None:
        self._peers[name] = address

    def remove_peer(self, name: str) -> None:
        self._peers.pop(name, None)

    def begin(self, transfer: Transfer) -> bool:
        error = self._copy(transfer)
        if transfer.notif and not error:
            self.send_notif(transfer.peer, transfer.notif)
        transfer.end(error)
        self._context.wakeup()
        return True

    def send_notif(self, name: str, message: bytes) -> bool:
        target = self._find(name)
        if target is not None:
            target._context.deliver(self._context.name, message)
        return target is not None

    def fence(self) -> None:
        self.close()
        self._peers.clear()
        self._listen()

    def close(self) -> None:
        with self._memory_lock, _lock:
            _transports.pop(self.address, None)

    def _listen(self) -> None:
        self.address = b"inproc-%d" % next(_serial)
        with _lock:
            _transports[self.address] = self

    def _find(self, peer: str) -> InprocTransport | None:
        """Return the transport at the peer's address; None if the peer is unknown or has ended."""
        with _lock:
            return _transports.get(self._peers.get(peer, b""))

    def _copy(self, transfer: Transfer) -> str:
        """Copy the rows of a transfer. Return the error, or an empty text."""
        target = self._find(transfer.peer)
        if target is None:
            return f"peer {transfer.peer} is gone"
        with target._memory_lock:
            if self._find(transfer.peer) is not target:
                return f"peer {transfer.peer} is gone"
            if refusal := target._context.refuse(pack(transfer.remote)):
                return refusal
            for (mine, length, _), (theirs, _, _) in zip(
                transfer.local.tolist(), transfer.remote.tolist(), strict=True
            ):
                source, destination = (theirs, mine) if transfer.op == "READ" else (mine, theirs)
                ctypes.memmove(destination, source, length)
        return ""
