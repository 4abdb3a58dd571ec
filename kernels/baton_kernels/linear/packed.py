"""Weights that are reordered once after loading, for faster products.

The C++ operation reads a packed weight sequentially (`source/linear.h`). oneDNN is used instead if
the processor has AMX tiles for bfloat16, which the C++ operation does not use. oneDNN is also used
if the C++ operations are not compiled.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from baton_kernels import cpu

Implementation = Literal["cpp", "onednn"]
#: Number of rows of x for which oneDNN chooses the order of a weight. Any number above 1 gives an
#: order that is equally fast for all numbers of rows.
TYPICAL_ROWS = 64


def native_instructions(dtype: torch.dtype) -> str:
    """Return the CPU's instruction set for products in a 16-bit dtype, such as `amx_bf16`.

    Returns:
        The name, or an empty string if the CPU has none and must convert to float32.
    """
    known = {
        torch.bfloat16: ("amx_bf16", "avx512_bf16", "bf16"),  # the last is Arm's
        torch.float16: ("amx_fp16", "avx512_fp16"),
    }
    capabilities = torch.cpu.get_capabilities()
    return next((name for name in known.get(dtype, ()) if capabilities.get(name)), "")


def packing(dtype: torch.dtype, device: torch.device) -> Implementation | None:
    """Return the faster implementation for packed weights of this dtype and device.

    None if such weights cannot be packed.
    """
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return None
    has_tiles = dtype is torch.bfloat16 and native_instructions(dtype) == "amx_bf16"
    if cpu.OPS is not None and not has_tiles:
        return "cpp"
    is_supported = torch.backends.mkldnn.is_available() and (
        dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return "onednn" if is_supported else None


class PackedWeight(nn.Module):
    """A copy of a weight, reordered for one implementation. Only `baton_kernels` can read it.

    Attributes:
        shape: (out_features, in_features).
        dtype: dtype of the weight.
        data: the reordered copy. For "cpp", its shape is [ceil(out_features / panel),
            ceil(in_features / step), panel, step], padded with zeros. A panel is a number of
            outputs that depends on the instruction set. A step is one input in float32, and two in
            bfloat16.
    """

    data: Tensor

    def __init__(self, weight: Tensor, implementation: Implementation | None = None) -> None:
        """Create a reordered copy of a weight.

        Args:
            weight: tensor of shape [out_features, in_features].
            implementation: implementation for which the weight is packed. None: the result of
                `packing`. The argument is required if `packing` returns None for this weight.
        """
        super().__init__()
        self.shape, self.dtype = weight.shape, weight.dtype
        if (implementation or packing(weight.dtype, weight.device)) == "cpp":
            assert cpu.OPS is not None
            data = cpu.OPS.pack_weight(weight)
        else:
            data = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
        self.register_buffer("data", data)

    @property
    def is_compiled(self) -> bool:
        """Whether the copy is for the C++ operations, and not for oneDNN."""
        return not self.data.is_mkldnn

    def unpack(self) -> Tensor:
        """Return the original weight of shape [out_features, in_features], with the same bits."""
        if not self.is_compiled:
            return self.data.to_dense()
        num_panels, num_steps, panel, step = self.data.shape
        padded = self.data.transpose(1, 2).reshape(num_panels * panel, num_steps * step)
        return padded[: self.shape[0], : self.shape[1]].contiguous()


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Implement `baton_kernels.linear.linear` for a packed weight."""
    y: Tensor
    if weight.is_compiled:
        assert cpu.OPS is not None
        y = cpu.OPS.linear(x, weight.data, weight.shape[0], bias)
    else:
        y = torch.ops.mkldnn._linear_pointwise(x, weight.data, bias, "none", [], "")
    return y
