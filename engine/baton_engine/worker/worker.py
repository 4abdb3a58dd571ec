"""A worker: one rank's model runner, its KV memory, and the connector that moves blocks in and out of it.

Executors call its methods by name, in this order: join_groups (if there are other ranks), load_model, num_available_blocks,
initialize_cache, warm_up, connect, model_info; then execute_model and sample_tokens per step, and the rest when asked to.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from baton_engine.core.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from baton_engine.distributed.group import ParallelContext
from baton_engine.distributed.process_group import StoreAddress, create_parallel_context
from baton_engine.executor.base import ModelInfo
from baton_engine.models.errors import ConfigurationError
from baton_engine.protocol.config import EngineConfig, KVRole, pod_ip
from baton_engine.worker.devices import resolve_device
from baton_engine.worker.model_runner import ModelRunner
from baton_kv_transfer.connector import ConnectorStats, KVConnectorWorker
from baton_kv_transfer.factory import create_connector

logger = logging.getLogger(__name__)


class Worker:
    def __init__(self, config: EngineConfig, instance_id: str, rank: int = 0) -> None:
        """Cheap; `join_groups` and `load_model` do the work.

        Args:
            instance_id: of the engine process this worker belongs to.
            rank: global rank of this worker.
        """
        self.config = config
        self.instance_id = instance_id
        self.rank = rank
        self.parallel = ParallelContext()
        self.connector: KVConnectorWorker | None = None
        self._runner: ModelRunner | None = None
        self._kv_cache: torch.Tensor | None = None
        self._info: ModelInfo | None = None
        self._step: SchedulerOutput | None = None

    # Getting ready

    def join_groups(self, store_address: StoreAddress, generation: int, host: str | None = None) -> None:
        """Meets the other ranks. Collective.

        Args:
            host: this worker's own address; None: the pod's.

        Raises:
            ConfigurationError: there are fewer GPUs than ranks.
            TimeoutError: not all of them came.
        """
        self._leave_groups()
        device = resolve_device(self.config.device)
        if device.type == "cuda":
            self._take_gpu()
        self.parallel = create_parallel_context(
            self.config.parallel,
            self.rank,
            StoreAddress(*store_address),
            generation,
            device,
            self.config.parallel.collective_timeout_s,
            host=host,
        )

    def load_model(self) -> None:
        """Reads this rank's part of the weights.

        Raises:
            ConfigurationError: the model or the configuration cannot be served.
        """
        self._runner = runner = ModelRunner(self.config, self.parallel)
        if self._transfers:
            self._check_transfers(runner.device)
        runner.load_model()

    def num_available_blocks(self) -> tuple[int, int]:
        """(device blocks, host blocks for swapped requests) that this rank has room for."""
        return self._loaded.profile_num_blocks()

    def initialize_cache(self, num_blocks: int, num_swap_blocks: int) -> None:
        """Allocates the KV cache: so many blocks on every rank."""
        runner = self._loaded
        self._kv_cache = runner.allocate_kv_cache(num_blocks, num_swap_blocks)
        self._info = ModelInfo(
            num_blocks=num_blocks,
            vocab_size=runner.model_config.vocab_size,
            eos_token_ids=tuple(runner.model_config.eos_token_ids),
            max_position_embeddings=runner.model_config.max_position_embeddings,
            compatibility_hash=runner.compatibility_hash,
            num_swap_blocks=num_swap_blocks,
        )

    def warm_up(self) -> None:
        """Runs a few batches, so that the first request pays for no compilation. Collective."""
        self._loaded.warm_up()

    def connect(self, wakeup: Callable[[], None]) -> None:
        """Opens the KV cache to peers, if configured.

        Args:
            wakeup: called from the connector's thread when the next step would find something new.

        Raises:
            ConfigurationError: the transport cannot be used here.
        """
        if not self._transfers:
            return
        assert self._kv_cache is not None, "initialize_cache() first"
        runner = self._loaded
        try:
            self.connector = create_connector(
                self.config.kv_transfer,
                instance_id=self.instance_id,
                compatibility_hash=runner.compatibility_hash,
                host=pod_ip(),
            )
        except ValueError as error:
            raise ConfigurationError("KVTransferInvalid", str(error)) from error
        self.connector.set_wakeup(wakeup)
        self.connector.register_kv_cache(
            self._kv_cache.data_ptr(), runner.kv_cache_layout(self.model_info().num_blocks)
        )

    def model_info(self) -> ModelInfo:
        assert self._info is not None, "initialize_cache() first"
        return self._info

    # Steps

    def execute_model(self, step: SchedulerOutput) -> None:
        """Starts the step's transfers and runs its tokens."""
        runner = self._loaded
        self._step = step
        if self.connector is not None and step.connector:
            self.connector.start(step.connector)
        if step.reaches_model_runner:
            runner.execute_model(step)

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Samples from the step that ran last, and publishes the blocks it completed."""
        assert self._step is not None, "execute_model() first"
        step, self._step = self._step, None
        output = self._loaded.sample_tokens(grammar) if step.reaches_model_runner else ModelRunnerOutput()
        if self.connector is not None:
            if step.connector.saves:
                self.connector.save(step.connector)
            output.connector = self.connector.get_finished()
        return output

    # On request

    def connector_stats(self) -> ConnectorStats | None:
        return self.connector.stats() if self.connector is not None else None

    def sleep(self, level: int) -> None:
        """Gives memory back until `wake_up`; see `ModelRunner.sleep`. Raises ValueError if peers may read that memory."""
        if self.connector is not None:
            raise ValueError(
                f"an engine with kv_transfer.role={self.config.kv_transfer.role.value} cannot sleep: other engines read and "
                f"write its KV cache; drain it and delete its pod instead"
            )
        self._loaded.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._loaded.wake_up(tags)

    def start_profile(self) -> None:
        self._loaded.start_profile()

    def stop_profile(self) -> Path:
        """Returns the trace's file."""
        return self._loaded.stop_profile()

    def shutdown(self) -> None:
        """Leaves peers and groups. Idempotent."""
        if self.connector is not None:
            self.connector.shutdown()
            self.connector = None
        self._leave_groups()

    def _take_gpu(self) -> None:
        """Ranks of one host take one GPU each. What starts them says which, as torchrun does."""
        index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if index >= count:
            raise ConfigurationError(
                "InsufficientDevices",
                f"worker {self.rank} needs a GPU of its own, but this host shows {count}; lower "
                f"parallel.tensor_parallel_size or pipeline_parallel_size, or give the pod more GPUs",
            )
        torch.cuda.set_device(index)

    def _leave_groups(self) -> None:
        self.parallel.tensor.close()
        self.parallel.pipeline.close()
        self.parallel = ParallelContext()

    @property
    def _loaded(self) -> ModelRunner:
        assert self._runner is not None, "load_model() first"
        return self._runner

    @property
    def _transfers(self) -> bool:
        return self.config.kv_transfer.role is not KVRole.NONE

    def _check_transfers(self, device: torch.device) -> None:
        role, world_size = self.config.kv_transfer.role.value, self.config.parallel.world_size
        if world_size > 1:
            raise ConfigurationError(
                "KVTransferInvalid",
                f"kv_transfer.role is {role}, but KV blocks are only moved between engines of one worker and "
                f"tensor_parallel_size x pipeline_parallel_size is {world_size}; set both to 1, or kv_transfer.role to none",
            )
        if device.type != "cpu":
            raise ConfigurationError(
                "KVTransferInvalid",
                f"kv_transfer.role is {role}, but KV blocks are only moved between host memories "
                f"and device is {device.type}; set device to cpu, or kv_transfer.role to none",
            )
