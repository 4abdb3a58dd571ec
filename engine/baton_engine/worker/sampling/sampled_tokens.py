"""The tokens that a step samples: on the device, and as a copy on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class SampledTokens:
    """The tokens that one step samples.

    On a GPU, the constructor only queues the copy to the host.
    """

    def __init__(self, token_ids: Tensor, is_impossible: Tensor | None) -> None:
        """Start the copy to the host.

        Args:
            token_ids: int64 [rows].
            is_impossible: bool [rows]. True: all tokens of the row were masked or NaN. None: there
                is no such row.
        """
        #: On the device, int64 [rows].
        self.token_ids = token_ids
        self._on_host = _copy_to_host(token_ids)
        self._is_impossible = None if is_impossible is None else _copy_to_host(is_impossible)
        self._copied: torch.cuda.Event | None = None
        if token_ids.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(token_ids.device))

    def wait(self) -> Int64Array:
        """Wait for the copy to the host. Return the tokens. Any thread may call this method."""
        if self._copied is not None:
            # A thread other than the worker's has GPU 0 selected, and would allocate memory there.
            with torch.cuda.device(self.token_ids.device):
                self._copied.synchronize()
        return self._on_host

    def impossible_rows(self) -> list[int]:
        """Wait for the copy to the host. Return the rows in which no token was possible."""
        if self._is_impossible is None:
            return []
        self.wait()
        return np.flatnonzero(self._is_impossible).tolist()


def _copy_to_host(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a host array with the tensor's values. The copy from a GPU is only queued."""
    if tensor.is_cuda:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        tensor = pinned.copy_(tensor, non_blocking=True)
    return tensor.numpy()
