"""The interface of a transport, which moves bytes between an agent and its peers.

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
    """What an agent shares with one transport: thread, memory, callbacks and counters."""

    def __init__(
        self,
        thread: TransportThread,
        name: str,
        host: str,
        deliver: Callable[[str, bytes], None],
        wakeup: Callable[[], None],
    ) -> None:
        """Create a context without registered memory.

        Args:
            thread: the agent's thread, not started yet.
            name: name of the agent.
            host: address at which the transport listens for peers.
            deliver: called with (sender, notification) when a notification arrives.
            wakeup: called after a transfer has ended.
        """
        self.thread, self.name, self.host = thread, name, host
        self.deliver, self.wakeup = deliver, wakeup
        #: Registered memory of the agent that this transport moves.
        self.regions: list[Region] = []
        #: Number of descriptors in peers' requests that were outside `regions`.
        self.num_refused = 0
        #: See Agent.failure.
        self.failure = ""
        #: Bytes moved, by the mechanism and the device that moved them, such as `tcp/lo`.
        self.bytes_moved: Counter[str] = Counter()

    def refuse(self, iovec: bytes) -> str:
        """Return why a peer's request is refused; empty if all its runs are in registered memory.

        The number of runs outside registered memory is added to `num_refused`.
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
    """A mechanism that moves bytes to and from peers.

    Only the agent's thread calls `forget_region`, `fence` and `close`. Any thread may call the
    other methods.
    """

    #: Types of memory that this transport moves.
    mem_types: tuple[str, ...] = ("DRAM",)
    #: Packed data with which a peer can connect.
    address: bytes

    def __init__(self, context: TransportContext) -> None:
        self._context = context
        self._thread = context.thread

    @abc.abstractmethod
    def forget_region(self, region: Region) -> None:
        """End the operations of peers on a deregistered region.

        After the return, no operation of a peer reaches the region.
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
        """Begin a transfer; return False if this transport cannot reach the peer.

        If the result is False, the transfer is unchanged.
        """

    @abc.abstractmethod
    def send_notif(self, name: str, message: bytes) -> bool:
        """Send a notification; return False if this transport cannot reach the peer."""

    @abc.abstractmethod
    def fence(self) -> None:
        """Cut all peers off. See Agent.fence."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the transport. The agent's thread calls this just before the thread ends."""
