"""Splits a model over pipeline stages and tensor ranks.

A pipeline stage holds consecutive layers. A tensor rank holds a part of each of these layers.
`shard` computes the layers and heads of one rank. `Part` and `WeightTarget` describe slices of the
checkpoint's tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from baton_engine.distributed.group import Group, ParallelContext
from baton_engine.models.checkpoint.checkpoint_config import CheckpointConfig
from baton_engine.models.errors import ConfigurationError

ALONE = ParallelContext()  # one worker with the whole model


class Part(NamedTuple):
    """A rank's part of a dimension: indices [start, start + length) of `total` indices."""

    total: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """A slice of a tensor in the checkpoint, and the parameter to fill with the slice."""

    parameter: Tensor  # parameter or view of a parameter, of the slice's shape
    shape: tuple[int, ...]  # shape of the whole tensor in the checkpoint
    dim: int = 0  # dimension along which the tensor is sliced
    start: int = 0  # first index of the slice in dimension `dim`

    @property
    def index(self) -> tuple[slice, ...]:
        """Index that selects the slice from the whole tensor."""
        return (slice(None),) * self.dim + (
            slice(self.start, self.start + self.parameter.shape[self.dim]),
        )


WeightTargets = dict[str, WeightTarget]  # by the tensor's name in the checkpoint


def whole_targets(prefix: str, parameters: Mapping[str, Tensor | None]) -> WeightTargets:
    """Return the weight targets of parameters that are not split over ranks.

    A parameter that is None has no target.
    """
    return {
        f"{prefix}.{name}": WeightTarget(each, tuple(each.shape))
        for name, each in parameters.items()
        if each is not None
    }


@dataclass(frozen=True, slots=True)
class ModelShard:
    """The layers and heads of one rank. Its KV cache has the same layers and KV heads."""

    first_layer: int
    num_layers: int
    num_heads: int
    num_kv_heads: int


def shard(config: CheckpointConfig, parallel: ParallelContext = ALONE) -> ModelShard:
    """Return the layers and heads of the rank that `parallel` describes.

    Raises:
        ConfigurationError: the model cannot be split over the tensor ranks or pipeline stages of
            `parallel`. The message names the size that cannot be split.
    """
    tensor_size, stages = parallel.tensor.size, parallel.pipeline.size
    must_divide = {"num_attention_heads": config.num_heads}
    if len(config.sparse_layers) < config.num_layers:
        must_divide["intermediate_size"] = config.intermediate_size
    if config.sparse_layers:
        must_divide["the experts' intermediate size"] = config.moe_intermediate_size
    for name, size in must_divide.items():
        if size % tensor_size:
            raise _cannot_split(f"tensor_parallel_size={tensor_size} must divide {name}={size}")
    if config.num_kv_heads % tensor_size and tensor_size % config.num_kv_heads:
        raise _cannot_split(
            f"tensor_parallel_size={tensor_size} must divide "
            f"num_key_value_heads={config.num_kv_heads} or be a multiple of it"
        )
    if stages > config.num_layers:
        raise _cannot_split(
            f"pipeline_parallel_size={stages} is more than num_hidden_layers={config.num_layers}"
        )
    first_layer = first_layer_of(parallel.pipeline.rank, stages, config.num_layers)
    return ModelShard(
        first_layer=first_layer,
        num_layers=first_layer_of(parallel.pipeline.rank + 1, stages, config.num_layers)
        - first_layer,
        num_heads=split(config.num_heads, parallel.tensor).length,
        num_kv_heads=split_kv_heads(config.num_kv_heads, parallel.tensor).length,
    )


def first_layer_of(stage: int, stages: int, num_layers: int) -> int:
    """Return the index of a pipeline stage's first layer.

    The numbers of layers of two stages differ by at most one. The last stage, which also computes
    the output projection, never has more layers than another stage.
    """
    return -(-num_layers * stage // stages)


def split(total: int, group: Group) -> Part:
    """Split `total` indices equally over the ranks of `group`, and return this rank's part.

    `total` must be a multiple of the group's size.
    """
    length = total // group.size
    return Part(total, group.rank * length, length)


def split_kv_heads(num_kv_heads: int, group: Group) -> Part:
    """Split the KV heads over the ranks of `group`, and return this rank's part.

    If there are more ranks than KV heads, several consecutive ranks have the same KV head. The
    larger number must be a multiple of the smaller.
    """
    length = max(1, num_kv_heads // group.size)
    return Part(num_kv_heads, group.rank * num_kv_heads // group.size, length)


def split_vocabulary(vocab_size: int, group: Group) -> tuple[Part, int]:
    """Return this rank's part of the vocabulary, and the number of rows that each rank allocates.

    The number includes padding, and is the same for all ranks.
    """
    padded = -(-vocab_size // group.size)
    start = min(group.rank * padded, vocab_size)
    return Part(vocab_size, start, min(padded, vocab_size - start)), padded


def _cannot_split(message: str) -> ConfigurationError:
    return ConfigurationError("InvalidConfig", f"the model cannot be split: {message}")
