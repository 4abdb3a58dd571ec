"""A posted batch of reads or writes, whichever way it goes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.transports.base import Descriptors, Operation, XferState


class Transfer(Operation):
    def __init__(
        self, op: str, peer: str, local: Descriptors, remote: Descriptors, regions: NDArray[np.int64], notif: bytes
    ) -> None:
        """Arguments as `Transport.post` has them."""
        self.op, self.peer, self.notif = op, peer, notif
        self.local, self.remote, self.regions = local, remote, regions
        self._state = XferState.PROC

    @property
    def state(self) -> XferState:
        return self._state

    def end(self, error: str = "") -> None:
        """Only the first one counts; by whoever moves the bytes, once the local memory is not touched any more."""
        if self._state is XferState.PROC:
            self.error = error
            self._state = XferState.ERR if error else XferState.DONE
