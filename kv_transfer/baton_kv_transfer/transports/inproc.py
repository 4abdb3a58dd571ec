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
        self._address = b"inproc-%d" % next(_serial)
        self._peers: dict[str, bytes] = {}
        self._notifs: deque[tuple[str, bytes]] = deque()
        self._wakeup: Callable[[], None] = lambda: None
        with _lock:
            _transports[self._address] = self

    def address(self) -> bytes:
        return self._address

    def register(self, address: int, length: int) -> Region:
        return Region(address, length)

    def deregister(self, region: Region) -> None:
        pass

    def add_peer(self, name: str, address: bytes, regions: list[Region]) -> None:
        self._peers[name] = address

    def remove_peer(self, name: str) -> None:
        self._peers.pop(name, None)

    def post(
        self, op: str, peer: str, local: Descriptors, remote: Descriptors, regions: NDArray[np.int64], notif: bytes
    ) -> Operation:
        target = self._find(peer)
        if target is None:
            return self._ended(f"peer {peer} is gone")
        for (mine, length, _), (theirs, _, _) in zip(local.tolist(), remote.tolist(), strict=True):
            if op == "READ":
                ctypes.memmove(mine, theirs, length)
            else:
                ctypes.memmove(theirs, mine, length)
        if notif:
            target.deliver(self._name, notif)
        return self._ended()

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
        with _lock:
            _transports.pop(self._address, None)

    def _find(self, peer: str) -> InprocTransport | None:
        with _lock:
            return _transports.get(self._peers.get(peer, b""))

    def _ended(self, error: str = "") -> Operation:
        self._wakeup()
        return _Ended(error)
