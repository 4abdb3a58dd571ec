"""What agents and transports have in common: memory, the states of transfers, errors."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Descriptors = NDArray[np.int64]
"""[n, 3]: address, length in bytes, device id (0: host)."""

MEM_TYPES = ("DRAM", "VRAM")
"""NIXL's names: host memory, GPU memory."""


class TransportError(RuntimeError):
    """A transport call failed; nothing was started."""


class CopyError(RuntimeError):
    """Another process's memory could not be read. The text says why."""


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


class Post:
    """A transfer that was posted."""

    def __init__(self) -> None:
        self.error = ""
        """Set before the state becomes ERR."""
        self.state = XferState.PROC
        """Never PROC again once it left it; then the local memory is not touched any more."""

    def end(self, error: str = "") -> None:
        """Only the first call counts; by whoever moves the bytes, once the local memory is not touched any more."""
        if self.state is XferState.PROC:
            self.error = error
            self.state = XferState.ERR if error else XferState.DONE


class Transfer(Post):
    """A posted batch of reads or writes, whichever way it goes."""

    def __init__(
        self,
        op: str,
        peer: str,
        local: Descriptors,
        remote: Descriptors,
        regions: NDArray[np.int64],
        notif: bytes,
    ) -> None:
        """
        Args:
            op: READ or WRITE.
            local, remote: [n, 3], rows of equal length.
            regions: [n], index of the peer's region that holds each remote row.
            notif: follows once all of them ended well; empty: none.
        """
        super().__init__()
        self.op, self.peer, self.notif = op, peer, notif
        self.local, self.remote, self.regions = local, remote, regions
