"""BERT (Devlin et al. 2018): an encoder, in which every token attends to the whole prompt.

Positions and the two texts of a pair have learned embeddings, and a layer normalizes after each
addition. A prompt runs in one step, and no KV is cached.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, gelu, layer_norm

from baton_engine.distributed.group import Group, ParallelContext
from baton_engine.models.checkpoint.checkpoint_config import CheckpointConfig
from baton_engine.models.checkpoint.sharding import (
    ALONE,
    Part,
    WeightTargets,
    split,
    whole_targets,
)
from baton_engine.models.classifier import Classifier
from baton_engine.models.forward_context import current_context
from baton_engine.models.layers import Model, VocabParallelEmbedding
from baton_engine.models.operators import attend_to_prompt
from baton_engine.models.projections import ColumnParallelLinear, RowParallelLinear, parameter
from baton_engine.models.registry import register
from baton_kernels.linear import linear
from baton_protocol.pooling_params import Task


class LayerNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.bias = parameter(dim), parameter(dim)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)

    def weight_targets(self, prefix: str) -> WeightTargets:
        return whole_targets(prefix, {"weight": self.weight, "bias": self.bias})


class BertEmbeddings(nn.Module):
    """The sum of the embeddings of token, position and token type, normalized."""

    def __init__(self, config: CheckpointConfig, group: Group) -> None:
        super().__init__()
        size = config.hidden_size
        self.word_embeddings = VocabParallelEmbedding(config.vocab_size, size, group)
        self.position_embeddings = parameter(config.max_position_embeddings, size)
        self.token_type_embeddings = parameter(config.num_token_types, size)
        self.norm = LayerNorm(size, config.layer_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        token_types = current_context().token_types
        x = self.word_embeddings(input_ids) + embedding(positions, self.position_embeddings)
        return self.norm(
            x + self.token_type_embeddings[0]
            if token_types is None
            else x + embedding(token_types, self.token_type_embeddings)
        )

    def weight_targets(self, prefix: str) -> WeightTargets:
        tables = {
            "position_embeddings.weight": self.position_embeddings,
            "token_type_embeddings.weight": self.token_type_embeddings,
        }
        return (
            self.word_embeddings.weight_targets(f"{prefix}.word_embeddings")
            | whole_targets(prefix, tables)
            | self.norm.weight_targets(f"{prefix}.LayerNorm")
        )


class BertLayer(nn.Module):
    """Post-norm transformer layer: attention and MLP, each with a residual addition and a norm."""

    def __init__(self, config: CheckpointConfig, group: Group) -> None:
        super().__init__()
        heads, size = split(config.num_heads, group), config.hidden_size
        self.num_heads, self.head_dim = heads.length, config.head_dim
        part = Part(*(n * config.head_dim for n in heads))
        self.qkv = ColumnParallelLinear(size, {"query": part, "key": part, "value": part}, True)
        self.attention_output = RowParallelLinear(part, size, True, group)
        self.attention_norm = LayerNorm(size, config.layer_norm_eps)
        inner = split(config.intermediate_size, group)
        self.intermediate = ColumnParallelLinear(size, {"dense": inner}, True)
        self.output = RowParallelLinear(inner, size, True, group)
        self.output_norm = LayerNorm(size, config.layer_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.num_heads, self.head_dim).unbind(1)
        attended = attend_to_prompt(q, k, v, self.head_dim**-0.5)
        x = self.attention_norm(x + self.attention_output(attended.flatten(1)))
        return self.output_norm(x + self.output(gelu(self.intermediate(x))))

    def weight_targets(self, prefix: str) -> WeightTargets:
        return (
            self.qkv.weight_targets(f"{prefix}.attention.self")
            | self.attention_output.weight_targets(f"{prefix}.attention.output.dense")
            | self.attention_norm.weight_targets(f"{prefix}.attention.output.LayerNorm")
            | self.intermediate.weight_targets(f"{prefix}.intermediate")
            | self.output.weight_targets(f"{prefix}.output.dense")
            | self.output_norm.weight_targets(f"{prefix}.output.LayerNorm")
        )


class BertHead(nn.Module):
    """A classifier's output: a dense layer with tanh, then one logit per label."""

    def __init__(self, hidden_size: int, num_labels: int) -> None:
        super().__init__()
        self.weight, self.bias = parameter(hidden_size, hidden_size), parameter(hidden_size)
        self.classifier = Classifier(hidden_size, num_labels, bias=True)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.classifier(torch.tanh(linear(pooled, self.weight, self.bias)))

    def weight_targets(self, prefix: str) -> WeightTargets:
        dense = whole_targets(f"{prefix}.pooler.dense", {"weight": self.weight, "bias": self.bias})
        return dense | self.classifier.weight_targets("classifier")


@register
class BertModel(Model):
    NAME_PREFIX = "bert."

    def __init__(self, config: CheckpointConfig, parallel: ParallelContext = ALONE) -> None:
        super().__init__(config, parallel)
        self.layers = nn.ModuleList(BertLayer(config, parallel.tensor) for _ in self.layer_ids)
        self.embeddings = (
            BertEmbeddings(config, parallel.tensor) if parallel.is_first_stage else None
        )
        is_classifier = config.pooling is not None and config.pooling.task is Task.CLASSIFY
        self.classifier_head = (
            BertHead(config.hidden_size, config.num_labels)
            if is_classifier and parallel.is_last_stage
            else None
        )

    def forward(self, input_ids: Tensor, positions: Tensor, hidden: Tensor | None = None) -> Tensor:
        if self.embeddings is not None:
            hidden = self.embeddings(input_ids, positions)
        assert hidden is not None, "a stage after the first needs the previous stage's output"
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def classify(self, pooled: Tensor) -> Tensor:
        assert self.classifier_head is not None, "the model is not a classifier"
        return self.classifier_head(pooled).float()

    def weight_targets(self) -> WeightTargets:
        targets: WeightTargets = {}
        if self.embeddings is not None:
            targets |= self.embeddings.weight_targets("bert.embeddings")
        for layer_id, layer in zip(self.layer_ids, self.layers, strict=True):
            assert isinstance(layer, BertLayer)
            targets |= layer.weight_targets(f"bert.encoder.layer.{layer_id}")
        if self.classifier_head is not None:
            targets |= self.classifier_head.weight_targets("bert")
        return targets

    def ignored_weights(self) -> list[str]:
        head = "cls.predictions."
        ignored = [
            "bert.embeddings.position_ids",
            f"{head}bias",
            f"{head}decoder.weight",
            f"{head}decoder.bias",
            *(f"{head}transform.{part}" for part in _DENSE_AND_NORM),
            "cls.seq_relationship.weight",
            "cls.seq_relationship.bias",
        ]
        if self.classifier_head is None:
            ignored += ["bert.pooler.dense.weight", "bert.pooler.dense.bias"]
        return ignored


_DENSE_AND_NORM = ("dense.weight", "dense.bias", "LayerNorm.weight", "LayerNorm.bias")


@register
class BertForMaskedLM(BertModel):
    """The encoder of a BERT checkpoint for masked language modeling.

    The checkpoint's output layer is ignored.
    """


@register
class BertForSequenceClassification(BertModel):
    """BERT as a cross-encoder, which scores a pair of texts."""
