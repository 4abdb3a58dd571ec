"""What a transport is to the agent: registered memory, peers, one-sided operations and notifications."""

from __future__ import annotations

import abc
import contextlib
import enum
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Descriptors = NDArray[np.int64]
"""[n, 3]: address, length in bytes, device id (0: host)."""

MEM_TYPES = ("DRAM", "VRAM")
"""NIXL's names: host memory, GPU memory."""


class TransportError(RuntimeError):
    """A transport call failed; nothing was started."""


class XferState(enum.StrEnum):
    """NIXL's names."""

    DONE = "DONE"
    PROC = "PROC"
    ERR = "ERR"


@dataclass(frozen=True, slots=True)
class Region:
    """One registered piece of memory."""

    address: int
    length: int
    mem_type: str = "DRAM"
    """One of MEM_TYPES."""
    device_id: int = 0


class Operation(abc.ABC):
    """A posted batch of reads or writes."""

    error: str = ""
    """Set before the state becomes ERR."""

    @property
    @abc.abstractmethod
    def state(self) -> XferState:
        """Never PROC again once it left it; then the local memory is not touched any more."""


class Transport(abc.ABC):
    """Methods may be called from any thread and do not wait for peers."""

    num_refused: int = 0
    """Descriptors that peers named, this side was to execute, and refused: they were outside registered memory."""

    @property
    def bytes_moved(self) -> dict[str, int]:
        """Bytes sent and received so far, by transport and lane, such as `ucx tcp/lo`."""
        return {}

    @abc.abstractmethod
    def address(self) -> bytes:
        """What a peer needs to connect."""

    @abc.abstractmethod
    def register(self, address: int, length: int, mem_type: str = "DRAM", device_id: int = 0) -> Region:
        """
        Raises:
            ValueError: the transport does not move memory of this type here.
        """

    @abc.abstractmethod
    def deregister(self, region: Region) -> None: ...

    @abc.abstractmethod
    def add_peer(self, name: str, address: bytes, regions: list[Region]) -> None:
        """Makes a peer known; connecting waits for the first use."""

    @abc.abstractmethod
    def remove_peer(self, name: str) -> None:
        """Disconnects; operations in flight end in ERR."""

    @abc.abstractmethod
    def fence(self) -> None:
        """Cuts all peers off: when it returns, nothing that a peer began still reaches registered memory.

        Operations in flight ended in ERR, all peers are forgotten, `address()` is another one. Memory stays registered.
        """

    @abc.abstractmethod
    def post(
        self, op: str, peer: str, local: Descriptors, remote: Descriptors, regions: NDArray[np.int64], notif: bytes
    ) -> Operation:
        """Starts `op` (READ or WRITE) between rows of equal length; `notif` follows once all of them ended well.

        Args:
            local, remote: [n, 3], checked by the agent.
            regions: [n], index of the peer's region that holds each remote row.
        """

    @abc.abstractmethod
    def send_notif(self, peer: str, message: bytes) -> None: ...

    @abc.abstractmethod
    def take_notifs(self) -> list[tuple[str, bytes]]:
        """(sender, message) since the last call, in order per sender."""

    @abc.abstractmethod
    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """`wakeup` is called, from any thread, after an operation ended or a notification arrived; but see `waiting`."""

    def waiting(self) -> AbstractContextManager[int | None]:
        """For a user about to sleep until `wakeup` is called: what is on the way then has one thread less to wake.

        Gives a descriptor, or None, to poll within it beside the user's own; once it is readable, leave. On leaving, the caller
        does what came up, a turn of the lanes at most, and then looks for what ended or arrived: `wakeup` is not called for what
        came up so. Of two users at once the second gets None.
        """
        return contextlib.nullcontext()

    @abc.abstractmethod
    def close(self) -> None:
        """Ends everything: operations in flight end in ERR. Idempotent."""
