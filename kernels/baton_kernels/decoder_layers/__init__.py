"""All dense decoder layers of a step in one call, on a CPU with compiled operations.

Each layer is pre-norm: h += attention(norm(h)), then h += mlp(norm(h)). The call runs the same
operations in the same order as a call of each would, so results have the same bits:

    add_rms_norm, linear, rotate_qk, write_kv, paged_attention, linear,
    add_rms_norm, linear, silu_and_mul, linear

Calls from Python take time. Twelve small layers with one token took 0.64 ms one by one, and 0.15 ms
in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from torch import Tensor

from baton_kernels import cpu
from baton_kernels.linear import Int8Weight, PackedWeight


class Projection(NamedTuple):
    """A linear layer with a weight in the order of the compiled products."""

    weight: PackedWeight | Int8Weight
    bias: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer's weights, in the order of `LayerWeight` in source/ops.cpp."""

    input_norm: Tensor  #: [hidden_size].
    qkv: Projection  #: Query, key and value heads: (num_heads + 2 * num_kv_heads) * head_dim.
    q_norm: Tensor | None  #: [head_dim]; None: no norm of the heads.
    k_norm: Tensor | None
    o: Projection
    mlp_norm: Tensor  #: [hidden_size].
    gate_up: Projection  #: 2 * intermediate_size outputs.
    down: Projection
    window: int | None  #: Tokens that a query sees, including its own. None: all.

    def tensors(self) -> list[Tensor | None]:
        """Return what the compiled operation takes."""
        tensors: list[Tensor | None] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Projection):
                scales = value.weight.scales if isinstance(value.weight, Int8Weight) else None
                tensors += [value.weight.data, scales, value.bias]
            elif field.name != "window":
                tensors.append(value)
        return tensors


class DecoderLayers:
    """Consecutive layers, ready to run.

    Args:
        layers: Their weights.
        num_heads: Query heads.
        scale: Factor of the attention's scores.
        eps: Epsilon of all norms.
    """

    def __init__(
        self, layers: Sequence[LayerWeights], num_heads: int, scale: float, eps: float
    ) -> None:
        assert cpu.OPS is not None
        self._run = cpu.OPS.decoder_layers
        self._weights = [tensor for layer in layers for tensor in layer.tensors()]
        self._numbers = (num_heads, layers[0].gate_up.weight.shape[0] // 2, scale, eps)
        self._windows = [layer.window or 0 for layer in layers]

    def run(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run the layers on a step's tokens, and write their KV.

        Args:
            hidden: tensor of shape [num_tokens, hidden_size].
            cos: float32 of shape [num_tokens, head_dim / 2], see `baton_kernels.rope`.
            sin: like cos.
            kv_cache: [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim].
            slot_mapping: see `baton_kernels.kv_write.write_kv`.
            block_tables: see `baton_kernels.attention.AttentionPlan`, also for the next two.
            cu_seqlens_q: see block_tables.
            seq_lens: see block_tables.

        Returns:
            Two tensors like hidden, whose sum is the hidden state.
        """
        x, residual = self._run(
            hidden,
            self._weights,
            cos,
            sin,
            kv_cache,
            slot_mapping,
            block_tables,
            cu_seqlens_q,
            seq_lens,
            *self._numbers,
            self._windows,
        )
        return x, residual
