"""How a model is split over workers: pipeline stages take runs of layers, tensor ranks take parts of each layer.

`shard` says what one rank holds; `Part` and `WeightTarget` say which part of a checkpoint's tensor that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from baton_engine.distributed.group import Group, ParallelContext
from baton_engine.models.checkpoint_config import CheckpointConfig
from baton_engine.models.errors import ConfigurationError

ALONE = ParallelContext()
"""One worker that holds the whole model."""


class Part(NamedTuple):
    """Rows (or columns) [start, start + length) of the checkpoint's `total`."""

    total: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Where a tensor of the checkpoint goes, and which slice of it."""

    parameter: Tensor
    """The parameter it fills, or a view of one; as large as the slice."""
    shape: tuple[int, ...]
    """Of the whole tensor in the checkpoint."""
    dim: int = 0
    start: int = 0
    """The slice begins here in dimension `dim`."""

    @property
    def index(self) -> tuple[slice, ...]:
        """Of the slice in the checkpoint's tensor."""
        return (slice(None),) * self.dim + (
            slice(self.start, self.start + self.parameter.shape[self.dim]),
        )


WeightTargets = dict[str, WeightTarget]
"""By the tensor's name in the checkpoint."""


@dataclass(frozen=True, slots=True)
class ModelShard:
    """What one rank holds; its KV cache has these layers and KV heads."""

    first_layer: int
    num_layers: int
    num_heads: int
    num_kv_heads: int


def shard(config: CheckpointConfig, parallel: ParallelContext = ALONE) -> ModelShard:
    """What the rank at `parallel` holds.

    Raises:
        ConfigurationError: naming the size of the model that the tensor or pipeline size does not fit.
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
            f"tensor_parallel_size={tensor_size} must divide num_key_value_heads={config.num_kv_heads} or be a multiple of it"
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
    """Even runs; what is left over goes to early stages, for the last one has the output projection to compute."""
    return -(-num_layers * stage // stages)


def split(total: int, group: Group) -> Part:
    """This rank's equal share of `total`, which the group's size divides (see `shard`)."""
    length = total // group.size
    return Part(total, group.rank * length, length)


def split_kv_heads(num_kv_heads: int, group: Group) -> Part:
    """Like `split`, but with more ranks than heads, neighbours hold copies of one head: that of their query heads."""
    length = max(1, num_kv_heads // group.size)
    return Part(num_kv_heads, group.rank * num_kv_heads // group.size, length)


def split_vocabulary(vocab_size: int, group: Group) -> tuple[Part, int]:
    """This rank's rows of the vocabulary, and how many rows every rank has with padding."""
    padded = -(-vocab_size // group.size)
    start = min(group.rank * padded, vocab_size)
    return Part(vocab_size, start, min(padded, vocab_size - start)), padded


def _cannot_split(message: str) -> ConfigurationError:
    return ConfigurationError("InvalidConfig", f"the model cannot be split: {message}")
