"""Lanes: ways to move bytes to peers, of which an agent has one or more on one thread."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Callable

from baton_kv_transfer.transports.iovec import RUN_BYTES, count_outside
from baton_kv_transfer.transports.transfer import Region, Transfer
from baton_kv_transfer.transports.transport_thread import TransportThread


class TransportContext:
    """What a transport has of its agent: the thread, the memory that peers may use, and where news goes."""

    def __init__(
        self,
        thread: TransportThread,
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
        return (
            f"{outside} of {count} descriptors are outside the memory registered there"
            if outside
            else ""
        )


class Transport(abc.ABC):
    """`forget_region`, `fence` and `end` belong to the thread, the others are for any."""

    mem_types: tuple[str, ...] = ("DRAM",)
    """What it moves."""
    address: bytes
    """What a peer needs to connect."""

    def __init__(self, context: TransportContext) -> None:
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
        """See Agent."""

    @abc.abstractmethod
    def end(self) -> None:
        """The thread's last act."""
