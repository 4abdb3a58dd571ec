"""Runs the scheduler's steps on one device, from request ids to sampled tokens.

The runner owns the model, the KV memory and the input batch. It makes no scheduling decisions: each
step names the requests to run and their blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

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
from baton_engine.worker.devices import to_device
from baton_engine.worker.forward import dummy_steps
from baton_engine.worker.forward.forward_runner import ForwardRunner
from baton_engine.worker.input_batch import InputBatch, ScheduledRows
from baton_engine.worker.loaded_model import LoadedModel
from baton_engine.worker.memory.freed_memory import keep_freed_memory
from baton_engine.worker.memory.host_memory import available_host_memory
from baton_engine.worker.memory.kv_memory import KVMemory
from baton_engine.worker.model_spec import ModelSpec
from baton_engine.worker.optional_outputs import prompt_logprobs_of, routed_experts_of
from baton_engine.worker.pipeline_stage import PipelineStage
from baton_engine.worker.pooler import Pooler
from baton_engine.worker.sampling.logprobs import count_nans
from baton_engine.worker.sampling.sampled_tokens import Int64Array, SampledTokens
from baton_engine.worker.sampling.sampler import fallback_token, report_logprobs, sample
from baton_kernels import cpu
from baton_kernels.block_copy import copy_blocks
from baton_kernels.sampling import greedy
from baton_protocol.engine_messages import TokenLogprobs
from baton_protocol.options.config import EngineConfig

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _SamplingRows:
    """The requests that sample in a step, because their last known token ran. Never empty."""

    request_ids: list[str]
    #: Rows of the requests in the input batch.
    rows: Int64Array
    #: [len(request_ids), vocab_size].
    logits: Tensor


@dataclass(slots=True)
class _StepInFlight:
    """State between execute_model and sample_tokens, on the last pipeline stage."""

    scheduled: ScheduledRows
    #: [num_tokens, hidden_size].
    hidden: Tensor
    routed_experts: list[Tensor] | None
    #: None if no request samples, and in a pooling model.
    sampling: _SamplingRows | None


class ModelRunner:
    """Runs steps on one rank.

    Call load_model(), allocate_kv_cache(n) and warm_up(). Then call execute_model(step) and
    sample_tokens(grammar) for each step. Make all calls on one thread.
    """

    def __init__(self, config: EngineConfig, parallel: ParallelContext | None = None) -> None:
        """Select the device. Weights are not read before `load_model`.

        Args:
            config: configuration of the engine.
            parallel: tensor and pipeline groups of this rank. None: there are no other ranks. All
                ranks apply the same steps. A pipeline stage sends hidden states to the next stage.
                Only the last stage samples.

        Raises:
            ConfigurationError: the device or the quantization cannot be used.
        """
        self.config = config
        self.parallel = parallel or ParallelContext()
        self.spec = ModelSpec(config, self.parallel)
        self.device = self.spec.device
        self.loaded = LoadedModel(self.spec)
        self.kv: KVMemory | None = None
        self._stage = PipelineStage(self.spec)
        self._input_batch: InputBatch
        #: Set if the model pools prompts.
        self._pooler: Pooler | None = None
        self._in_flight: _StepInFlight | None = None
        #: Whether a step may end before its tokens are on the host. With several pipeline stages,
        #: the host needs the tokens, because the next step carries them to the first stage.
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
    def _fallback_token(self) -> int:
        """The token of a request whose logits are all NaN or masked: the model's EOS, or 0."""
        return fallback_token(
            self.spec.model_config.eos_token_ids, self.spec.model_config.vocab_size
        )

    def load_model(self) -> None:
        """Read the configuration of the model and this rank's weights.

        Raises:
            ModelNotFound: the folder does not exist.
            ModelInvalid: a file or tensor is wrong. The message names the file or tensor.
            ConfigurationError: the model cannot be split over the configured ranks.
        """
        spec, config = self.spec, self.config
        if config.parallel.enable_expert_parallel:
            from baton_engine.worker.experts.config_checks import check_expert_parallel

            check_expert_parallel(config, spec.model_config, self.device)
        if (pooling := spec.model_config.pooling) is not None:
            self._pooler = Pooler(pooling)
        self._input_batch = InputBatch(
            config.scheduler.max_num_seqs, spec.max_model_len, config.cache.block_size
        )
        self.loaded.load()

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
        layout = self.spec.kv_cache_layout(num_blocks)
        num_offload_blocks = self.spec.num_offload_blocks
        self.kv = KVMemory(layout, num_swap_blocks, self.device, num_offload_blocks)
        if self.device.type == "cpu":
            num_ranks = self.parallel.tensor.size * self.parallel.pipeline.size  # on this host
            host_blocks = num_swap_blocks + num_offload_blocks  # not yet resident
            available = available_host_memory() // num_ranks - host_blocks * layout.block_nbytes
            keep_freed_memory(available)
        return self.kv.cache

    def warm_up(self) -> None:
        """Compile the model and capture graphs as configured, then run batches of typical shapes.

        These batches write no KV. Afterwards, the first requests do not wait for compilations.
        """
        forward, kv = self._ready()
        forward.prepare(kv.cache)
        longest = min(kv.layout.num_blocks * self.config.cache.block_size, self.spec.max_model_len)
        limits = (self.config.scheduler.max_num_seqs, self.config.scheduler.max_num_batched_tokens)
        for query_lens, seq_len in dummy_steps.typical(longest, *limits, self.device):
            dummy_steps.run(forward, query_lens, seq_len, kv.cache)
        copy_blocks(kv.cache, torch.zeros((1, 2), dtype=torch.int64))  # block 0 onto itself

    @torch.inference_mode()
    def store_evicted(self, step: SchedulerOutput) -> None:
        """Copy to host memory (the offload tier) the KV blocks that the step evicts.

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
            kv_written: called during the step when the KV of all tokens is written (on a GPU, when
                the writes are queued). Not called with expert parallelism, because a broken group
                makes the KV invalid. Not called if a CUDA graph replays the whole forward.

        Raises:
            GroupBrokenError: an expert group broke. All tensor ranks raise the error, even if the
                group of only one rank broke. The step samples nothing. Steps can run again after
                the expert group has committed another generation.
        """
        forward_runner, kv = self._ready()
        self._in_flight = None
        self._apply_changes(step, kv)
        if not step.num_scheduled_tokens:
            self._run_dummy_batch(step, kv)
            return
        scheduled = self._input_batch.schedule(step.num_scheduled_tokens)
        forward = self._input_batch.make_forward_batch(scheduled, kv.cache, self.device)
        received = self._stage.receive_hidden(scheduled.num_tokens)
        routed_experts = self._receive_routed_experts(scheduled)
        forward.context.routed_experts = routed_experts
        if self.loaded.expert_steps is not None:
            hidden = self.loaded.expert_steps.run(
                forward_runner, forward, received, step.wave_tokens
            )
        else:
            forward.context.kv_written = kv_written
            hidden = forward_runner.run(forward, received)
        if not self.parallel.is_last_stage:
            self._stage.send(hidden, routed_experts)
            return
        sampling = self._compute_logits(scheduled, hidden) if self._pooler is None else None
        self._in_flight = _StepInFlight(scheduled, hidden, routed_experts, sampling)

    @torch.inference_mode()
    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput | PendingOutput:
        """Sample a token for each request whose last token ran. With a pooling model, pool instead.

        The output also has the requested logprobs and routed experts.

        The sampled tokens are also appended to this worker's input batch. Pipeline stages before
        the last return an empty output.

        With asynchronous scheduling on a GPU and one pipeline stage, an output that contains only
        tokens is a `PendingOutput`, unless the step has a grammar. The caller can then prepare the
        next step while the GPU still runs this step.
        """
        step, self._in_flight = self._in_flight, None
        if step is None:
            return ModelRunnerOutput()
        if self._pooler is not None:
            return self._pool(step, self._pooler)
        output = self._optional_outputs(step)
        if (sampling := step.sampling) is None:
            return output
        batch = self._input_batch
        if grammar is None and batch.is_plain[sampling.rows].all():
            best = greedy(sampling.logits, self._fallback_token)
            tokens = SampledTokens(best.token_ids, best.is_impossible)
        else:
            tokens, output.logprobs = self._sample(sampling, grammar)
        if self._defers_tokens and grammar is None and output == ModelRunnerOutput():
            batch.append_pending(sampling.rows, tokens)
            return PendingOutput(partial(_tokens_by_request, sampling.request_ids, tokens))
        batch.append_tokens(sampling.rows, tokens.wait())
        output.sampled_token_ids = _tokens_by_request(sampling.request_ids, tokens)
        return output

    def finish_steps(self) -> None:
        """Wait until the device has run the steps whose tokens are pending.

        Drop the step for which `sample_tokens` was not called, if there is one.
        """
        self._in_flight = None
        self._input_batch.settle()

    def _ready(self) -> tuple[ForwardRunner, KVMemory]:
        if self.kv is None or self.kv.is_dropped:
            raise RuntimeError(
                "this runner has no KV memory: call allocate_kv_cache() first, or wake_up() after "
                "sleep()"
            )
        return self.loaded.forward, self.kv

    # Parts of `execute_model`

    def _apply_changes(self, step: SchedulerOutput, kv: KVMemory) -> None:
        """Move KV blocks, and remove, add and update requests."""
        self._input_batch.remove(step.finished_request_ids)
        if self._pooler is not None:
            self._pooler.forget(step.finished_request_ids)
        kv.move_blocks(step)
        for new in step.new_requests:
            self._input_batch.add(new)
        self._input_batch.update(step.cached_requests)

    def _run_dummy_batch(self, step: SchedulerOutput, kv: KVMemory) -> None:
        """Run the experts of this rank if other ranks have tokens in this step."""
        if step.wave_tokens and self.loaded.expert_steps is not None:
            self.loaded.expert_steps.run_dummy_batch(kv.cache, step.wave_tokens)

    def _receive_routed_experts(self, scheduled: ScheduledRows) -> list[Tensor] | None:
        """Return the routed experts of earlier stages. None: no request needs them."""
        if not self._input_batch.wants_routed_experts[scheduled.rows].any():
            return None
        return self._stage.receive_routed_experts(scheduled.num_tokens)

    def _compute_logits(self, scheduled: ScheduledRows, hidden: Tensor) -> _SamplingRows | None:
        """Return the requests that sample, with their logits. None: no request samples."""
        compute_logits = self.loaded.model.compute_logits
        samples = self._input_batch.reaches_last_token(scheduled)
        if scheduled.one_token_each and samples.all():
            return _SamplingRows(scheduled.request_ids, scheduled.rows, compute_logits(hidden))
        indices = np.flatnonzero(samples)
        if not len(indices):
            return None
        request_ids = [scheduled.request_ids[index] for index in indices.tolist()]
        last_tokens = to_device(scheduled.first_tokens[indices + 1] - 1, self.device)
        logits = compute_logits(hidden[last_tokens])
        return _SamplingRows(request_ids, scheduled.rows[indices], logits)

    # Parts of `sample_tokens`

    def _pool(self, step: _StepInFlight, pooler: Pooler) -> ModelRunnerOutput:
        classify = self.loaded.model.classify
        vectors = pooler.pool(step.hidden, step.scheduled, self._input_batch, classify)
        return ModelRunnerOutput(pooler_output=vectors)

    def _optional_outputs(self, step: _StepInFlight) -> ModelRunnerOutput:
        """Return the requested outputs that do not depend on the sampled tokens."""
        output, batch, sampling = ModelRunnerOutput(), self._input_batch, step.sampling
        if step.routed_experts is not None:
            output.routed_experts = routed_experts_of(step.routed_experts, step.scheduled, batch)
        if batch.wants_prompt_logprobs[step.scheduled.rows].any():
            compute_logits = self.loaded.model.compute_logits
            vocab_size = self.spec.model_config.vocab_size
            output.prompt_logprobs = prompt_logprobs_of(
                step.hidden, step.scheduled, batch, compute_logits, vocab_size
            )
        if sampling is not None and self.config.observability.count_nans_in_logits:
            counts = count_nans(sampling.logits)
            output.num_nans_in_logits = dict(zip(sampling.request_ids, counts, strict=True))
        return output

    def _sample(
        self, sampling: _SamplingRows, grammar: GrammarOutput | None
    ) -> tuple[SampledTokens, dict[str, TokenLogprobs]]:
        """Sample with the requests' parameters. Return the tokens, and logprobs by request id."""
        eos_token_ids = self.spec.model_config.eos_token_ids
        bitmask = None if grammar is None else self._expand_bitmask(grammar, sampling.request_ids)
        inputs = self._input_batch.sampling_inputs(sampling.rows)
        sampled = sample(sampling.logits, inputs, eos_token_ids, bitmask)
        tokens = SampledTokens(sampled.token_ids, sampled.is_impossible)
        if not self._input_batch.wants_logprobs[sampling.rows].any():
            return tokens, {}
        logprobs = report_logprobs(sampling.logits, sampled, inputs, eos_token_ids)
        return tokens, {
            request_id: reported
            for request_id, reported in zip(sampling.request_ids, logprobs, strict=True)
            if reported is not None
        }

    def _expand_bitmask(self, grammar: GrammarOutput, sampling_ids: list[str]) -> Tensor:
        """Return a bitmask with a row for each sampling request: int32 [len(sampling_ids), words].

        The rows of requests without a grammar have all bits set.
        """
        row_of = {request_id: row for row, request_id in enumerate(sampling_ids)}
        bitmask = np.full((len(sampling_ids), grammar.bitmask.shape[1]), -1, dtype=np.int32)
        bitmask[[row_of[request_id] for request_id in grammar.request_ids]] = grammar.bitmask
        return to_device(bitmask, self.device)


def _tokens_by_request(request_ids: list[str], tokens: SampledTokens) -> dict[str, int]:
    """Wait until the tokens are on the host. Return the sampled token of each request.

    Log each request whose logits are all NaN or masked, because no token can be sampled for it.
    This function may run in any thread.
    """
    for row in tokens.impossible_rows():
        logger.warning(
            "request %s is ended: all its logits are NaN or masked, so no token is possible",
            request_ids[row],
        )
    return dict(zip(request_ids, tokens.wait().tolist(), strict=True))
