"""A transport over lanes: ways to move bytes that share one thread. Each batch takes the first lane that moves it."""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.transports.base import Descriptors, Operation, Region, Transport, TransportError
from baton_kv_transfer.transports.lane_thread import LaneThread
from baton_kv_transfer.transports.transfer import Transfer


class Lane(abc.ABC):
    """Methods may be called from any thread, save `end`. Constructors take

    Args:
        thread: not started yet.
        name: of the agent.
        host: address to listen at, and to be reached at.
        deliver: called by the thread with (sender, notification).
        wakeup: called after a transfer ended.
    """

    mem_types: tuple[str, ...] = ("DRAM",)
    """What it moves."""

    @property
    @abc.abstractmethod
    def num_refused(self) -> int:
        """See Transport."""

    @property
    @abc.abstractmethod
    def bytes_moved(self) -> dict[str, int]:
        """See Transport."""

    @abc.abstractmethod
    def address(self) -> bytes:
        """What a peer needs to connect."""

    @abc.abstractmethod
    def register(self, region: Region) -> None:
        """Peers may use it from here on."""

    @abc.abstractmethod
    def deregister(self, region: Region) -> None:
        """When this returns, nothing of a peer reaches it any more."""

    @abc.abstractmethod
    def add_peer(self, name: str, address: bytes) -> None:
        """Raises ValueError or msgspec.DecodeError: not an address."""

    @abc.abstractmethod
    def remove_peer(self, name: str) -> None: ...

    @abc.abstractmethod
    def begin(self, transfer: Transfer) -> bool:
        """False: it does not move this one; the transfer is as it was."""

    @abc.abstractmethod
    def send_notif(self, name: str, message: bytes) -> bool:
        """False: it does not reach the peer."""

    @abc.abstractmethod
    def fence(self) -> None:
        """See Transport."""

    @abc.abstractmethod
    def end(self) -> None:
        """The thread's last act."""


LaneFactory = Callable[[LaneThread, str, str, Callable[[str, bytes], None], Callable[[], None]], Lane]


class LaneTransport(Transport):
    def __init__(self, name: str, host: str, factories: dict[str, LaneFactory]) -> None:
        """
        Args:
            factories: name of each lane -> makes it, in order of preference.

        Raises:
            What the lanes' constructors raise.
        """
        self._name = name
        self._notifs: deque[tuple[str, bytes]] = deque()
        self._wakeup: Callable[[], None] = lambda: None
        self._device_memory: list[Region] = []
        self._peers: dict[str, list[Region]] = {}
        self._thread = LaneThread(f"kv-{name}")
        self._lanes: dict[str, Lane] = {}
        try:
            for kind, create in factories.items():
                self._lanes[kind] = create(self._thread, name, host, self._deliver, self._wake)
        except BaseException:
            self._thread.close()
            raise
        self._thread.start(self._end_lanes)

    @property
    def num_refused(self) -> int:  # type: ignore[override]
        return sum(lane.num_refused for lane in self._lanes.values())

    @property
    def bytes_moved(self) -> dict[str, int]:
        return {key: nbytes for lane in self._lanes.values() for key, nbytes in lane.bytes_moved.items()}

    def address(self) -> bytes:
        return msgspec.msgpack.encode({kind: lane.address() for kind, lane in self._lanes.items()})

    def register(self, address: int, length: int, mem_type: str = "DRAM", device_id: int = 0) -> Region:
        lanes = self._lanes_for(mem_type)
        if not lanes:
            raise ValueError(
                f"{' and '.join(self._lanes)} cannot move {mem_type} here: GPU memory needs transport ucx or auto, an NVIDIA "
                f"driver, and a UCX with CUDA (cuda_copy in UCX_TLS where that is set)"
            )
        region = Region(address, length, mem_type=mem_type, device_id=device_id)
        for lane in lanes:
            lane.register(region)
        if mem_type != "DRAM":
            self._device_memory.append(region)
        return region

    def deregister(self, region: Region) -> None:
        for lane in self._lanes_for(region.mem_type):
            lane.deregister(region)
        if region.mem_type != "DRAM":
            self._device_memory.remove(region)

    def add_peer(self, name: str, address: bytes, regions: list[Region]) -> None:
        try:
            addresses = msgspec.msgpack.decode(address, type=dict[str, bytes])
            for kind, lane in self._lanes.items():
                if kind in addresses:
                    lane.add_peer(name, addresses[kind])
        except msgspec.DecodeError as error:
            raise ValueError(f"agent {name} has no address that this release understands: {error}") from error
        self._peers[name] = regions

    def remove_peer(self, name: str) -> None:
        self._peers.pop(name, None)
        for lane in self._lanes.values():
            lane.remove_peer(name)

    def fence(self) -> None:
        self._peers.clear()
        for lane in self._lanes.values():
            lane.fence()

    def post(
        self, op: str, peer: str, local: Descriptors, remote: Descriptors, regions: NDArray[np.int64], notif: bytes
    ) -> Operation:
        transfer = Transfer(op, peer, local, remote, regions, notif)
        mem_type = "VRAM" if self._uses_device(transfer) else "DRAM"
        if not any(lane.begin(transfer) for lane in self._lanes_for(mem_type)):
            transfer.end(
                f"{op} of {peer}'s memory ({mem_type}): none of {', '.join(self._lanes)} leads there from {self._name}; "
                f"both sides need one in common"
            )
            self._wake()
        return transfer

    def send_notif(self, peer: str, message: bytes) -> None:
        if not any(lane.send_notif(peer, message) for lane in self._lanes.values()):
            raise TransportError(f"agent {peer} is not reached: add_remote_agent first")

    def take_notifs(self) -> list[tuple[str, bytes]]:
        return [self._notifs.popleft() for _ in range(len(self._notifs))]

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        self._wakeup = wakeup

    def waiting(self) -> AbstractContextManager[int | None]:
        return self._thread.waiting()

    def close(self) -> None:
        self._thread.close()

    def _lanes_for(self, mem_type: str) -> list[Lane]:
        return [lane for lane in self._lanes.values() if mem_type in lane.mem_types]

    def _uses_device(self, transfer: Transfer) -> bool:
        """Rows of one list are of one memory type here; a peer's may be of several."""
        address = int(transfer.local[0, 0])
        if any(0 <= address - region.address < region.length for region in self._device_memory):
            return True
        theirs = [index for index, region in enumerate(self._peers.get(transfer.peer, [])) if region.mem_type != "DRAM"]
        return bool(theirs and np.isin(transfer.regions, theirs).any())

    def _end_lanes(self) -> None:
        for lane in self._lanes.values():
            lane.end()

    def _deliver(self, sender: str, message: bytes) -> None:
        self._notifs.append((sender, message))
        self._wake()

    def _wake(self) -> None:
        if self._thread.on_news():
            self._wakeup()
