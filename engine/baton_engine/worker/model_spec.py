"""What one rank loads: its part of a checkpoint, the dtype, and the layout and hash of its KV."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch

from baton_engine.distributed.group import ParallelContext
from baton_engine.models.checkpoint.checkpoint_config import (
    CheckpointConfig,
    load_checkpoint_config,
)
from baton_engine.models.checkpoint.loader import identity_files
from baton_engine.models.checkpoint.sharding import ModelShard, shard, split_kv_heads
from baton_engine.models.errors import ConfigurationError
from baton_engine.worker.devices import (
    check_quantization,
    dtype_name,
    resolve_device,
    resolve_dtype,
)
from baton_engine.worker.memory.block_budget import BlockSize, offload_blocks
from baton_kv_transfer.memory.layout import KVCacheLayout
from baton_protocol.kv_compatibility import KVCompatibility
from baton_protocol.options.config import EngineConfig, compatibility_hash, container_path

#: Order of the KV cache's axes: num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim.
LAYOUT_NAME = "NHL2BD"


class ModelSpec:
    """The properties of one rank's model, without weights.

    The first access to a property reads the checkpoint, and raises the same errors as
    `ModelRunner.load_model`.
    """

    def __init__(self, config: EngineConfig, parallel: ParallelContext) -> None:
        """Select the device.

        Raises:
            ConfigurationError: the device or the quantization cannot be used.
        """
        self.config, self.parallel = config, parallel
        self.path: Path = container_path(config.model.path)
        self.device = resolve_device(config.device)
        check_quantization(config.model.quantization, self.device)

    @cached_property
    def model_config(self) -> CheckpointConfig:
        model = self.config.model
        return load_checkpoint_config(self.path, model.runner, model.classifier_from_token)

    @cached_property
    def shard(self) -> ModelShard:
        """The layers and heads of the model that this rank holds."""
        return shard(self.model_config, self.parallel)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and KV cache."""
        return resolve_dtype(self.config.model.dtype, self.model_config.dtype, self.device)

    @cached_property
    def max_model_len(self) -> int:
        """The maximum number of tokens of one request, prompt and generated.

        Raises:
            ConfigurationError: the configured number is not between 1 and the model's limit.
        """
        limit = self.model_config.max_position_embeddings
        configured = self.config.model.max_model_len
        if configured is not None and not 0 < configured <= limit:
            raise ConfigurationError(
                "InvalidConfig",
                f"model.max_model_len must be in [1, {limit}] for this model, got {configured}",
            )
        return configured or limit

    @property
    def compatibility_hash(self) -> str:
        """A hash that is equal on all engines that may exchange KV blocks.

        Such engines have the same checkpoint (`identity_files`), dtype, quantization and layout.
        The hash changes when `wake_up` loads other weights.
        """
        return self._hashes[0]

    def forget_hashes(self) -> None:
        """Clear the cached hashes, because the checkpoint's files may have changed."""
        vars(self).pop("_hashes", None)

    def kv_cache_layout(self, num_blocks: int) -> KVCacheLayout:
        """Return the layout of a KV cache of `num_blocks` blocks on this rank."""
        heads = split_kv_heads(self.model_config.num_kv_heads, self.parallel.tensor)
        return KVCacheLayout(
            num_blocks=num_blocks,
            num_kv_heads=heads.length,
            first_kv_head=heads.start,
            total_kv_heads=heads.total,
            num_layers=self.shard.num_layers,
            block_size=self.config.cache.block_size,
            head_dim=self.model_config.head_dim,
            dtype=dtype_name(self.dtype),
            name=LAYOUT_NAME,
        )

    def kv_compatibility(self, version: int) -> KVCompatibility:
        """Return the properties that another engine must share to exchange KV blocks with this one.

        Args:
            version: protocol version of the KV connector's side channel.
        """
        layout = self.kv_cache_layout(1)
        return KVCompatibility(
            version=version,
            checkpoint=self._hashes[1],
            dtype=layout.dtype,
            quantization=self.config.model.quantization or "none",
            layout=layout.name,
            block_size=layout.block_size,
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_model_heads,
            head_dim=layout.head_dim,
            transport=self.config.kv_transfer.transport,
        )

    @property
    def block_size(self) -> BlockSize:
        own = self.kv_cache_layout(1)
        # More than the model's number of KV heads if several ranks hold copies of a head.
        heads = own.num_kv_heads * self.parallel.tensor.size
        per_head_and_layer = own.block_nbytes // (own.num_kv_heads * own.num_layers)
        return BlockSize(
            own.block_nbytes, heads * self.model_config.num_layers * per_head_and_layer
        )

    @property
    def num_offload_blocks(self) -> int:
        """Number of host blocks for evicted prefixes. Equal on all ranks."""
        return offload_blocks(self.config.cache, self.block_size)

    @cached_property
    def _hashes(self) -> tuple[str, str]:
        """(compatibility hash, hash of the checkpoint alone), computed at the first access."""
        files = identity_files(self.path)
        compatible = compatibility_hash(
            files, dtype_name(self.dtype), LAYOUT_NAME, self.config.model.quantization
        )
        return compatible, compatibility_hash(files, "", "")
