"""Layers that the architectures share.

Tensors of a step have the shape [num_tokens, ...]: the tokens of all sequences are concatenated.

With tensor parallelism, each rank holds a slice of every layer. Projections to heads or to an MLP's
intermediate size are column-parallel. Projections back to the hidden size are row-parallel and end
with an all-reduce.

A layer's `weight_targets(prefix)` returns the slices of checkpoint tensors that fill the parameters
of the layer.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from baton_engine.distributed.group import Group, ParallelContext
from baton_engine.models.checkpoint.checkpoint_config import CheckpointConfig
from baton_engine.models.checkpoint.sharding import (
    ALONE,
    Part,
    WeightTarget,
    WeightTargets,
    shard,
    split,
    split_kv_heads,
    split_vocabulary,
    whole_targets,
)
from baton_engine.models.classifier import Classifier, token_score
from baton_engine.models.operators import all_reduce, attend
from baton_engine.models.projections import ColumnParallelLinear, RowParallelLinear, parameter
from baton_engine.models.rope import RotaryAngles, RotaryEmbedding
from baton_engine.models.sparse_moe import SparseMoE
from baton_kernels.activation import silu_and_mul
from baton_kernels.linear import PackedWeight, QuantizedWeight, linear
from baton_kernels.norm import add_rms_norm, rms_norm
from baton_kernels.rope import rotate_qk


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter(dim)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (norm of s, s), where s is x + residual, or x if residual is None."""
        return (
            (self(x), x) if residual is None else add_rms_norm(x, residual, self.weight, self.eps)
        )

    def weight_targets(self, prefix: str) -> WeightTargets:
        return whole_targets(prefix, {"weight": self.weight})


class VocabParallelEmbedding(nn.Module):
    """Embedding or output projection, or both, with the vocabulary split over the tensor ranks.

    Every rank has the same number of rows. Rows past the end of the vocabulary are padding, and
    `logits` removes their columns.
    """

    def __init__(self, vocab_size: int, hidden_size: int, group: Group) -> None:
        super().__init__()
        self.part, num_rows = split_vocabulary(vocab_size, group)
        self.group = group
        self.weight = parameter(num_rows, hidden_size)
        #: Packed or quantized copy of the weight, which `logits` reads. `forward` reads `weight`.
        self.packed_weight: PackedWeight | QuantizedWeight | None = None

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return embedding(input_ids, self.weight)
        rows = input_ids - self.part.start
        elsewhere = (rows < 0) | (rows >= self.part.length)
        found = embedding(rows.masked_fill(elsewhere, 0), self.weight)
        return all_reduce(found.masked_fill(elsewhere[:, None], 0), self.group)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [rows, vocab_size] of hidden states [rows, hidden_size].

        The result is the same on all ranks.
        """
        weight = self.weight if self.packed_weight is None else self.packed_weight
        return self.group.all_gather(linear(hidden, weight), dim=-1)[:, : self.part.total].float()

    def weight_targets(self, prefix: str) -> WeightTargets:
        shape = (self.part.total, self.weight.shape[1])
        return {
            f"{prefix}.weight": WeightTarget(
                self.weight[: self.part.length], shape, start=self.part.start
            )
        }


class Attention(nn.Module):
    """Grouped-query attention of this rank's heads over the paged KV cache.

    Args:
        config: the checkpoint's configuration.
        group: tensor ranks.
        qkv_bias: whether the projections of q, k and v have a bias.
        o_bias: whether the output projection has a bias.
        qk_norm: whether each head of q and k is normalized before the rotary embedding (Qwen3).
        window: number of tokens that a token attends to, including itself. None: no limit.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        group: Group,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm: bool = False,
        window: int | None = None,
    ) -> None:
        super().__init__()
        heads, kv_heads = split(config.num_heads, group), split_kv_heads(config.num_kv_heads, group)
        self.num_heads, self.num_kv_heads, self.head_dim = (
            heads.length,
            kv_heads.length,
            config.head_dim,
        )
        q, kv = (Part(*(n * self.head_dim for n in part)) for part in (heads, kv_heads))
        self.qkv_proj = ColumnParallelLinear(
            config.hidden_size, {"q_proj": q, "k_proj": kv, "v_proj": kv}, qkv_bias
        )
        self.o_proj = RowParallelLinear(q, config.hidden_size, o_bias, group)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else None
        self.scale = self.head_dim**-0.5
        self.window = window
        self.cache_layer = 0  # index in the rank's KV cache; set by CausalLM

    def forward(self, x: Tensor, angles: RotaryAngles) -> Tensor:
        qkv = self.qkv_proj(x)
        norms: tuple[Tensor | None, Tensor | None, float] = (None, None, 0.0)
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        q, k = rotate_qk(qkv, self.num_heads, self.num_kv_heads, angles.cos, angles.sin, *norms)
        v = qkv[:, -self.num_kv_heads * self.head_dim :].unflatten(
            1, (self.num_kv_heads, self.head_dim)
        )
        attended = attend(q, k, v, self.cache_layer, self.scale, self.window)
        return self.o_proj(attended.flatten(1))

    def weight_targets(self, prefix: str) -> WeightTargets:
        targets = self.qkv_proj.weight_targets(prefix) | self.o_proj.weight_targets(
            f"{prefix}.o_proj"
        )
        if self.q_norm is not None and self.k_norm is not None:
            targets |= self.q_norm.weight_targets(f"{prefix}.q_norm")
            targets |= self.k_norm.weight_targets(f"{prefix}.k_norm")
        return targets


class GatedMLP(nn.Module):
    """Gated MLP: down(silu(gate(x)) * up(x)). One matrix product computes gate and up."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, group: Group, *, bias: bool = False
    ) -> None:
        super().__init__()
        part = split(intermediate_size, group)
        self.gate_up_proj = ColumnParallelLinear(
            hidden_size, {"gate_proj": part, "up_proj": part}, bias
        )
        self.down_proj = RowParallelLinear(part, hidden_size, bias, group)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_and_mul(self.gate_up_proj(x)))

    def weight_targets(self, prefix: str) -> WeightTargets:
        return self.gate_up_proj.weight_targets(prefix) | self.down_proj.weight_targets(
            f"{prefix}.down_proj"
        )


class DecoderLayer(nn.Module):
    """Pre-norm transformer layer: attention, then an MLP, each added to the residual.

    Each addition is fused with the next norm. The MLP's output is therefore added in the next layer
    or in the model's final norm.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        attention: Attention,
        mlp: GatedMLP | SparseMoE,
        mlp_name: str = "mlp",
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp
        self.mlp_name = mlp_name

    def forward(
        self, x: Tensor, residual: Tensor | None, angles: RotaryAngles
    ) -> tuple[Tensor, Tensor]:
        """Return (x, residual) for the next layer. x + residual is this layer's hidden state.

        Args:
            x: output of the previous layer.
            residual: residual of the previous layer; None for the first layer.
            angles: rotary angles of the tokens.
        """
        x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, angles)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual

    def weight_targets(self, prefix: str) -> WeightTargets:
        return (
            self.input_layernorm.weight_targets(f"{prefix}.input_layernorm")
            | self.self_attn.weight_targets(f"{prefix}.self_attn")
            | self.post_attention_layernorm.weight_targets(f"{prefix}.post_attention_layernorm")
            | self.mlp.weight_targets(f"{prefix}.{self.mlp_name}")
        )


class Model(nn.Module):
    """Base class of decoders and encoders: the interface of one rank's part of a model."""

    #: Prefix of the names of all tensors, except those of output layers. In a checkpoint that was
    #: saved without an output layer, the names may lack the prefix.
    NAME_PREFIX = "model."

    layers: nn.ModuleList

    def __init__(self, config: CheckpointConfig, parallel: ParallelContext) -> None:
        super().__init__()
        self.config, self.parallel = config, parallel
        own = shard(config, parallel)
        #: Indices of this rank's layers in the whole model.
        self.layer_ids = range(own.first_layer, own.first_layer + own.num_layers)

    @property
    def head(self) -> VocabParallelEmbedding | None:
        """The output projection to the vocabulary. Only the last pipeline stage can have one.

        None on other stages, and for models that need no logits of the vocabulary.
        """
        return None

    @cached_property
    def sparse_layers(self) -> list[tuple[str, SparseMoE]]:
        """This rank's sparse layers in order, each as (name in the checkpoint, layer)."""
        return []

    def forward(self, input_ids: Tensor, positions: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Run this pipeline stage on a step's tokens.

        Call this method within a `forward_context`.

        Args:
            input_ids: int64 of shape [num_tokens].
            positions: int64 of shape [num_tokens].
            hidden: result of the previous stage; None on the first stage.

        Returns:
            Hidden states [num_tokens, hidden_size], after the final norm on the last stage.
        """
        raise NotImplementedError

    def run_dummy_batch(self) -> None:
        """Run the sparse layers in a step in which only other ranks have tokens.

        Call this method within a `forward_context`.
        """
        for _, layer in self.sparse_layers:
            layer.run_dummy_batch()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [rows, vocab_size] of hidden states [rows, hidden_size].

        Only the last pipeline stage has logits. The result is the same on every tensor rank.
        """
        assert self.head is not None, "only the last stage of a generating model has logits"
        return self.head.logits(hidden)

    def classify(self, pooled: Tensor) -> Tensor:
        """Return a classifier's float32 logits [rows, labels].

        Args:
            pooled: one vector per prompt, [rows, hidden_size].
        """
        raise NotImplementedError

    def move_constants(self, device: torch.device) -> None:
        """Move tensors that are not parameters to `device`."""

    def weight_targets(self) -> WeightTargets:
        """Return a `WeightTarget` for each checkpoint tensor that this rank needs, by name."""
        raise NotImplementedError

    def ignored_weights(self) -> list[str]:
        """Return the names of tensors that a checkpoint may contain but the model does not use."""
        return []


class CausalLM(Model):
    """Base class of decoders: embedding, decoder layers, final norm and output projection.

    Architectures implement `make_layer`. A pipeline stage has consecutive layers. The first stage
    also has the embedding. The last stage also has the final norm and an output layer: the output
    projection (`head`), or the classifier of a pooling model (`score`). A model that computes
    embeddings has no output layer.
    """

    def __init__(self, config: CheckpointConfig, parallel: ParallelContext = ALONE) -> None:
        super().__init__(config, parallel)
        self.rotary_embedding = RotaryEmbedding(config)
        self.layers = nn.ModuleList(
            self.make_layer(config, layer, parallel.tensor) for layer in self.layer_ids
        )
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            layer.self_attn.cache_layer = index
        last, tied = parallel.is_last_stage, config.tie_word_embeddings
        pooling = config.pooling
        self._has_head = last and (pooling is None or bool(pooling.label_token_ids))
        vocabulary = (config.vocab_size, config.hidden_size, parallel.tensor)
        self.embed_tokens = (
            VocabParallelEmbedding(*vocabulary)
            if parallel.is_first_stage or (self._has_head and tied)
            else None
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if last else None
        self.lm_head = VocabParallelEmbedding(*vocabulary) if self._has_head and not tied else None
        self.score = (
            Classifier(config.hidden_size, config.num_labels)
            if last and pooling is not None and pooling.has_classifier
            else None
        )

    def make_layer(self, config: CheckpointConfig, layer: int, group: Group) -> DecoderLayer:
        """Return this rank's part of a decoder layer. `layer` is its index in the whole model."""
        raise NotImplementedError

    def forward(self, input_ids: Tensor, positions: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Run this pipeline stage on a step's tokens, and write their KV into the cache."""
        if not self.parallel.is_first_stage and hidden is None:
            raise ValueError("a stage after the first needs the previous stage's hidden states")
        if hidden is None:
            assert self.embed_tokens is not None
            hidden = self.embed_tokens(input_ids)
        angles = self.rotary_embedding(positions)
        residual: Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, angles)
        if self.norm is None:
            return hidden if residual is None else residual + hidden
        return self.norm.add(hidden, residual)[0]

    @cached_property
    def sparse_layers(self) -> list[tuple[str, SparseMoE]]:
        layers = []
        for layer_id, layer in zip(self.layer_ids, self.layers, strict=True):
            assert isinstance(layer, DecoderLayer)
            if isinstance(layer.mlp, SparseMoE):
                layers.append((f"model.layers.{layer_id}.{layer.mlp_name}", layer.mlp))
        return layers

    @property
    def head(self) -> VocabParallelEmbedding | None:
        if not self._has_head:
            return None
        return self.embed_tokens if self.lm_head is None else self.lm_head

    def classify(self, pooled: Tensor) -> Tensor:
        if self.score is not None:
            return self.score(pooled).float()
        assert self.config.pooling is not None
        return token_score(self.compute_logits(pooled), self.config.pooling.label_token_ids)

    def move_constants(self, device: torch.device) -> None:
        self.rotary_embedding.move_to(device)

    def weight_targets(self) -> WeightTargets:
        targets: WeightTargets = {}
        if self.embed_tokens is not None:
            targets |= self.embed_tokens.weight_targets("model.embed_tokens")
        if self.norm is not None:
            targets |= self.norm.weight_targets("model.norm")
        for layer_id, layer in zip(self.layer_ids, self.layers, strict=True):
            assert isinstance(layer, DecoderLayer)
            targets |= layer.weight_targets(f"model.layers.{layer_id}")
        if self.lm_head is not None:
            targets |= self.lm_head.weight_targets("lm_head")
        if self.score is not None:
            targets |= self.score.weight_targets("score")
        return targets

    def ignored_weights(self) -> list[str]:
        return ["lm_head.weight"] if self.lm_head is None else []
