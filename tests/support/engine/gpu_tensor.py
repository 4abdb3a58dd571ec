"""A stand-in for a tensor on a GPU."""

from __future__ import annotations

import torch


class GPUTensor(torch.Tensor):
    """A tensor in host memory that claims to be on a GPU."""

    is_cuda = True
