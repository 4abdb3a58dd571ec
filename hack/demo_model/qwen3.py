"""The model that is trained: Qwen3's layers in float32, for whole sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    vocab_size: int
    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10000.0
    eps: float = 1e-6

    def config(self) -> dict[str, Any]:
        """Return the fields of config.json that describe the model."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "tie_word_embeddings": True,
            "bos_token_id": None,
        }


class Attention(nn.Module):
    """Causal attention with grouped heads, norms of queries and keys, and rotary embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, dim = shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(hidden, shape.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, shape.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, shape.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * dim, hidden, bias=False)
        self.q_norm = nn.RMSNorm(dim, shape.eps)
        self.k_norm = nn.RMSNorm(dim, shape.eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Return the output for `x`: [batch, length, hidden_size]."""
        heads = (*x.shape[:2], -1, self.shape.head_dim)
        query = _rotate(self.q_norm(self.q_proj(x).float().view(heads)), rope).transpose(1, 2)
        key = _rotate(self.k_norm(self.k_proj(x).float().view(heads)), rope).transpose(1, 2)
        value = self.v_proj(x).float().view(heads).transpose(1, 2)
        with torch.autocast("cpu", enabled=False):  # its backward pass is slow in bfloat16
            out = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """The gated feed-forward network of a layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for `x`: [..., hidden_size]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and feed-forward network, each after a norm and with a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Return the output for `x`: [batch, length, hidden_size]."""
        x = x + self.self_attn(self.input_layernorm(x), rope)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3(nn.Module):
    """Qwen3 with tied embeddings. The names of the weights are those of a checkpoint."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(shape.vocab_size, shape.hidden_size),
                "layers": nn.ModuleList(Layer(shape) for _ in range(shape.num_layers)),
                "norm": nn.RMSNorm(shape.hidden_size, shape.eps),
            }
        )
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    weight.data /= math.sqrt(2 * shape.num_layers)

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return logits.

        Args:
            token_ids: [batch, length].
            positions: indices into the flattened token ids at which logits are needed.

        Returns:
            [number of positions, vocab_size].
        """
        embeddings = self.model["embed_tokens"]
        rope = self._rope(token_ids.shape[1])
        x = embeddings(token_ids)
        for layer in self.model["layers"]:
            x = layer(x, rope)
        return functional.linear(self.model["norm"](x.flatten(0, 1)[positions]), embeddings.weight)

    def _rope(self, length: int) -> tuple[Tensor, Tensor]:
        dim = self.shape.head_dim
        frequencies = self.shape.rope_theta ** (-torch.arange(0, dim, 2) / dim)
        angles = torch.outer(torch.arange(length), frequencies)[:, None].repeat(1, 1, 2)
        return angles.cos(), angles.sin()


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
