"""A worker: one model runner, its KV memory, and the connector that moves blocks in and out of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from baton_engine.core.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from baton_engine.executor.base import ModelInfo
from baton_engine.models.errors import ConfigurationError
from baton_engine.protocol.config import EngineConfig, KVRole, pod_ip
from baton_engine.worker.model_runner import ModelRunner
from baton_kv_transfer.connector import ConnectorStats, KVConnectorWorker
from baton_kv_transfer.factory import create_connector

logger = logging.getLogger(__name__)


class Worker:
    def __init__(self, config: EngineConfig, instance_id: str) -> None:
        self.config = config
        self.instance_id = instance_id
        self.connector: KVConnectorWorker | None = None
        self._runner: ModelRunner | None = None
        self._kv_cache: torch.Tensor | None = None
        self._step: SchedulerOutput | None = None

    def initialize(self, wakeup: Callable[[], None]) -> ModelInfo:
        """Loads the model, allocates and registers the KV cache, warms up.

        Args:
            wakeup: called from the connector's thread when the next step would find something new.

        Raises:
            ConfigurationError: the model or the configuration cannot be served.
        """
        started = time.monotonic()
        self._runner = runner = ModelRunner(self.config)
        transfers = self.config.kv_transfer.role is not KVRole.NONE
        if transfers and runner.device.type != "cpu":
            raise ConfigurationError(
                "KVTransferInvalid",
                f"kv_transfer.role is {self.config.kv_transfer.role.value}, but KV blocks are only moved between host memories "
                f"and device is {runner.device.type}; set device to cpu, or kv_transfer.role to none",
            )
        runner.load_model()
        logger.info("model %s loaded in %.1f s", self.config.model.path, time.monotonic() - started)
        num_blocks = self._num_blocks(runner)
        self._kv_cache = runner.allocate_kv_cache(num_blocks)
        runner.warm_up()
        if transfers:
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
            self.connector.register_kv_cache(self._kv_cache.data_ptr(), runner.kv_cache_layout(num_blocks))
        return ModelInfo(
            num_blocks=num_blocks,
            vocab_size=runner.model_config.vocab_size,
            eos_token_ids=tuple(runner.model_config.eos_token_ids),
            max_position_embeddings=runner.model_config.max_position_embeddings,
            compatibility_hash=runner.compatibility_hash,
        )

    def execute_model(self, step: SchedulerOutput) -> None:
        """Starts the step's transfers and runs its tokens."""
        assert self._runner is not None, "initialize() first"
        self._step = step
        if self.connector is not None and step.connector:
            self.connector.start(step.connector)
        if step.reaches_model_runner:
            self._runner.execute_model(step)

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Samples from the step that ran last, and publishes the blocks it completed."""
        assert self._runner is not None, "initialize() first"
        assert self._step is not None, "execute_model() first"
        step, self._step = self._step, None
        output = self._runner.sample_tokens(grammar) if step.reaches_model_runner else ModelRunnerOutput()
        if self.connector is not None:
            if step.connector.saves:
                self.connector.save(step.connector)
            output.connector = self.connector.get_finished()
        return output

    def connector_stats(self) -> ConnectorStats | None:
        return self.connector.stats() if self.connector is not None else None

    def shutdown(self) -> None:
        if self.connector is not None:
            self.connector.shutdown()
            self.connector = None

    def _num_blocks(self, runner: ModelRunner) -> int:
        cache = self.config.cache
        if cache.num_blocks is not None:
            num_blocks = cache.num_blocks
        else:
            num_blocks = cache.memory_bytes // runner.kv_cache_layout(1).block_nbytes
        if num_blocks < 1:
            raise ConfigurationError(
                "InsufficientMemory",
                f"cache.memory_bytes={cache.memory_bytes} does not hold one KV block of "
                f"{runner.kv_cache_layout(1).block_nbytes} bytes; raise it",
            )
        return num_blocks
