"""What the progress thread works on: a posted batch of reads or writes, a notification, or something done for a peer."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.transports.base import Descriptors, Operation, XferState
from baton_kv_transfer.transports.ucx_endpoints import Endpoint
from baton_kv_transfer.transports.ucx_messages import Outgoing, Request

NOTHING = np.zeros((0, 3), dtype=np.int64)


class UCXOperation(Operation):
    """Touched by the progress thread only, save for `state`."""

    def __init__(
        self,
        op: str,
        peer: str,
        local: Descriptors = NOTHING,
        remote: Descriptors = NOTHING,
        regions: NDArray[np.int64] = NOTHING[:, 0],
        notif: bytes = b"",
        device: bool = False,
    ) -> None:
        """
        Args:
            op: READ, WRITE or NOTIF; SERVE (rows sent to a peer) or ANSWER.
            local, remote, regions: as Transport.post has them.
            device: the memory of one side is a device's.
        """
        self.op = op
        self.endpoint = Endpoint(peer, b"", [])  # until the thread began it
        self.local, self.remote, self.regions = local, remote, regions
        self.notif = notif
        self.device = device
        self.error = ""
        # left to post
        self.rows: list[tuple[int, int, int, int]] = []  # (local, remote, length, key), consumed from the end
        self.outgoing: Outgoing | None = None
        self.needs_flush = False
        self.needs_notif = bool(notif)
        # left to end
        self.pending: deque[int] = deque()
        self.awaits_peer = False
        self.number = b""
        self.request: Request | None = None  # of the peer that this serves
        self.message = b""  # kept until the end: UCX may send from it
        self._state = XferState.PROC

    @property
    def state(self) -> XferState:
        return self._state

    @property
    def running(self) -> bool:
        return bool(
            self.rows
            or self.pending
            or self.awaits_peer
            or self.needs_flush
            or self.needs_notif
            or (self.outgoing and not self.outgoing.done)
        )

    def stop(self) -> None:
        """Nothing more is posted; what is posted has to come back first."""
        self.rows, self.needs_flush, self.needs_notif, self.awaits_peer = [], False, False, False
        if self.outgoing:
            self.outgoing.stop()

    def finish(self) -> None:
        self.endpoint.num_operations -= 1
        self._state = XferState.ERR if self.error else XferState.DONE
