"""Transport inside one process: a transfer is a memmove done by the caller. For tests and loopback."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.transports.base import Descriptors, Operation, Region, Transport, TransportError, XferState

_lock = threading.Lock()
_transports: dict[bytes, InprocTransport] = {}
_serial = itertools.count()


class _Ended(Operation):
    def __init__(self, error: str = "") -> None:
        self.error = error

    @property
    def state(self) -> XferState:
        return XferState.ERR if self.error else XferState.DONE


class InprocTransport(Transport):
    def __init__(self, name: str) -> None:
        self._name = name
        self._peers: dict[str, bytes] = {}
        self._regions: list[Region] = []
        self._memory_lock = threading.Lock()  # held while a peer touches this side's memory
        self._notifs: deque[tuple[str, bytes]] = deque()
        self._wakeup: Callable[[], None] = lambda: None
        self._closed = False
        self._listen()

    def address(self) -> bytes:
        return self._address

    def register(self, address: int, length: int, mem_type: str = "DRAM", device_id: int = 0) -> Region:
        if mem_type != "DRAM":
            raise ValueError(f"the inproc transport moves host memory only (DRAM), got {mem_type}")
        region = Region(address, length, device_id=device_id)
        with self._memory_lock:
            self._regions.append(region)
        return region

    def deregister(self, region: Region) -> None:
        with self._memory_lock:
            self._regions.remove(region)

    def add_peer(self, name: str, address: bytes, regions: list[Region]) -> None:
        self._peers[name] = address

    def remove_peer(self, name: str) -> None:
        self._peers.pop(name, None)

    def fence(self) -> None:
        if self._closed:
            raise TransportError("the transport is closed")
        with self._memory_lock:  # a peer's copy under way ends first
            self._hang_up()
            self._peers.clear()
            self._listen()

    def post(
        self, op: str, peer: str, local: Descriptors, remote: Descriptors, regions: NDArray[np.int64], notif: bytes
    ) -> Operation:
        error = self._copy(op, peer, local, remote)
        if notif and not error:
            self.send_notif(peer, notif)
        self._wakeup()
        return _Ended(error)

    def send_notif(self, peer: str, message: bytes) -> None:
        target = self._find(peer)
        if target is None:
            raise TransportError(f"peer {peer} is gone: remove_remote_agent and add it again")
        target.deliver(self._name, message)

    def deliver(self, sender: str, message: bytes) -> None:
        self._notifs.append((sender, message))
        self._wakeup()

    def take_notifs(self) -> list[tuple[str, bytes]]:
        return [self._notifs.popleft() for _ in range(len(self._notifs))]

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        self._wakeup = wakeup

    def close(self) -> None:
        with self._memory_lock:
            self._closed = True
            self._hang_up()

    def _listen(self) -> None:
        self._address = b"inproc-%d" % next(_serial)
        with _lock:
            _transports[self._address] = self

    def _hang_up(self) -> None:
        with _lock:
            _transports.pop(self._address, None)

    def _find(self, peer: str) -> InprocTransport | None:
        """Who answers at the address under which the peer is known; None: nobody."""
        if self._closed:
            raise TransportError("the transport is closed")
        with _lock:
            return _transports.get(self._peers.get(peer, b""))

    def _copy(self, op: str, peer: str, local: Descriptors, remote: Descriptors) -> str:
        """Returns why it could not."""
        target = self._find(peer)
        if target is None:
            return f"peer {peer} is gone"
        with target._memory_lock:
            if self._find(peer) is not target:
                return f"peer {peer} is gone"
            rows = remote.tolist()
            if refused := sum(not target._is_registered(address, length) for address, length, _ in rows):
                target.num_refused += refused
                return f"peer {peer} refused {refused} descriptors outside its registered memory"
            for (mine, length, _), (theirs, _, _) in zip(local.tolist(), rows, strict=True):
                if op == "READ":
                    ctypes.memmove(mine, theirs, length)
                else:
                    ctypes.memmove(theirs, mine, length)
        return ""

    def _is_registered(self, address: int, length: int) -> bool:
        return any(r.address <= address and address + length <= r.address + r.length for r in self._regions)
