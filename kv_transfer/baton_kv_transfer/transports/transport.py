"""The interface of a transport: a way to move bytes to peers.

An agent has one or more transports, which share a thread.
"""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Callable

from baton_kv_transfer.transports.iovec import RUN_BYTES, count_outside
from baton_kv_transfer.transports.transfer import Region, Transfer
from baton_kv_transfer.transports.transport_thread import TransportThread


class TransportContext:
    """What an agent gives each of its transports: the thread, the memory, and where events go."""

    def __init__(
        self,
        thread: TransportThread,
        name: str,
        host: str,
        deliver: Callable[[str, bytes], None],
        wakeup: Callable[[], None],
    ) -> None:
        """Start without memory.

        Args:
            thread: not started yet.
            name: name of the agent.
            host: address at which to listen and to be reached.
            deliver: called by the thread with (sender, notification).
            wakeup: called after a transfer ended.
        """
        self.thread, self.name, self.host = thread, name, host
        self.deliver, self.wakeup = deliver, wakeup
        self.regions: list[Region] = []
        self.num_refused = 0
        #: See Agent.failure.
        self.failure = ""
        #: Bytes by lane: by the device or mechanism that moved them.
        self.moved: Counter[str] = Counter()

    def refuse(self, iovec: bytes) -> str:
        """Return why a peer's request is refused, or an empty string.

        All its runs must be in registered memory.
        """
        outside = count_outside(iovec, self.regions)
        self.num_refused += outside
        count = len(iovec) // RUN_BYTES
        return (
            f"{outside} of {count} descriptors are outside the memory registered there"
            if outside
            else ""
        )


class Transport(abc.ABC):
    """A transport.

    The thread calls `forget_region`, `fence` and `end`; any thread calls the others.
    """

    #: Types of memory that it moves.
    mem_types: tuple[str, ...] = ("DRAM",)
    #: What a peer needs to connect, packed.
    address: bytes

    def __init__(self, context: TransportContext) -> None:
        self._context = context
        self._thread = context.thread

    @abc.abstractmethod
    def forget_region(self, region: Region) -> None:
        """Stop the use of a deregistered region.

        After this returns, no operation of a peer reaches it.
        """

    @abc.abstractmethod
    def add_peer(self, name: str, address: bytes) -> None:
        """Add a peer or replace its address.

        Raises:
            ValueError: the address is invalid.
            msgspec.DecodeError: the address cannot be decoded.
        """

    @abc.abstractmethod
    def remove_peer(self, name: str) -> None: ...

    @abc.abstractmethod
    def begin(self, transfer: Transfer) -> bool:
        """Begin a transfer; return False if the peer cannot be reached.

        The transfer is unchanged then.
        """

    @abc.abstractmethod
    def send_notif(self, name: str, message: bytes) -> bool:
        """Send a notification; return False if the peer cannot be reached."""

    @abc.abstractmethod
    def fence(self) -> None:
        """Cut all peers off. See Agent.fence."""

    @abc.abstractmethod
    def end(self) -> None:
        """Close everything. Called last, by the thread."""
