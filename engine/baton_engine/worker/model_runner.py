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
from baton_engine.models.layers import Model
from baton_engine.worker import dummy_steps
from baton_engine.worker.devices import to_device
from baton_engine.worker.forward_runner import ForwardRunner
from baton_engine.worker.input_batch import InputBatch, ScheduledRows
from baton_engine.worker.loaded_model import LoadedModel
from baton_engine.worker.memory.freed_memory import keep_freed_memory
from baton_engine.worker.memory.host_memory import available_host_memory
from baton_engine.worker.memory.kv_memory import KVMemory
from baton_engine.worker.model_spec import ModelSpec
from baton_engine.worker.optional_outputs import prompt_logprobs_of, routed_experts_of
from baton_engine.worker.pooler import Pooler
from baton_engine.worker.sampled_tokens import Int64Array, SampledTokens
from baton_engine.worker.sampling.logprobs import count_nans
from baton_engine.worker.sampling.sampler import fallback_token, report_logprobs, sample
from baton_kernels import cpu
from baton_kernels.block_copy import copy_blocks
from baton_kernels.sampling import greedy
from baton_protocol.options.config import EngineConfig

logger = logging.getLogger(__name__)


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

    Call load_model(), allocate_kv_cache(n) and warm_up(). Then call execute_model(step) and
    sample_tokens(grammar) for each step. Make all calls on one thread.
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
        self.spec = ModelSpec(config, self.parallel)
        self.device = self.spec.device
        self.loaded = LoadedModel(self.spec)
        self.kv: KVMemory | None = None
        self._input_batch: InputBatch
        #: Set if the model pools prompts.
        self._pooler: Pooler | None = None
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
    def _fallback_token(self) -> int:
        """The token of requests for which no token is possible."""
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
        forward_runner, kv = self._ready()
        batch, pipeline = self._input_batch, self.parallel.pipeline
        expert_steps = self.loaded.expert_steps
        self._in_flight = None
        batch.remove(step.finished_request_ids)
        if self._pooler is not None:
            self._pooler.forget(step.finished_request_ids)
        kv.move_blocks(step)
        for new in step.new_requests:
            batch.add(new)
        batch.update(step.cached_requests)
        if not step.num_scheduled_tokens:
            if step.wave_tokens and expert_steps is not None:
                expert_steps.run_dummy_batch(kv.cache, step.wave_tokens)
            return
        if expert_steps is not None:
            expert_steps.check_has_experts()
        scheduled = batch.schedule(step.num_scheduled_tokens)
        forward = batch.make_forward_batch(scheduled, kv.cache, self.device)
        wants_experts = bool(batch.wants_routed_experts[scheduled.rows].any())
        received = (
            None if self.parallel.is_first_stage else self._receive_hidden(scheduled.num_tokens)
        )
        experts = self._receive_routed_experts(scheduled.num_tokens) if wants_experts else None
        forward.context.routed_experts = experts
        forward.context.wave_tokens = step.wave_tokens
        if expert_steps is None:
            forward.context.kv_written = kv_written
        hidden = forward_runner.run(forward, received)
        if expert_steps is not None:
            expert_steps.check_expert_groups(forward.context)
        if not self.parallel.is_last_stage:
            pipeline.send(hidden, pipeline.rank + 1)
            if experts:
                pipeline.send(torch.stack(experts).int(), pipeline.rank + 1)
            return
        self._in_flight = self._prepare_sampling(forward_runner.model, scheduled, hidden, experts)

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
            classify = self.loaded.model.classify
            output.pooler_output = self._pooler.pool(step.hidden, step.scheduled, batch, classify)
            return output
        if step.routed_experts is not None:
            output.routed_experts = routed_experts_of(step.routed_experts, step.scheduled, batch)
        if batch.wants_prompt_logprobs[step.scheduled.rows].any():
            compute_logits = self.loaded.model.compute_logits
            vocab_size = self.spec.model_config.vocab_size
            output.prompt_logprobs = prompt_logprobs_of(
                step.hidden, step.scheduled, batch, compute_logits, vocab_size
            )
        if step.logits is None:
            return output
        if self.config.observability.count_nans_in_logits:
            output.num_nans_in_logits = dict(
                zip(step.sampling_ids, count_nans(step.logits), strict=True)
            )
        eos_token_ids = self.spec.model_config.eos_token_ids
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
        """Wait until the device has run the steps whose tokens are pending.

        A step that ran without `sample_tokens` is dropped.
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

    def _receive_hidden(self, num_tokens: int) -> Tensor:
        buffer = torch.empty(
            (num_tokens, self.spec.model_config.hidden_size),
            dtype=self.spec.dtype,
            device=self.device,
        )
        return self.parallel.pipeline.recv(buffer, self.parallel.pipeline.rank - 1)

    def _receive_routed_experts(self, num_tokens: int) -> list[Tensor]:
        """Receive the ids of the experts that the sparse layers of earlier stages chose.

        Returns:
            One tensor per sparse layer. The sparse layers of this stage append to this list.
        """
        model, first_layer = self.spec.model_config, self.spec.shard.first_layer
        earlier = sum(layer < first_layer for layer in model.sparse_layers)
        if not earlier:
            return []
        shape = (earlier, num_tokens, model.num_experts_per_tok)
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
