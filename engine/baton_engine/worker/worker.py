"""A worker: the model runner, the KV memory and the KV connector of one rank.

Executors call the methods of `Worker` by name:

1. at start: join_groups (if there are other ranks), load_model, num_available_blocks,
   initialize_cache, warm_up, open_connector, connect, model_info
2. for each step: execute_model, sample_tokens
3. when needed: the other methods

An expert-parallel engine commits a generation before its first step with tokens. A generation is a
fixed set of ranks with a placement of experts on these ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from baton_engine.distributed.group import ParallelContext
from baton_engine.distributed.group_errors import GroupBrokenError
from baton_engine.distributed.process_group import create_parallel_context, join_generation
from baton_engine.distributed.store.handshake import store_secret
from baton_engine.distributed.store.wire import StoreAddress
from baton_engine.executor.base import ModelInfo
from baton_engine.executor.step import (
    GrammarOutput,
    ModelRunnerOutput,
    PendingOutput,
    SchedulerOutput,
)
from baton_engine.models.errors import ConfigurationError
from baton_engine.worker.devices import resolve_device
from baton_engine.worker.kv_role_checks import check_kv_transfer
from baton_engine.worker.memory.peer_memory import PeerMemory
from baton_engine.worker.memory_profiling import profile_num_blocks
from baton_engine.worker.model_runner import ModelRunner
from baton_engine.worker.profiler import Profiler
from baton_engine.worker.sleep import sleep, wake_up
from baton_kv_transfer import side_channel
from baton_kv_transfer.connector import ConnectorStats, KVConnectorWorker
from baton_kv_transfer.memory.layout import KVCacheLayout, RankAddress
from baton_kv_transfer.transfer_connector import TransferConnector
from baton_kv_transfer.transports.ucx.library import UCXError
from baton_protocol.options.config import EngineConfig, KVRole, pod_ip
from baton_protocol.service_key import ServiceKey
from baton_protocol.topology import ExpertLoads, Generation

if TYPE_CHECKING:  # an engine without expert parallelism never imports worker.experts
    from baton_engine.worker.experts.generations import Generations
    from baton_engine.worker.experts.preparation import Preparation

logger = logging.getLogger(__name__)


class Worker:
    """One rank of an engine. Executors call its public methods."""

    def __init__(self, config: EngineConfig, instance_id: str, rank: int = 0) -> None:
        """Create a worker without groups, model or KV cache.

        Args:
            config: configuration of the engine.
            instance_id: id of the engine process to which this worker belongs.
            rank: global rank of this worker.
        """
        self.config = config
        self.instance_id = instance_id
        self.rank = rank
        self.parallel = ParallelContext()
        self.connector: KVConnectorWorker | None = None
        self._runner: ModelRunner | None = None
        self._profiler: Profiler
        self._generations: Generations | None = None
        self._peer_memory: PeerMemory | None = None
        self._info: ModelInfo | None = None
        self._step: SchedulerOutput | None = None
        #: The step whose KV blocks `_publish_blocks` has yet to publish. None: no such step.
        self._unpublished: SchedulerOutput | None = None

    # Getting ready

    def join_groups(
        self,
        store_address: StoreAddress,
        generation: int,
        host: str | None = None,
        secret: bytes = b"",
    ) -> None:
        """Join the tensor and pipeline groups of this rank. Collective.

        Args:
            store_address: address of the rendezvous store, through which ranks find each other.
            generation: number that identifies the groups of this call. All ranks pass the same
                number, which no earlier call has used.
            host: address of this worker. If None, the address of the pod.
            secret: secret that authenticates clients of the store. Empty: no authentication.

        Raises:
            ConfigurationError: there are fewer GPUs than ranks, or torch has no NCCL.
            TimeoutError: not all ranks joined in time.
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
            secret=secret,
        )

    def load_model(self) -> None:
        """Read this rank's part of the weights.

        Raises:
            ConfigurationError: the model or the configuration cannot be served.
        """
        self._runner = runner = ModelRunner(self.config, self.parallel)
        folder = self.config.observability.profiler_dir
        self._profiler = Profiler(folder, self.rank, runner.device)
        if self._transfers:
            check_kv_transfer(self.config, runner.spec.model_config)
        runner.load_model()
        if self.config.parallel.enable_expert_parallel:
            self._generations = self._make_generations(runner)

    def num_available_blocks(self) -> tuple[int, int]:
        """Return the numbers of (device blocks, host swap blocks) that fit on this rank."""
        return profile_num_blocks(self._model_runner)

    def initialize_cache(self, num_blocks: int, num_swap_blocks: int) -> None:
        """Allocate the KV cache. Pass the same numbers of blocks to all ranks.

        Args:
            num_blocks: number of blocks on the device.
            num_swap_blocks: number of host blocks for swapped requests.
        """
        self._model_runner.allocate_kv_cache(num_blocks, num_swap_blocks)
        spec, model = self._model_runner.spec, self._model_runner.spec.model_config
        self._info = ModelInfo(
            num_blocks=num_blocks,
            vocab_size=model.vocab_size,
            eos_token_ids=tuple(model.eos_token_ids),
            max_position_embeddings=model.max_position_embeddings,
            compatibility_hash=spec.compatibility_hash,
            num_swap_blocks=num_swap_blocks,
            num_offload_blocks=spec.num_offload_blocks,
            num_sparse_layers=len(model.sparse_layers),
            num_experts=model.num_experts,
            expert_bytes=(
                self.parallel.tensor.size * self._generations.expert_bytes()
                if self._generations is not None
                else 0
            ),
            kv=spec.kv_compatibility(side_channel.VERSION) if self._transfers else None,
            task=model.task,
            vector_size=model.hidden_size,
            runs_whole_prompts=model.runs_whole_prompts,
            chunks_prompts=not model.is_encoder,
            pair_format=model.pair_format,
        )

    def warm_up(self) -> None:
        """Compile the model and run a few batches before the first request. Collective."""
        self._model_runner.warm_up()

    def open_connector(self, wakeup: Callable[[], None]) -> RankAddress | None:
        """Create the KV connector, if one is configured. Peers are not served before `connect`.

        Args:
            wakeup: called in the connector's thread when transfers have ended. The next step
                reports these transfers.

        Returns:
            Address of the connector and KV heads of this rank. None without a connector.

        Raises:
            ConfigurationError: the configured transport cannot be used on this machine.
        """
        if not self._transfers:
            return None
        spec, host = self._model_runner.spec, pod_ip()
        try:
            self.connector = TransferConnector(
                self.config.kv_transfer,
                instance_id=self.instance_id,
                compatibility_hash=spec.compatibility_hash,
                host=host,
                rank=self.rank,
                service_key=ServiceKey.load(self.config.service_key_file),
            )
        except (ValueError, UCXError) as error:
            raise ConfigurationError("KVTransferInvalid", str(error)) from error
        self.connector.set_wakeup(wakeup)
        return RankAddress(host, self.connector.port, spec.kv_cache_layout(1).heads)

    def connect(self, ranks: Sequence[RankAddress]) -> None:
        """Start to serve the KV cache to peers, if there is a connector.

        Args:
            ranks: the results of `open_connector` on all workers, in rank order.

        Raises:
            ConfigurationError: the KV cache cannot be exchanged with peers.
        """
        if self.connector is None:
            return
        kv = self._model_runner.kv
        assert kv is not None, "initialize_cache() first"
        try:
            self._peer_memory = self.make_peer_memory(kv.cache, kv.layout)
            self.connector.register_kv_cache(self._peer_memory.memory, list(ranks))
        except ValueError as error:
            raise ConfigurationError("KVTransferInvalid", str(error)) from error

    def make_peer_memory(self, cache: torch.Tensor, layout: KVCacheLayout) -> PeerMemory:
        """Create the memory through which peers read and write the KV cache."""
        return PeerMemory(cache, layout, self.config.kv_transfer.staging_bytes)

    def model_info(self) -> ModelInfo:
        assert self._info is not None, "initialize_cache() first"
        return self._info

    # Steps

    def execute_model(self, step: SchedulerOutput) -> None:
        """Run a step: start its KV transfers, run its tokens, publish the blocks that it completes.

        Peers can load published blocks before the step has ended.
        """
        runner = self._model_runner
        self._step = self._unpublished = step
        if step.store:  # before a transfer may write to these blocks
            runner.store_evicted(step)
        if self.connector is not None and step.connector:
            self._mark_queued_work()
            self.connector.start(step.connector)
        if step.reaches_model_runner:
            try:
                runner.execute_model(step, self._publish_blocks if step.connector.saves else None)
            except GroupBrokenError:
                self._step = None  # the step is dropped
                raise
        self._publish_blocks()

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput | PendingOutput:
        """Sample the tokens of the last executed step. Return tokens and ended KV transfers.

        On a GPU, the result may be a `PendingOutput`, so that the caller can prepare the next step.
        """
        assert self._step is not None, "execute_model() first"
        step, self._step = self._step, None
        output = (
            self._model_runner.sample_tokens(grammar)
            if step.reaches_model_runner
            else ModelRunnerOutput()
        )
        if self.connector is not None:
            output.connector = self.connector.get_finished()
        return output

    # Generations of an expert-parallel group: see worker.experts.generations

    def prepare_generation(self, generation: Generation, current: Generation | None = None) -> None:
        """Start to prepare a generation (ranks and expert placement) in the background.

        Args:
            generation: the generation to prepare.
            current: the generation in which steps run now. Only logged.
        """
        logger.info(
            "this worker prepares generation %d (operation %s, current generation %s)",
            generation.number,
            generation.operation_id or "-",
            current.number if current is not None else "none",
        )
        self._expert_generations.prepare(generation)

    def preparation(self) -> Preparation:
        return self._expert_generations.preparation()

    def commit_generation(self, nonce: str) -> None:
        """Make the prepared generation (ranks and expert placement) the current generation.

        Call this between two steps.

        Raises:
            ValueError: no generation with this nonce is prepared.
        """
        self._expert_generations.commit(nonce)

    def drop_generation(self, nonce: str) -> None:
        """Drop the next generation (ranks and expert placement) if it has this nonce."""
        self._expert_generations.drop(nonce)

    def leave_generation(self) -> None:
        self._expert_generations.leave()

    def expert_loads(self) -> ExpertLoads:
        return self._expert_generations.loads()

    def interrupt(self, nonce: str = "") -> None:
        """Abort the exchanges with other expert ranks in the current generation.

        A step that waits in an exchange raises GroupBrokenError. This method can be called from any
        thread.

        Args:
            nonce: nonce of the generation to interrupt. Do nothing if another generation is
                current. Empty: interrupt the current generation.
        """
        if self._generations is not None:
            self._generations.interrupt(nonce)

    # On request

    def connector_stats(self) -> ConnectorStats | None:
        return self.connector.stats() if self.connector is not None else None

    def sleep(self, level: int) -> None:
        """Release the memory of the KV cache and the weights until `wake_up`.

        Level 1 moves the weights from a GPU to host memory, and does not change weights on a CPU.
        Level 2 drops the weights.

        The engine core refuses to sleep while other engines use the KV cache or the experts.

        Raises:
            ValueError: the level is unknown.
        """
        sleep(self._model_runner, level)

    def wake_up(self, tags: list[str] | None = None) -> str:
        """Restore the weights, an empty KV cache or both after `sleep`.

        Args:
            tags: what to restore in this call: "weights", "kv_cache" or both. None: both.

        Returns:
            `ModelSpec.compatibility_hash`, which changes if other weights were loaded.
        """
        wake_up(self._model_runner, tags)
        return self._model_runner.spec.compatibility_hash

    def start_profile(self) -> None:
        """Start to record steps with torch's profiler.

        Raises:
            ValueError: observability.profiler_dir is not configured.
            RuntimeError: the profiler is already running.
        """
        self._profiler.start()

    def stop_profile(self) -> Path:
        """Stop the profiler, write the trace and return its path."""
        return self._profiler.stop()

    def shutdown(self) -> None:
        """Disconnect from peers and leave all groups. Idempotent."""
        if self._info is not None:  # steps may be running on the device
            with suppress(RuntimeError):  # a failed step has reported its error
                self._model_runner.finish_steps()
        if self.connector is not None:
            self.connector.shutdown()
            self.connector = None
        if self._generations is not None:
            self._generations.leave()
        self._leave_groups()

    def _publish_blocks(self) -> None:
        """Let peers load the KV blocks that the step completes. A second call does nothing."""
        step, self._unpublished = self._unpublished, None
        if step is not None and self.connector is not None and step.connector.saves:
            self._mark_queued_work()
            self.connector.save(step.connector)

    def _mark_queued_work(self) -> None:
        """Make the KV connector's later block copies wait for the work now queued on the device."""
        if self._peer_memory is not None:
            self._peer_memory.mark()

    def _take_gpu(self) -> None:
        """Select the GPU whose index the environment variable LOCAL_RANK contains.

        The launcher sets this variable, as torchrun does.
        """
        index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if index >= count:
            raise ConfigurationError(
                "InsufficientDevices",
                f"worker {self.rank} needs a GPU of its own, but torch finds only {count}; "
                "lower parallel.tensor_parallel_size or pipeline_parallel_size, or give the pod "
                "more GPUs",
            )
        torch.cuda.set_device(index)

    def _leave_groups(self) -> None:
        self.parallel.tensor.close()
        self.parallel.pipeline.close()
        self.parallel = ParallelContext()

    @property
    def _model_runner(self) -> ModelRunner:
        assert self._runner is not None, "load_model() first"
        return self._runner

    @property
    def _expert_generations(self) -> Generations:
        assert self._generations is not None, (
            "only an engine with parallel.enable_expert_parallel has generations"
        )
        return self._generations

    def _make_generations(self, runner: ModelRunner) -> Generations:
        from baton_engine.worker.experts.generations import ExpertWorker, Generations

        timeout_s = self.config.parallel.collective_timeout_s
        tensor = self.parallel.tensor
        # A tensor rank whose expert group does not respond must time out before the other tensor
        # ranks, which wait for this rank.
        step_timeout_s = timeout_s / 2 if tensor.size > 1 else timeout_s
        secret = store_secret(ServiceKey.load(self.config.service_key_file))
        return Generations(
            ExpertWorker(
                self.instance_id,
                tensor.rank,
                runner.loaded.expert_store(),
                runner.spec.compatibility_hash,
                partial(join_generation, join_timeout_s=timeout_s, secret=secret),
                step_timeout_s,
            )
        )

    @property
    def _transfers(self) -> bool:
        return self.config.kv_transfer.role is not KVRole.NONE
