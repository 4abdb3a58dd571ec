"""Transport over UCX, and a lane of its own between processes of one host.

Where the network reads and writes a peer's memory (UCX's rc, dc and gga transports), batches are libucp's gets and puts. Where
UCX would emulate that, as over tcp, they are messages that the owner's progress thread checks and serves (`ucx_messages`).

A peer's death is seen by UCX (endpoint error handling mode PEER: reset connections at once, silent ones by keepalive) and ends
every operation towards it in ERR. That mode has a price: UCX 1.21 has no shared-memory or cross-memory-attach lanes in it. So
host memory of processes of one host moves over `same_host`, if UCX_TLS allows transports of that kind and both sides can.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.transports.base import Descriptors, Operation, Region, Transport
from baton_kv_transfer.transports.lane_protocol import permitted
from baton_kv_transfer.transports.same_host import SameHostLane
from baton_kv_transfer.transports.ucx_operation import UCXOperation
from baton_kv_transfer.transports.ucx_progress import ProgressThread


class _Address(msgspec.Struct, array_like=True):
    worker: bytes
    lane: bytes
    """Empty: only over UCX."""


class UCXTransport(Transport):
    def __init__(self, name: str) -> None:
        self._notifs: deque[tuple[str, bytes]] = deque()
        self._wakeup: Callable[[], None] = lambda: None
        self._vram: list[Region] = []
        self._device_regions: dict[str, list[int]] = {}
        self._progress = ProgressThread(name, self._deliver, self._wake)
        self._lane = SameHostLane(name, self._deliver, self._wake) if permitted(os.environ.get("UCX_TLS")) else None

    @property
    def num_refused(self) -> int:  # type: ignore[override]
        return self._progress.num_refused + (self._lane.num_refused if self._lane else 0)

    def address(self) -> bytes:
        return msgspec.msgpack.encode(_Address(self._progress.address, self._lane.address() if self._lane else b""))

    def register(self, address: int, length: int, mem_type: str = "DRAM", device_id: int = 0) -> Region:
        region = self._progress.register(address, length, mem_type, device_id)
        if mem_type == "VRAM":
            self._vram.append(region)
        elif self._lane:
            self._lane.register(region)
        return region

    def deregister(self, region: Region) -> None:
        if region.mem_type == "VRAM":
            self._vram.remove(region)
        elif self._lane:
            self._lane.deregister(region)
        self._progress.deregister(region)

    def add_peer(self, name: str, address: bytes, regions: list[Region]) -> None:
        decoded = msgspec.msgpack.decode(address, type=_Address)
        self._device_regions[name] = [index for index, region in enumerate(regions) if region.mem_type != "DRAM"]
        self._progress.add_peer(name, decoded.worker, regions)
        if self._lane:
            self._lane.add_peer(name, decoded.lane, regions)

    def remove_peer(self, name: str) -> None:
        self._device_regions.pop(name, None)
        if self._lane:
            self._lane.remove_peer(name)
        self._progress.remove_peer(name)

    def fence(self) -> None:
        if self._lane:
            self._lane.fence()
        self._progress.fence()

    def post(
        self, op: str, peer: str, local: Descriptors, remote: Descriptors, regions: NDArray[np.int64], notif: bytes
    ) -> Operation:
        on_device = self._is_vram(local)
        if self._lane and not on_device:
            operation = self._lane.post(op, peer, local, remote, regions, notif)
            if operation is not None:
                return operation
        device = on_device or bool(np.isin(regions, self._device_regions.get(peer, [])).any())
        posted = UCXOperation(op, peer, local, remote, regions, notif, device)
        self._progress.begin(posted)
        return posted

    def send_notif(self, peer: str, message: bytes) -> None:
        if not (self._lane and self._lane.send_notif(peer, message)):
            self._progress.begin(UCXOperation("NOTIF", peer, notif=message))

    def take_notifs(self) -> list[tuple[str, bytes]]:
        return [self._notifs.popleft() for _ in range(len(self._notifs))]

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        self._wakeup = wakeup

    def close(self) -> None:
        if self._lane:
            self._lane.close()
        self._progress.close()

    def _is_vram(self, local: Descriptors) -> bool:
        """The rows of one list are of one memory type."""
        address = int(local[0, 0])
        return any(region.address <= address < region.address + region.length for region in self._vram)

    def _deliver(self, sender: str, message: bytes) -> None:
        self._notifs.append((sender, message))
        self._wakeup()

    def _wake(self) -> None:
        self._wakeup()
