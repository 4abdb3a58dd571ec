"""Memory regions, transfers and errors, which agents and transports share."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: [n, 3]: address, length in bytes, and device id (index of the GPU; 0 for host memory).
Descriptors = NDArray[np.int64]

#: NIXL's names for host memory and GPU memory.
MEM_TYPES = ("DRAM", "VRAM")

#: Warning in the log. Arguments: name of the peer, error.
LOST_NOTIFICATION = (
    "a KV transfer notification to %s was lost and is not sent again; a load that waits for it "
    "fails after the peer's kv_transfer.load_timeout_s: %s"
)


class TransportError(RuntimeError):
    """A call of a transport or an agent failed. After a timeout, the call may still take effect."""


class CopyError(RuntimeError):
    """The memory of another process could not be read. The message gives the reason."""


class XferState(enum.StrEnum):
    """States of a transfer, with NIXL's names."""

    DONE = "DONE"
    PROC = "PROC"
    ERR = "ERR"


@dataclass(frozen=True, slots=True)
class Region:
    """A registered range of memory."""

    address: int
    length: int
    #: One of MEM_TYPES.
    mem_type: str = "DRAM"
    device_id: int = 0


class Post:
    """State and error of a posted transfer."""

    def __init__(self) -> None:
        #: Why the state is ERR; else empty. The error is set before the state.
        self.error = ""
        #: After DONE or ERR the state does not change, and the local memory is not touched.
        self.state = XferState.PROC

    def end(self, error: str = "") -> None:
        """Set the final state: ERR if there is an error, else DONE. A second call has no effect.

        Before the call, the transport must have stopped using the local memory for this post.
        """
        if self.state is XferState.PROC:
            self.error = error
            self.state = XferState.ERR if error else XferState.DONE


class Transfer(Post):
    """A posted batch of reads or writes."""

    def __init__(
        self,
        op: str,
        peer: str,
        local: Descriptors,
        remote: Descriptors,
        notif: bytes,
    ) -> None:
        """Create a transfer in the state PROC.

        Args:
            op: READ or WRITE.
            peer: name of the peer.
            local: rows of local memory, [n, 3].
            remote: rows of the peer's memory with the same lengths, [n, 3].
            notif: notification for the peer, sent when all rows were moved; empty for none.
        """
        super().__init__()
        self.op, self.peer, self.notif = op, peer, notif
        self.local, self.remote = local, remote
