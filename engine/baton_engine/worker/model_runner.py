"""Runs the scheduler's steps on one device, from request ids to sampled tokens.

The runner owns the model, the KV memory and the input batch. It makes no scheduling decisions: each
step names the requests to run and their blocks.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from torch import Tensor

from baton_engine.distributed.group import ParallelContext
from baton_engine.executor.step import (
    GrammarOutput,
    ModelRunnerOutput,
    PendingOutput,
    SchedulerOutput,
)
from baton_engine.models.checkpoint.checkpoint_config import (
    CheckpointConfig,
    load_checkpoint_config,
)
from baton_engine.models.checkpoint.loader import identity_files
from baton_engine.models.checkpoint.pooling_config import PoolingType
from baton_engine.models.checkpoint.sharding import ModelShard, shard, split_kv_heads
from baton_engine.models.errors import ConfigurationError
from baton_engine.models.factory import load_model
from baton_engine.models.fused_layers import fuse_layers
from baton_engine.models.layers import Model
from baton_engine.worker import dummy_steps
from baton_engine.worker.compilation_plan import plan_compilation
from baton_engine.worker.devices import (
    check_quantization,
    dtype_name,
    resolve_device,
    resolve_dtype,
    to_device,
)
from baton_engine.worker.forward_runner import ForwardRunner, graph_backend
from baton_engine.worker.input_batch import InputBatch, ScheduledRows
from baton_engine.worker.memory.block_budget import (
    BlockSize,
    blocks_on_cpu,
    blocks_on_gpu,
    offload_blocks,
)
from baton_engine.worker.memory.freed_memory import keep_freed_memory, return_freed_memory
from baton_engine.worker.memory.host_memory import available_host_memory
from baton_engine.worker.memory.kv_memory import KVMemory
from baton_engine.worker.optional_outputs import prompt_logprobs_of, routed_experts_of
from baton_engine.worker.packed_weights import pack_weights, quantize_weights
from baton_engine.worker.pooler import Pooler
from baton_engine.worker.profiler import Profiler
from baton_engine.worker.sampled_tokens import Int64Array, SampledTokens
from baton_engine.worker.sampling.logprobs import count_nans
from baton_engine.worker.sampling.sampler import fallback_token, report_logprobs, sample
from baton_kernels import cpu
from baton_kernels.block_copy import copy_blocks
from baton_kernels.sampling import greedy
from baton_kv_transfer.memory.layout import KVCacheLayout
from baton_protocol.kv_compatibility import KVCompatibility
from baton_protocol.options.config import EngineConfig, compatibility_hash, container_path
from baton_protocol.pooling_params import PairFormat, Task

if TYPE_CHECKING:  # an engine without expert parallelism never imports worker.experts
    from baton_engine.worker.experts.expert_steps import ExpertSteps
    from baton_engine.worker.experts.expert_weights import ExpertStore

logger = logging.getLogger(__name__)

#: Order of the KV cache's axes: num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim.
LAYOUT_NAME = "NHL2BD"
#: The tags of `wake_up`.
WEIGHTS, KV_CACHE = "weights", "kv_cache"


@dataclass(slots=True)
class _StepInFlight:
    """State between execute_model and sample_tokens, on the last pipeline stage."""

    scheduled: ScheduledRows
    #: [num_tokens, hidden_size].
    hidden: Tensor
    #: Requests whose last known token ran.
    sampling_ids: list[str]
    sampling_rows: Int64Array
    #: [len(sampling_ids), vocab_size]; None if no request samples.
    logits: Tensor | None
    routed_experts: list[Tensor] | None


class ModelRunner:
    """Runs steps on one rank.

    Call load_model(), profile_num_blocks(), allocate_kv_cache(n) and warm_up(). Then call
    execute_model(step) and sample_tokens(grammar) for each step. Make all calls on one thread.

    The first access to model_config, dtype or compatibility_hash reads the checkpoint, and raises
    the same errors as load_model.
    """

    def __init__(self, config: EngineConfig, parallel: ParallelContext | None = None) -> None:
        """Select the device. Weights are not read before `load_model`.

        Args:
            config: configuration of the engine.
            parallel: tensor and pipeline groups of this rank. All ranks apply the same steps. A
                pipeline stage sends hidden states to the next stage. Only the last stage samples.

        Raises:
            ConfigurationError: the device or the quantization cannot be used.
        """
        self.config = config
        self.parallel = parallel or ParallelContext()
        self.path: Path = container_path(config.model.path)
        self.device = resolve_device(config.device)
        check_quantization(config.model.quantization, self.device)
        self._rank = (
            self.parallel.pipeline.rank * self.parallel.tensor.size + self.parallel.tensor.rank
        )
        self._profiler = Profiler(config.observability.profiler_dir, self._rank, self.device)
        self._input_batch: InputBatch
        self._forward_runner: ForwardRunner | None = None
        self._model: Model | None = None
        self._expert_steps: ExpertSteps | None = None
        #: Set if the model pools prompts.
        self._pooler: Pooler | None = None
        #: The model while this runner sleeps at level 1 on a GPU, else None.
        self._model_on_host: Model | None = None
        self._kv: KVMemory | None = None
        self._in_flight: _StepInFlight | None = None
        #: Whether a step may end before its tokens are on the host. With pipeline stages, the next
        #: step carries the tokens to the first stage.
        self._defers_tokens = (
            self.device.type == "cuda"
            and config.scheduler.async_scheduling
            and config.parallel.pipeline_parallel_size == 1
        )
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        if self.device.type == "cpu":
            logger.info("CPU kernels: %s", cpu.DESCRIPTION)

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

    @property
    def compatibility_hash(self) -> str:
        """A hash that is equal on all engines that may exchange KV blocks.

        Such engines have the same checkpoint (`identity_files`), dtype, quantization and layout.
        The hash changes when `wake_up` loads other weights.
        """
        return self._hashes[0]

    @cached_property
    def _hashes(self) -> tuple[str, str]:
        """(compatibility hash, hash of the checkpoint alone)."""
        files = identity_files(self.path)
        compatible = compatibility_hash(
            files, dtype_name(self.dtype), LAYOUT_NAME, self.config.model.quantization
        )
        return compatible, compatibility_hash(files, "", "")

    @cached_property
    def _fallback_token(self) -> int:
        """The token of requests for which no token is possible."""
        return fallback_token(self.model_config.eos_token_ids, self.model_config.vocab_size)

    @property
    def task(self) -> Task:
        pooling = self.model_config.pooling
        return Task.GENERATE if pooling is None else pooling.task

    @property
    def pair_format(self) -> PairFormat | None:
        """How two texts become a prompt. None: the model scores no pairs."""
        if self.task is not Task.CLASSIFY:
            return None
        is_encoder = self.model_config.is_encoder
        return PairFormat.TOKENIZER if is_encoder else PairFormat.QWEN3_RERANKER

    @property
    def runs_whole_prompts(self) -> bool:
        """Whether the result of a prompt needs the hidden states of other tokens than the last."""
        pooling, is_encoder = self.model_config.pooling, self.model_config.is_encoder
        return pooling is not None and (pooling.type is not PoolingType.LAST or is_encoder)

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

    def load_model(self) -> None:
        """Read the configuration of the model and this rank's weights.

        Raises:
            ModelNotFound: the folder does not exist.
            ModelInvalid: a file or tensor is wrong. The message names the file or tensor.
            ConfigurationError: the model cannot be split over the configured ranks.
        """
        if self._is_expert_parallel:
            from baton_engine.worker.experts.config_checks import check_expert_parallel

            check_expert_parallel(self.config, self.model_config, self.device)
        if (pooling := self.model_config.pooling) is not None:
            self._pooler = Pooler(pooling)
        self._input_batch = InputBatch(
            self.config.scheduler.max_num_seqs, self.max_model_len, self.config.cache.block_size
        )
        self._load_weights()

    def expert_store(self) -> ExpertStore:
        """Create the store that reads single experts of the loaded expert-parallel model."""
        from baton_engine.worker.experts.expert_weights import ExpertStore, expert_form

        model = self._loaded()
        device = next(model.parameters()).device
        form = expert_form(self.config.model.quantization, self.dtype, device)
        return ExpertStore(self.path, model, self.dtype, device, form)

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

    def profile_num_blocks(self) -> tuple[int, int]:
        """Return the numbers of (cache blocks, host swap blocks) that fit.

        On a GPU, the largest step is run to measure how much memory it takes. There are no swap
        blocks if the scheduler never swaps.

        Raises:
            ConfigurationError: not one block fits, or the configured numbers do not fit.
        """
        size, cache, scheduler = self._block_size, self.config.cache, self.config.scheduler
        if scheduler.preemption_mode == "recompute":
            cache = msgspec.structs.replace(cache, swap_memory_bytes=0)
        if self.device.type == "cpu":
            return blocks_on_cpu(cache, size)
        forward, kv = self._runner(), KVMemory(self.kv_cache_layout(1), 0, self.device)
        largest = dummy_steps.largest(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        forward.compile(kv.cache)
        graph_bytes = forward.estimate_graph_bytes(kv.cache)
        run_largest = partial(dummy_steps.run, forward, largest, None, kv.cache)
        return blocks_on_gpu(cache, size, self.device, run_largest, graph_bytes)

    @property
    def num_offload_blocks(self) -> int:
        """Number of host blocks for evicted prefixes. Equal on all ranks."""
        return offload_blocks(self.config.cache, self._block_size)

    def allocate_kv_cache(self, num_blocks: int, num_swap_blocks: int = 0) -> Tensor:
        """Allocate the KV cache, zeroed, in one allocation.

        The shape is [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]. The call also
        allocates host blocks for swapped requests and for the offload tier. With a GPU, host blocks
        are pinned. On a CPU, their pages become resident at their first use.

        Args:
            num_blocks: number of blocks of the cache.
            num_swap_blocks: number of host blocks for swapped requests.

        Returns:
            The cache. The runner keeps the same tensor object for its whole life. While the runner
            sleeps, the tensor has no storage. After a wake-up, the address may differ.
        """
        layout = self.kv_cache_layout(num_blocks)
        self._kv = KVMemory(layout, num_swap_blocks, self.device, self.num_offload_blocks)
        if self.device.type == "cpu":
            num_ranks = self.parallel.tensor.size * self.parallel.pipeline.size  # on this host
            host_blocks = num_swap_blocks + self.num_offload_blocks  # not yet resident
            available = available_host_memory() // num_ranks - host_blocks * layout.block_nbytes
            keep_freed_memory(available)
        return self._kv.cache

    def warm_up(self) -> None:
        """Compile the model and capture graphs as configured, then run batches of typical shapes.

        These batches write no KV. Afterwards, the first requests do not wait for compilations.
        """
        _, kv = self._ready()
        self._runner().prepare(kv.cache)
        longest = min(kv.layout.num_blocks * self.config.cache.block_size, self.max_model_len)
        limits = (self.config.scheduler.max_num_seqs, self.config.scheduler.max_num_batched_tokens)
        for query_lens, seq_len in dummy_steps.typical(longest, *limits, self.device):
            dummy_steps.run(self._runner(), query_lens, seq_len, kv.cache)
        copy_blocks(kv.cache, torch.zeros((1, 2), dtype=torch.int64))  # block 0 onto itself

    @torch.inference_mode()
    def store_evicted(self, step: SchedulerOutput) -> None:
        """Copy the KV blocks that the step evicts to host memory (the offload tier).

        Call this before the step's KV transfers start, because they may overwrite these blocks.
        """
        _, kv = self._ready()
        kv.store_evicted(step)

    @torch.inference_mode()
    def execute_model(
        self, step: SchedulerOutput, kv_written: Callable[[], None] | None = None
    ) -> None:
        """Apply the changes of a step except `step.store`, run its tokens and write their KV.

        Hidden states and logits are kept for `sample_tokens`.

        Args:
            step: the step to run.
            kv_written: called during the step when the KV of all tokens is written. On a GPU, the
                call comes when the writes are queued. There is no call with expert parallelism,
                because a broken group makes the KV invalid. Captured graphs make no call either.

        Raises:
            GroupBrokenError: an expert group broke. All tensor ranks raise the error, even if the
                group of only one rank broke. There is nothing to sample. Steps may follow when
                another set of ranks is committed.
        """
        model, kv = self._ready()
        batch, pipeline = self._input_batch, self.parallel.pipeline
        self._in_flight = None
        batch.remove(step.finished_request_ids)
        if self._pooler is not None:
            self._pooler.forget(step.finished_request_ids)
        kv.move_blocks(step)
        for new in step.new_requests:
            batch.add(new)
        batch.update(step.cached_requests)
        if not step.num_scheduled_tokens:
            if step.wave_tokens and self._expert_steps is not None:
                self._expert_steps.run_dummy_batch(kv.cache, step.wave_tokens)
            return
        if self._expert_steps is not None:
            self._expert_steps.check_has_experts()
        scheduled = batch.schedule(step.num_scheduled_tokens)
        forward = batch.make_forward_batch(scheduled, kv.cache, self.device)
        wants_experts = bool(batch.wants_routed_experts[scheduled.rows].any())
        received = (
            None if self.parallel.is_first_stage else self._receive_hidden(scheduled.num_tokens)
        )
        experts = self._receive_routed_experts(scheduled.num_tokens) if wants_experts else None
        forward.context.routed_experts = experts
        forward.context.wave_tokens = step.wave_tokens
        if self._expert_steps is None:
            forward.context.kv_written = kv_written
        hidden = self._runner().run(forward, received)
        if self._expert_steps is not None:
            self._expert_steps.check_expert_groups(forward.context)
        if not self.parallel.is_last_stage:
            pipeline.send(hidden, pipeline.rank + 1)
            if experts:
                pipeline.send(torch.stack(experts).int(), pipeline.rank + 1)
            return
        self._in_flight = self._prepare_sampling(model, scheduled, hidden, experts)

    @torch.inference_mode()
    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput | PendingOutput:
        """Sample a token for each request whose last token ran, or pool the tokens of the step.

        The output also has the logprobs and routed experts for requests that ask for them.

        The sampled tokens are appended to the input batch of this worker. The scheduler sends the
        tokens only to other pipeline stages. Stages before the last return an empty output.

        With asynchronous scheduling on a GPU, the output of a step that has only tokens is pending,
        unless the step has a grammar. The caller can then prepare the next step while the GPU still
        runs this step.
        """
        output = ModelRunnerOutput()
        if self._in_flight is None:
            return output
        step, self._in_flight = self._in_flight, None
        batch = self._input_batch
        if self._pooler is not None:
            classify = self._loaded().classify
            output.pooler_output = self._pooler.pool(step.hidden, step.scheduled, batch, classify)
            return output
        if step.routed_experts is not None:
            output.routed_experts = routed_experts_of(step.routed_experts, step.scheduled, batch)
        if batch.wants_prompt_logprobs[step.scheduled.rows].any():
            compute_logits = self._loaded().compute_logits
            output.prompt_logprobs = prompt_logprobs_of(
                step.hidden, step.scheduled, batch, compute_logits, self.model_config.vocab_size
            )
        if step.logits is None:
            return output
        if self.config.observability.count_nans_in_logits:
            output.num_nans_in_logits = dict(
                zip(step.sampling_ids, count_nans(step.logits), strict=True)
            )
        eos_token_ids = self.model_config.eos_token_ids
        if grammar is None and batch.is_plain[step.sampling_rows].all():
            best = greedy(step.logits, self._fallback_token)
            tokens = SampledTokens(best.token_ids, best.is_impossible)
        else:
            bitmask = None if grammar is None else self._expand_bitmask(grammar, step.sampling_ids)
            inputs = batch.sampling_inputs(step.sampling_rows)
            sampled = sample(step.logits, inputs, eos_token_ids, bitmask)
            tokens = SampledTokens(sampled.token_ids, sampled.is_impossible)
            if batch.wants_logprobs[step.sampling_rows].any():
                logprobs = report_logprobs(step.logits, sampled, inputs, eos_token_ids)
                output.logprobs = {
                    request_id: reported
                    for request_id, reported in zip(step.sampling_ids, logprobs, strict=True)
                    if reported is not None
                }
        if self._defers_tokens and grammar is None and output == ModelRunnerOutput():
            batch.append_pending(step.sampling_rows, tokens)
            return PendingOutput(partial(_tokens_by_request, step.sampling_ids, tokens))
        batch.append_tokens(step.sampling_rows, tokens.wait())
        output.sampled_token_ids = _tokens_by_request(step.sampling_ids, tokens)
        return output

    def finish_steps(self) -> None:
        """Wait until the device has run the steps whose tokens are pending."""
        self._input_batch.settle()

    def sleep(self, level: int) -> None:
        """Release memory until `wake_up`.

        Both levels release the KV cache. Level 1 also moves the weights of a GPU to host memory.
        Level 2 drops the weights. All KV is lost, so the scheduler must compute it again.

        Raises:
            ValueError: the level is not 1 or 2.
        """
        if level not in (1, 2):
            raise ValueError(
                f"sleep level must be 1 (weights go to host memory) or 2 (weights are dropped), "
                f"got {level}"
            )
        self._in_flight = None
        self.finish_steps()
        if self._forward_runner is not None:
            self._forward_runner.drop_graphs()
        if self._kv is not None:
            self._kv.drop()
        if level == 2:
            self._model = self._model_on_host = None
            self._forward_runner = None
        elif self.device.type != "cpu" and self._model is not None:
            self._model_on_host, self._model = self._model, None  # before the move, which may fail
            self._model_on_host.to("cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.accelerator.empty_host_cache()  # pinned host blocks
        return_freed_memory()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Restore the weights and an empty KV cache after `sleep`.

        Args:
            tags: the parts to restore now: "weights", "kv_cache" or both. None restores both.

        Raises:
            ValueError: a tag is unknown.
            ModelInvalid: the checkpoint can no longer be read.
        """
        wanted = {WEIGHTS, KV_CACHE} if tags is None else set(tags)
        if unknown := wanted - {WEIGHTS, KV_CACHE}:
            raise ValueError(
                f"wake_up tags must be of {WEIGHTS} and {KV_CACHE}, got "
                f"{', '.join(sorted(unknown))}"
            )
        slept = self._model is None or (self._kv is not None and self._kv.is_dropped)
        if WEIGHTS in wanted and self._model is None:
            if self._model_on_host is not None:
                self._model, self._model_on_host = self._model_on_host.to(self.device), None
            else:
                vars(self).pop("_hashes", None)  # the checkpoint's files may have changed
                self._load_weights()
        if KV_CACHE in wanted and self._kv is not None:
            self._kv.restore()
        if slept and self._model is not None and self._kv is not None and not self._kv.is_dropped:
            self._runner().prepare(self._kv.cache)

    def start_profile(self) -> None:
        """Start to record steps with torch's profiler.

        Raises:
            ValueError: observability.profiler_dir is not configured.
        """
        self._profiler.start()

    def stop_profile(self) -> Path:
        """Stop the profiler, write the trace and return its path."""
        return self._profiler.stop()

    def _load_weights(self) -> None:
        show_progress = self._rank == 0 and sys.stderr.isatty()
        self._model = load_model(
            self.path,
            self.model_config,
            self.dtype,
            self.device,
            self.parallel,
            expert_parallel=self._is_expert_parallel,
            show_progress=show_progress,
        )
        if self._is_expert_parallel:
            from baton_engine.worker.experts.expert_steps import ExpertSteps

            self._expert_steps = ExpertSteps(self._model, self.parallel.tensor, self.device)
        backend = graph_backend(self.device)
        plan = plan_compilation(
            self.config, self.model_config, self.max_model_len, has_graphs=backend is not None
        )
        if (quantization := self.config.model.quantization) is not None:
            quantize_weights(self._model, quantization)
        elif plan.mode == "none":  # a packed weight cannot be traced
            pack_weights(self._model)
        # The fused operation includes attention, where compiled models are cut.
        if plan.mode == "none":
            self._model.fused_layers = fuse_layers(self._model)
        self._forward_runner = ForwardRunner(self._model, plan, backend)

    def _loaded(self) -> Model:
        if self._model is None:
            raise RuntimeError(
                "this runner has no weights: call load_model() first, or wake_up() after sleep()"
            )
        return self._model

    def _runner(self) -> ForwardRunner:
        self._loaded()
        assert self._forward_runner is not None, "load_model() makes it"
        return self._forward_runner

    def _ready(self) -> tuple[Model, KVMemory]:
        if self._kv is None or self._kv.is_dropped:
            raise RuntimeError(
                "this runner has no KV memory: call allocate_kv_cache() first, or wake_up() after "
                "sleep()"
            )
        return self._loaded(), self._kv

    @property
    def _is_expert_parallel(self) -> bool:
        return self.config.parallel.enable_expert_parallel

    @property
    def _block_size(self) -> BlockSize:
        own = self.kv_cache_layout(1)
        # More heads than the model has if several ranks hold copies of a head.
        heads = own.num_kv_heads * self.parallel.tensor.size
        per_head_and_layer = own.block_nbytes // (own.num_kv_heads * own.num_layers)
        return BlockSize(
            own.block_nbytes, heads * self.model_config.num_layers * per_head_and_layer
        )

    def _receive_hidden(self, num_tokens: int) -> Tensor:
        buffer = torch.empty(
            (num_tokens, self.model_config.hidden_size), dtype=self.dtype, device=self.device
        )
        return self.parallel.pipeline.recv(buffer, self.parallel.pipeline.rank - 1)

    def _receive_routed_experts(self, num_tokens: int) -> list[Tensor]:
        """Receive the ids of the experts that the sparse layers of earlier stages chose.

        Returns:
            One tensor per sparse layer. The sparse layers of this stage append to this list.
        """
        earlier = sum(layer < self.shard.first_layer for layer in self.model_config.sparse_layers)
        if not earlier:
            return []
        shape = (earlier, num_tokens, self.model_config.num_experts_per_tok)
        buffer = torch.empty(shape, dtype=torch.int32, device=self.device)
        return list(self.parallel.pipeline.recv(buffer, self.parallel.pipeline.rank - 1))

    def _prepare_sampling(
        self,
        model: Model,
        scheduled: ScheduledRows,
        hidden: Tensor,
        routed_experts: list[Tensor] | None,
    ) -> _StepInFlight:
        """Compute the logits of the requests that sample. Return the state for `sample_tokens`."""
        if self._pooler is not None:
            return _StepInFlight(scheduled, hidden, [], scheduled.rows[:0], None, None)
        sampling = self._input_batch.reaches_last_token(scheduled)
        logits: Tensor | None = None
        if scheduled.one_token_each and sampling.all():
            ids, rows = scheduled.request_ids, scheduled.rows
            logits = model.compute_logits(hidden)
        else:
            indices = np.flatnonzero(sampling)
            ids, rows = (
                [scheduled.request_ids[index] for index in indices.tolist()],
                scheduled.rows[indices],
            )
            last_tokens = scheduled.first_tokens[indices + 1] - 1
            if ids:
                logits = model.compute_logits(hidden[to_device(last_tokens, self.device)])
        return _StepInFlight(scheduled, hidden, ids, rows, logits, routed_experts)

    def _expand_bitmask(self, grammar: GrammarOutput, sampling_ids: list[str]) -> Tensor:
        """Return a bitmask with a row for each sampling request: int32 [len(sampling_ids), words].

        The rows of requests without a grammar have all bits set.
        """
        row_of = {request_id: row for row, request_id in enumerate(sampling_ids)}
        bitmask = np.full((len(sampling_ids), grammar.bitmask.shape[1]), -1, dtype=np.int32)
        bitmask[[row_of[request_id] for request_id in grammar.request_ids]] = grammar.bitmask
        return to_device(bitmask, self.device)


def _tokens_by_request(request_ids: list[str], tokens: SampledTokens) -> dict[str, int]:
    """Return the sampled token of each request, when the tokens are on the host.

    Log the requests for which no token was possible. This function may run in any thread.
    """
    for row in tokens.impossible_rows():
        logger.warning(
            "request %s is ended: all its logits are NaN or masked, so no token is possible",
            request_ids[row],
        )
    return dict(zip(request_ids, tokens.wait().tolist(), strict=True))
