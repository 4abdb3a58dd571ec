"""A transport over lanes: ways to move bytes that share one thread. Each batch takes the first lane that moves it."""

from __future__ import annotations

import abc
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.transports.base import Descriptors, Operation, Region, Transport, TransportError
from baton_kv_transfer.transports.iovec import RUN_BYTES, count_outside
from baton_kv_transfer.transports.lane_thread import LaneThread
from baton_kv_transfer.transports.transfer import Transfer


class LaneContext:
    """What a lane has of its transport: the thread, the memory that peers may use, and where news goes."""

    def __init__(
        self,
        thread: LaneThread,
        name: str,
        host: str,
        deliver: Callable[[str, bytes], None],
        wakeup: Callable[[], None],
    ) -> None:
        """
        Args:
            thread: not started yet.
            name: of the agent.
            host: address to listen at, and to be reached at.
            deliver: called by the thread with (sender, notification).
            wakeup: called after a transfer ended.
        """
        self.thread, self.name, self.host = thread, name, host
        self.deliver, self.wakeup = deliver, wakeup
        self.regions: list[Region] = []
        self.num_refused = 0
        self.moved: Counter[str] = Counter()
        """Bytes, by what carried them."""

    def refuse(self, iovec: bytes) -> str:
        """Why a peer's request is refused; empty: all its runs are in registered memory."""
        outside = count_outside(iovec, self.regions)
        self.num_refused += outside
        count = len(iovec) // RUN_BYTES
        return f"{outside} of {count} descriptors are outside the memory registered there" if outside else ""


class Lane(abc.ABC):
    """`forget_region`, `fence` and `end` belong to the thread, the others are for any."""

    mem_types: tuple[str, ...] = ("DRAM",)
    """What it moves."""
    address: bytes
    """What a peer needs to connect."""

    def __init__(self, context: LaneContext) -> None:
        self._context = context
        self._thread = context.thread

    @abc.abstractmethod
    def forget_region(self, region: Region) -> None:
        """It was deregistered: when this returns, nothing of a peer reaches it any more."""

    @abc.abstractmethod
    def add_peer(self, name: str, address: bytes) -> None:
        """Raises ValueError or msgspec.DecodeError: not an address."""

    @abc.abstractmethod
    def remove_peer(self, name: str) -> None: ...

    @abc.abstractmethod
    def begin(self, transfer: Transfer) -> bool:
        """False: it does not reach the peer; the transfer is as it was."""

    @abc.abstractmethod
    def send_notif(self, name: str, message: bytes) -> bool:
        """False: it does not reach the peer."""

    @abc.abstractmethod
    def fence(self) -> None:
        """See Transport."""

    @abc.abstractmethod
    def end(self) -> None:
        """The thread's last act."""


class LaneTransport(Transport):
    def __init__(self, name: str, host: str, kinds: dict[str, type[Lane]]) -> None:
        """
        Args:
            kinds: lanes by name, in order of preference.

        Raises:
            What the lanes' constructors raise.
        """
        self._name = name
        self._notifs: deque[tuple[str, bytes]] = deque()
        self._wakeup: Callable[[], None] = lambda: None
        self._peers: dict[str, list[Region]] = {}
        self._thread = LaneThread(f"kv-{name}")
        self._contexts: dict[str, LaneContext] = {}
        self._lanes: dict[str, Lane] = {}
        try:
            for kind, lane in kinds.items():
                self._contexts[kind] = LaneContext(self._thread, name, host, self._deliver, self._wake)
                self._lanes[kind] = lane(self._contexts[kind])
        except BaseException:
            self._thread.close()
            raise
        self._thread.start(self._end_lanes)

    @property
    def num_refused(self) -> int:  # type: ignore[override]
        return sum(context.num_refused for context in self._contexts.values())

    @property
    def bytes_moved(self) -> dict[str, int]:
        return {
            f"{kind} {lane}": nbytes
            for kind, context in self._contexts.items()
            for lane, nbytes in context.moved.copy().items()
        }

    def address(self) -> bytes:
        return msgspec.msgpack.encode({kind: lane.address for kind, lane in self._lanes.items()})

    def register(self, address: int, length: int, mem_type: str = "DRAM", device_id: int = 0) -> Region:
        lanes = [kind for kind, lane in self._lanes.items() if mem_type in lane.mem_types]
        if not lanes:
            raise ValueError(
                f"{' and '.join(self._lanes)} cannot move {mem_type} here: GPU memory needs transport ucx or auto, an NVIDIA "
                f"driver, and a UCX with CUDA (cuda_copy in UCX_TLS where that is set)"
            )
        region = Region(address, length, mem_type, device_id)
        self._thread.mailbox.call(lambda: self._add_region(region, lanes))
        return region

    def deregister(self, region: Region) -> None:
        self._thread.mailbox.call(lambda: self._forget_region(region))

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
        self._thread.mailbox.call(lambda: [lane.fence() for lane in self._lanes.values()])

    def post(
        self, op: str, peer: str, local: Descriptors, remote: Descriptors, regions: NDArray[np.int64], notif: bytes
    ) -> Operation:
        transfer = Transfer(op, peer, local, remote, regions, notif)
        mem_type = "VRAM" if self._uses_device(transfer) else "DRAM"
        if not any(mem_type in lane.mem_types and lane.begin(transfer) for lane in self._lanes.values()):
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

    def _add_region(self, region: Region, lanes: list[str]) -> None:
        for kind in lanes:
            self._contexts[kind].regions.append(region)

    def _forget_region(self, region: Region) -> None:
        for kind, context in self._contexts.items():
            if region in context.regions:
                context.regions.remove(region)
                self._lanes[kind].forget_region(region)

    def _uses_device(self, transfer: Transfer) -> bool:
        """Rows of one list are of one memory type here; a peer's may be of several."""
        address = int(transfer.local[0, 0])
        for region in [region for context in self._contexts.values() for region in context.regions]:
            if region.mem_type != "DRAM" and 0 <= address - region.address < region.length:
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
