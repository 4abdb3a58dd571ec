"""Layers that the architectures share. Tensors of a step are flat: [num_tokens, ...], all sequences one after the other.

Every layer names, in `weight_targets(prefix)`, the checkpoint tensors it is filled from and where each one goes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from baton_engine.models.config import CheckpointConfig
from baton_kernels.activation import silu_and_mul
from baton_kernels.attention import paged_attention
from baton_kernels.kv_write import write_kv
from baton_kernels.moe import route_top_k, run_experts
from baton_kernels.norm import rms_norm
from baton_kernels.rope import apply_rotary, rotary_angles

WeightTargets = dict[str, Tensor]
"""Name in the checkpoint -> (view of) the parameter it fills."""


@dataclass(slots=True)
class ForwardBatch:
    """One step's input: `num_tokens` tokens of `num_seqs` sequences, and where their KV lies. All on the model's device."""

    input_ids: Tensor
    """int64 [num_tokens]."""
    positions: Tensor
    """int64 [num_tokens]."""
    slot_mapping: Tensor
    """int64 [num_tokens]: block id * block_size + offset where the token's KV goes; -1: nowhere."""
    block_tables: Tensor
    """int32 [num_seqs, max_blocks_per_seq]."""
    cu_seqlens_q: Tensor
    """int32 [num_seqs + 1]."""
    seq_lens: Tensor
    """int32 [num_seqs], this step's tokens included."""
    kv_cache: Tensor
    """[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]: this rank's heads and layers."""
    routed_experts: list[Tensor] | None = None
    """Not None: every sparse layer appends the experts of each token, int [num_tokens, experts per token]."""


@dataclass(slots=True)
class RotaryAngles:
    """Of a step's positions, shared by all layers; each [num_tokens, 1, head_dim / 2]."""

    cos: Tensor
    sin: Tensor


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T + b."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = _parameter(out_features, in_features)
        self.bias = _parameter(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def weight_targets(self, prefix: str) -> WeightTargets:
        return self.slice_targets(prefix, 0, self.weight.shape[0])

    def slice_targets(self, prefix: str, first_row: int, num_rows: int) -> WeightTargets:
        """Targets of a checkpoint's linear layer that is fused into rows [first_row, first_row + num_rows) of this one."""
        rows = slice(first_row, first_row + num_rows)
        targets = {f"{prefix}.weight": self.weight[rows]}
        if self.bias is not None:
            targets[f"{prefix}.bias"] = self.bias[rows]
        return targets


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = _parameter(dim)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def weight_targets(self, prefix: str) -> WeightTargets:
        return {f"{prefix}.weight": self.weight}


class Embedding(nn.Module):
    """Token ids -> hidden states; its weight may also serve as the output projection."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = _parameter(vocab_size, hidden_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        return embedding(input_ids, self.weight)

    def weight_targets(self, prefix: str) -> WeightTargets:
        return {f"{prefix}.weight": self.weight}


class RotaryEmbedding(nn.Module):
    """Inverse frequencies of the rotary embedding. float32 whatever the model's dtype: positions need the digits."""

    def __init__(self, config: CheckpointConfig) -> None:
        super().__init__()
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        inv_freq = 1.0 / config.rope_theta**exponents
        if config.rope_scaling is not None:
            scaling = config.rope_scaling
            # Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated.
            turns = scaling.original_max_position_embeddings * inv_freq / (2 * math.pi)
            keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            keep = keep.clamp(0, 1)
            inv_freq = keep * inv_freq + (1 - keep) * inv_freq / scaling.factor
        self.inv_freq = inv_freq  # no buffer: `.to(dtype)` must not round it

    def forward(self, positions: Tensor, dtype: torch.dtype) -> RotaryAngles:
        if self.inv_freq.device != positions.device:
            self.inv_freq = self.inv_freq.to(positions.device)
        return RotaryAngles(*rotary_angles(positions, self.inv_freq, dtype))


class Attention(nn.Module):
    """Grouped-query attention over the paged KV cache; with `qk_norm` each head of q and k is normalised first (Qwen3)."""

    def __init__(self, config: CheckpointConfig, layer: int, qk_norm: bool) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_size, self.kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = Linear(config.hidden_size, self.q_size + 2 * self.kv_size, config.attention_bias)
        self.o_proj = Linear(self.q_size, config.hidden_size, config.attention_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else None
        self.scale = self.head_dim**-0.5

    def forward(self, x: Tensor, angles: RotaryAngles, batch: ForwardBatch) -> Tensor:
        num_tokens = x.shape[0]
        heads = self.qkv_proj(x).view(num_tokens, -1, self.head_dim)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary(q, angles.cos, angles.sin), apply_rotary(k, angles.cos, angles.sin)
        key_cache, value_cache = batch.kv_cache[:, :, self.layer, 0], batch.kv_cache[:, :, self.layer, 1]
        write_kv(k, v, key_cache, value_cache, batch.slot_mapping)
        attended = paged_attention(
            q, key_cache, value_cache, batch.block_tables, batch.cu_seqlens_q, batch.seq_lens, self.scale
        )
        return self.o_proj(attended.reshape(num_tokens, self.q_size))

    def weight_targets(self, prefix: str) -> WeightTargets:
        targets = (
            self.qkv_proj.slice_targets(f"{prefix}.q_proj", 0, self.q_size)
            | self.qkv_proj.slice_targets(f"{prefix}.k_proj", self.q_size, self.kv_size)
            | self.qkv_proj.slice_targets(f"{prefix}.v_proj", self.q_size + self.kv_size, self.kv_size)
            | self.o_proj.weight_targets(f"{prefix}.o_proj")
        )
        if self.q_norm is not None and self.k_norm is not None:
            targets |= self.q_norm.weight_targets(f"{prefix}.q_norm")
            targets |= self.k_norm.weight_targets(f"{prefix}.k_norm")
        return targets


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up as one product."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        super().__init__()
        self.intermediate_size = intermediate_size
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_and_mul(self.gate_up_proj(x)))

    def weight_targets(self, prefix: str) -> WeightTargets:
        return (
            self.gate_up_proj.slice_targets(f"{prefix}.gate_proj", 0, self.intermediate_size)
            | self.gate_up_proj.slice_targets(f"{prefix}.up_proj", self.intermediate_size, self.intermediate_size)
            | self.down_proj.weight_targets(f"{prefix}.down_proj")
        )


class SparseMoE(nn.Module):
    """Mixture of experts: a router chooses `num_experts_per_tok` gated MLPs per token. Experts are stacked in one parameter."""

    def __init__(self, config: CheckpointConfig) -> None:
        super().__init__()
        self.top_k, self.renormalize = config.num_experts_per_tok, config.norm_topk_prob
        self.num_experts, self.intermediate_size = config.num_experts, config.moe_intermediate_size
        self.gate = Linear(config.hidden_size, config.num_experts)
        self.gate_up = _parameter(config.num_experts, 2 * self.intermediate_size, config.hidden_size)
        self.down = _parameter(config.num_experts, config.hidden_size, self.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        weights, expert_ids = route_top_k(self.gate(x), self.top_k, self.renormalize)
        return run_experts(x, self.gate_up, self.down, weights, expert_ids)

    def weight_targets(self, prefix: str) -> WeightTargets:
        targets = self.gate.weight_targets(f"{prefix}.gate")
        for expert in range(self.num_experts):
            name = f"{prefix}.experts.{expert}"
            targets[f"{name}.gate_proj.weight"] = self.gate_up[expert, : self.intermediate_size]
            targets[f"{name}.up_proj.weight"] = self.gate_up[expert, self.intermediate_size :]
            targets[f"{name}.down_proj.weight"] = self.down[expert]
        return targets


class DecoderLayer(nn.Module):
    """Pre-norm transformer layer: attention, then an MLP of the architecture's choice, each added to the residual."""

    def __init__(self, config: CheckpointConfig, attention: Attention, mlp: GatedMLP | SparseMoE) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(self, x: Tensor, angles: RotaryAngles, batch: ForwardBatch) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, batch)
        return x + self.mlp(self.post_attention_layernorm(x))

    def weight_targets(self, prefix: str) -> WeightTargets:
        return (
            self.input_layernorm.weight_targets(f"{prefix}.input_layernorm")
            | self.self_attn.weight_targets(f"{prefix}.self_attn")
            | self.post_attention_layernorm.weight_targets(f"{prefix}.post_attention_layernorm")
            | self.mlp.weight_targets(f"{prefix}.mlp")
        )


class CausalLM(nn.Module):
    """Embedding, decoder layers, final norm, output projection. Architectures say what a decoder layer is."""

    def __init__(self, config: CheckpointConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary_embedding = RotaryEmbedding(config)
        self.layers = nn.ModuleList(self.make_layer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)

    def make_layer(self, config: CheckpointConfig, layer: int) -> DecoderLayer:
        raise NotImplementedError

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states after the final norm, [num_tokens, hidden_size]; writes the tokens' KV into the cache."""
        x = self.embed_tokens(batch.input_ids)
        angles = self.rotary_embedding(batch.positions, x.dtype)
        for layer in self.layers:
            x = layer(x, angles, batch)
        return self.norm(x)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] -> [rows, vocab_size], float32."""
        weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return linear(hidden, weight).float()

    def weight_targets(self) -> WeightTargets:
        """Where each tensor of the checkpoint goes."""
        targets = self.embed_tokens.weight_targets("model.embed_tokens") | self.norm.weight_targets("model.norm")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            targets |= layer.weight_targets(f"model.layers.{index}")
        if self.lm_head is not None:
            targets |= self.lm_head.weight_targets("lm_head")
        return targets

    def ignored_weights(self) -> list[str]:
        """Tensors a checkpoint may hold though the model does not want them."""
        return ["lm_head.weight"] if self.lm_head is None else []
