"""Runs a model from token ids to hidden states in one call, on a CPU with compiled operations.

Each layer is pre-norm: h += attention(norm(h)), then h += mlp(norm(h)). The call runs these
operations, with the same bits as separate calls from Python:

    rotary_angles, embedding
    in each layer:
        add_rms_norm, linear, rotate_qk, write_kv, paged_attention, linear, add_rms_norm,
        then linear, silu_and_mul, linear       in a dense layer
        or   linear, route_top_k, run_experts   in a sparse layer
    add_rms_norm

For small layers and few tokens, separate calls take longer than the computation itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from baton_kernels.linear import PackedWeight, QuantizedWeight
from baton_kernels.moe import ExpertList


class Projection(NamedTuple):
    """A linear layer whose weight is packed for the C++ operations."""

    weight: PackedWeight | QuantizedWeight
    bias: Tensor | None

    def tensors(self) -> list[Tensor | None]:
        """Return the packed weight, its scales and the bias. Missing tensors are None."""
        scales = self.weight.scales if isinstance(self.weight, QuantizedWeight) else None
        return [self.weight.data, scales, self.bias]


class DenseMLP(NamedTuple):
    """A gated MLP: down(silu(gate(x)) * up(x))."""

    gate_up: Projection  #: 2 * intermediate_size outputs.
    down: Projection


class SparseMLP(NamedTuple):
    """A mixture of experts, see `baton_kernels.moe`."""

    router: Tensor  #: Weight of the router: a plain tensor, or the data of a PackedWeight.
    gate_up: ExpertList
    down: ExpertList
    top_k: int
    renormalize: bool


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Weights of one decoder layer."""

    input_norm: Tensor  #: [hidden_size].
    qkv: Projection  #: Query, key and value heads: (num_heads + 2 * num_kv_heads) * head_dim.
    q_norm: Tensor | None  #: [head_dim]; None: no norm of the heads.
    k_norm: Tensor | None
    o: Projection
    mlp_norm: Tensor  #: [hidden_size].
    mlp: DenseMLP | SparseMLP
    window: int | None  #: Tokens that a query attends to, including its own. None: no limit.

    def tensors(self) -> list[Tensor | None]:
        """Return all tensors except the experts', in the order of `Weight` in decoder_layers.h."""
        mlp: list[Tensor | None]
        if isinstance(self.mlp, DenseMLP):
            mlp = [*self.mlp.gate_up.tensors(), *self.mlp.down.tensors(), None]
        else:
            mlp = [None] * 6 + [self.mlp.router]
        attention = [*self.qkv.tensors(), self.q_norm, self.k_norm, *self.o.tensors()]
        return [self.input_norm, *attention, self.mlp_norm, *mlp]


class DecoderLayers:
    """Consecutive decoder layers that run in one call.

    Args:
        layers: weights of each layer.
        num_heads: number of query heads.
        scale: factor of the attention scores.
        eps: epsilon of all norms.
        inv_freq: rotary frequencies, see `baton_kernels.rope.rotary_angles`.
        angle_scale: the argument `scale` of `rotary_angles`.
        embedding: weight of shape [vocab_size, hidden_size]. None: the input is hidden states.
        final_norm: weight of the norm after the last layer. None: the result is not normalized.
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        num_heads: int,
        scale: float,
        eps: float,
        inv_freq: Tensor,
        angle_scale: float,
        embedding: Tensor | None,
        final_norm: Tensor | None,
    ) -> None:
        self._layers = torch.classes.baton_cpu.DecoderLayers(
            num_heads, scale, eps, inv_freq, angle_scale, embedding, final_norm
        )
        for layer in layers:
            mlp, window = layer.mlp, layer.window or 0
            if isinstance(mlp, DenseMLP):
                size = mlp.gate_up.weight.shape[0] // 2
                self._layers.add(layer.tensors(), [], [], size, window, 0, False)
            else:
                size = mlp.gate_up[0].shape[0] // 2
                self._layers.add(
                    layer.tensors(),
                    _alternate(mlp.gate_up.data, mlp.down.data),
                    _alternate(mlp.gate_up.scales, mlp.down.scales),
                    size,
                    window,
                    mlp.top_k,
                    mlp.renormalize,
                )

    def run(
        self,
        x: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
    ) -> Tensor:
        """Run all layers on a step's tokens, and write the tokens' KV into the cache.

        Args:
            x: token ids, int64 of shape [num_tokens]. Without an embedding: hidden states
                [num_tokens, hidden_size].
            positions: int64 of shape [num_tokens].
            kv_cache: [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim].
            slot_mapping: see `baton_kernels.kv_write.write_kv`.
            block_tables: see `baton_kernels.attention.AttentionPlan`.
            cu_seqlens_q: see `AttentionPlan`.
            seq_lens: see `AttentionPlan`.

        Returns:
            Hidden states of shape [num_tokens, hidden_size], after the final norm if there is one.
        """
        hidden: Tensor = self._layers.run(
            x, positions, kv_cache, slot_mapping, block_tables, cu_seqlens_q, seq_lens
        )
        return hidden


def _alternate(gate_up: list[Tensor], down: list[Tensor]) -> list[Tensor]:
    return [tensor for pair in zip(gate_up, down, strict=True) for tensor in pair]
