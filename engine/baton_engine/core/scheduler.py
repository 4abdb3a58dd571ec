"""Decides what runs in each step: continuous batching with a token budget, chunked prefill, preemption by recompute.

`schedule()` says what to run, `update_from_output()` takes in what came of it and returns what clients are to be told. No torch.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from baton_engine.core.kv_cache_manager import KVCacheManager
from baton_engine.core.kv_handoff import KVHandoff
from baton_engine.core.request import Request, RequestQueue, RequestStatus
from baton_engine.core.stats import EngineStats
from baton_engine.core.step import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from baton_engine.protocol.config import SchedulerConfig
from baton_engine.protocol.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    ErrorCode,
    FinishReason,
    PrefillResult,
    TokenLogprobs,
)

EARLY_RESULTS_KEPT = 1024


class RequestRefusedError(Exception):
    """The request is not accepted."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        fail_on_load_error: bool = False,
    ) -> None:
        """
        Args:
            max_model_len: prompt plus generated tokens; must fit the KV memory.
            fail_on_load_error: end a request whose KV did not arrive, instead of computing the rest here.
        """
        if max_model_len > kv.pool.num_blocks * kv.block_size:
            raise ValueError(
                f"max_model_len={max_model_len} exceeds {kv.pool.num_blocks} blocks of {kv.block_size} tokens"
            )
        self.kv = kv
        self.handoff = KVHandoff(kv)
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)  # each running one gets its token
        self.max_queue = config.max_queue
        self.requests: dict[str, Request] = {}
        """All unfinished ones."""
        self.running: dict[str, Request] = {}
        self.waiting = RequestQueue()
        self.loaded = RequestQueue()
        """CONSUME requests whose blocks came. They hold all the memory they need to start, so they go before `waiting`:
        behind a request that waits for memory they would keep it from coming free."""
        self.waiting_to_load = RequestQueue()
        """CONSUME requests without blocks yet. Those with blocks wait in `loading`, in nobody's way."""
        self.loading: dict[str, Request] = {}
        self.draining = False
        self.made_progress = False
        """The last step ran tokens, moved requests or told the connector something: another one may find more to do."""

        self._eos_token_ids = frozenset(eos_token_ids)
        self._fail_on_load_error = fail_on_load_error
        self._forgotten_ids: list[str] = []
        self._outputs: list[EngineCoreOutput] = []
        self._early_results: OrderedDict[str, PrefillResult | None] = OrderedDict()
        """Of requests not seen yet; None marks a request that has ended, whose late result must not reach a namesake."""
        self._counters = EngineStats()
        self._finished: Counter[str] = Counter()

    # Requests come and go

    def add_request(self, core_request: EngineCoreRequest) -> None:
        """Queues a request.

        Raises:
            RequestRefusedError: it is not accepted, and nothing has changed.
        """
        num_tokens = len(core_request.prompt_token_ids) + len(core_request.generated_token_ids)
        num_queued = len(self.waiting) + len(self.waiting_to_load)
        transfer = core_request.kv_transfer
        if core_request.request_id in self.requests:
            raise RequestRefusedError(ErrorCode.INVALID, f"request id {core_request.request_id} is already in use")
        if num_tokens >= self.max_model_len:
            raise RequestRefusedError(
                ErrorCode.INVALID,
                f"{num_tokens} prompt and generated tokens leave no room for another: "
                f"the maximum length is {self.max_model_len} tokens in all",
            )
        if transfer is not None and transfer.transfer_id in self.handoff:
            raise RequestRefusedError(ErrorCode.INVALID, f"transfer id {transfer.transfer_id} is already in use")
        if self.draining:
            raise RequestRefusedError(ErrorCode.DRAINING, "this engine is draining; send the request to another one")
        if num_queued >= self.max_queue:
            raise RequestRefusedError(ErrorCode.OVERLOADED, f"{num_queued} requests are waiting already; retry later")

        request = Request(core_request)
        self.requests[request.request_id] = request
        early_result = self._early_results.pop(request.request_id, None)
        if request.consumes:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KV
            self.waiting_to_load.push(request)
            if early_result is not None:
                self.add_prefill_result(early_result)
        else:
            self.waiting.push(request)
            if request.produces:
                self.handoff.offer(request)

    def forget_refused(self, request_id: str) -> None:
        """A request was refused: its prefill result, come or to come, must not reach a later request of the same id."""
        if request_id not in self.requests:
            self._remember(request_id, None)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests; unknown ids are ignored. One that ended, but whose blocks a peer may still fetch, gives them up."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._finish(request, FinishReason.ABORT)
            else:
                self.handoff.cancel_finished(request_id)

    def fail_all(self, code: ErrorCode, message: str) -> None:
        """Ends all requests with an error."""
        for request in list(self.requests.values()):
            self._finish(request, FinishReason.ERROR, code=code, error=message)

    def add_prefill_result(self, result: PrefillResult) -> None:
        """The prefill leg of a CONSUME request ended: its first token, or why there is none.

        May come at any time, also before the request itself. How long to wait for it is the gateway's decision: it owns
        the request, and aborts it.
        """
        request = self.requests.get(result.request_id)
        if request is None:
            if result.request_id not in self._early_results:
                self._remember(result.request_id, result)
            return
        if request.status is not RequestStatus.WAITING_FOR_REMOTE_KV or request.prefill_result is not None:
            return
        request.prefill_result = result
        if request in self.waiting_to_load:
            if not result.token_ids and result.error and not self._fail_on_load_error:
                self.waiting_to_load.discard(request)  # nobody computes its prompt: a request like any other
                self.handoff.decline(request)
                request.kv_transfer = None
                request.status = RequestStatus.WAITING
                self.waiting.push(request)
            return
        if result.error:
            self.handoff.cancel_load(request)
        self._end_load_if_ready(request)

    # One step

    def schedule(self) -> SchedulerOutput:
        """What to run now. Running requests first, then queued ones in order while budget, slots and memory last."""
        step = SchedulerOutput([], [], {}, [])
        num_preempted = self._counters.num_preemptions
        self._schedule_running(step)
        # What a preemption freed is for those that run: admitting in the same step would take it away again.
        if self._counters.num_preemptions == num_preempted:
            self._schedule_queued(step)
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            request = self.requests[request_id]
            if request.produces:
                self.handoff.save(request, request.num_computed_tokens + num_tokens)
        if step.num_scheduled_tokens:  # steps without tokens do not reach the model runner
            step.finished_request_ids, self._forgotten_ids = self._forgotten_ids, []
        step.connector = self.handoff.take_metadata()
        self.made_progress = bool(
            step.num_scheduled_tokens or step.connector or self._counters.num_preemptions > num_preempted
        )
        return step

    def update_from_output(self, step: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Takes in what the step computed and what the connector reported; returns what clients are to be told."""
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None:  # aborted while the step ran
                continue
            self._advance(request, num_tokens)
            token_id = output.sampled_token_ids.get(request_id)
            if (token_id is not None) != (request.num_uncomputed_tokens == 0):
                raise RuntimeError(
                    f"{request!r}: the step sampled {token_id}; it samples iff all known tokens are computed"
                )
            if token_id is not None:
                self._append_sampled(request, token_id, output.logprobs.get(request_id))
        for request in self.handoff.update(output.connector):
            self._end_load_if_ready(request)
        self.made_progress |= bool(output.connector)
        return self.take_outputs()

    def take_outputs(self) -> list[EngineCoreOutput]:
        """What clients are to be told since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # State

    @property
    def has_work(self) -> bool:
        """Whether a step could do anything, now or after a transfer's end."""
        return bool(self.requests) or self.handoff.has_metadata or self.handoff.num_held > 0

    def stats(self) -> EngineStats:
        stats = self._counters
        stats.num_requests_running = len(self.running)
        stats.num_requests_waiting = len(self.requests) - len(self.running)
        stats.num_requests_waiting_for_remote_kv = len(self.waiting_to_load) + len(self.loading)
        stats.num_transfers_held = self.handoff.num_held
        stats.kv_cache_usage = self.kv.usage
        stats.draining = self.draining
        stats.prefix_cache_queries = self.kv.stats.queries
        stats.prefix_cache_hits = self.kv.stats.hits
        stats.requests_finished = dict(self._finished)
        return stats

    # How schedule() works

    def _schedule_running(self, step: SchedulerOutput) -> None:
        # Decodes before prefill chunks: a long prompt must not stall them. Only decodes need memory here (a prefill got all its
        # blocks when admitted), and in this order whoever is preempted for them has not been scheduled yet.
        budget = self.max_num_batched_tokens
        for request in sorted(self.running.values(), key=lambda r: (r.num_uncomputed_tokens > 1, r.order)):
            if budget == 0:
                break
            if request.status is not RequestStatus.RUNNING:  # preempted in this loop
                continue
            new_block_ids = self._grow(request)
            if new_block_ids is None:
                continue
            num_tokens = min(request.num_uncomputed_tokens, budget)
            budget -= num_tokens
            step.num_scheduled_tokens[request.request_id] = num_tokens
            step.cached_requests.append(
                CachedRequestData(request.request_id, new_block_ids, request.num_computed_tokens)
            )

    def _grow(self, request: Request) -> list[int] | None:
        """New blocks for the request's known tokens; preempts the last in order until they fit. None: that was `request`."""
        while (new_block_ids := self.kv.allocate(request, request.num_tokens)) is None:
            victim = max((r for r in self.running.values() if not r.produces), key=lambda r: r.order)
            self._preempt(victim)
            if victim is request:
                return None
        return new_block_ids

    def _preempt(self, request: Request) -> None:
        del self.running[request.request_id]
        self._reset(request)
        request.num_preemptions += 1
        self._counters.num_preemptions += 1
        request.status = RequestStatus.WAITING
        self.waiting.push(request)

    def _reset(self, request: Request) -> None:
        """Takes the request's KV away; it will be computed again."""
        self.kv.free(request)
        request.num_computed_tokens = 0
        if request.in_worker:
            self._forgotten_ids.append(request.request_id)
            request.in_worker = False

    def _schedule_queued(self, step: SchedulerOutput) -> None:
        budget = self.max_num_batched_tokens - step.total_num_scheduled_tokens
        while budget > 0 and len(self.running) < self.max_num_seqs and (first := self.loaded.peek()) is not None:
            earlier = self._first_of(self.waiting, before=first)
            if earlier is not None and self._first_of(self.waiting_to_load, before=earlier) is None:
                # It would starve if every slot that comes free went to those that are loaded.
                num_tokens = self._admit(earlier, budget, step)
                if num_tokens > 0:
                    self.waiting.pop()
                    budget -= num_tokens
                    continue
            request = self.loaded.pop()
            if (
                self.kv.allocate(request, request.num_tokens) is None
            ):  # more first tokens than there was room reserved for
                self._reset(request)
                self.waiting.push(request)
            else:
                budget -= self._run(request, budget, step)
        while True:
            to_load = self.waiting_to_load.peek()
            to_run = self.waiting.peek() if budget > 0 and len(self.running) < self.max_num_seqs else None
            # One order for both queues: who comes first and finds no memory is not overtaken.
            if to_load is not None and (to_run is None or to_load.order < to_run.order):
                if not self._start_load(to_load, keep_for=self._first_of(self.waiting, before=to_load)):
                    return
                self.waiting_to_load.pop()
            elif to_run is not None:
                num_tokens = self._admit(to_run, budget, step)
                if num_tokens == 0:
                    return
                self.waiting.pop()
                budget -= num_tokens
            else:
                return

    def _admit(self, request: Request, budget: int, step: SchedulerOutput) -> int:
        """Starts a request with all blocks its known tokens need. Returns the tokens it runs in this step; 0: does not fit."""
        # The last known token is always computed here: it gives the logits.
        cached = self.kv.find_cached_prefix(request, request.num_tokens - 1)
        if self.kv.allocate(request, request.num_tokens, cached) is None:
            return 0
        request.num_computed_tokens = len(cached) * self.kv.block_size
        request.num_cached_blocks = len(cached)
        self._count_start(request)
        return self._run(request, budget, step)

    def _run(self, request: Request, budget: int, step: SchedulerOutput) -> int:
        """Puts a request that has its blocks into the batch. Returns the tokens it runs in this step."""
        num_tokens = min(request.num_uncomputed_tokens, budget)
        request.status = RequestStatus.RUNNING
        request.in_worker = True
        self.running[request.request_id] = request
        step.num_scheduled_tokens[request.request_id] = num_tokens
        step.new_requests.append(
            NewRequestData(
                request_id=request.request_id,
                prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
                generated_token_ids=request.token_ids[request.num_prompt_tokens :],
                sampling_params=request.sampling_params,
                sample_index=request.sample_index,
                block_ids=request.block_ids,
                num_computed_tokens=request.num_computed_tokens,
            )
        )
        return num_tokens

    def _first_of(self, queue: RequestQueue, *, before: Request) -> Request | None:
        """The first request of `queue`, if it precedes `before`."""
        first = queue.peek()
        return first if first is not None and first.order < before.order else None

    def _start_load(self, request: Request, keep_for: Request | None) -> bool:
        """Allocates the blocks of a CONSUME request and asks for them; False if they do not fit now.

        Args:
            keep_for: an earlier request that waits for a slot; the load must leave enough memory for it.
        """
        if keep_for is not None:
            wanted = self.kv.num_blocks_for(request.num_tokens + 1) + self.kv.num_blocks_for(keep_for.num_tokens)
            if wanted > self.kv.pool.num_free_blocks:
                return False
        cached = self.kv.find_cached_prefix(request, request.num_tokens)
        # One token more: it must be able to start without waiting for memory while it holds some.
        if self.kv.allocate(request, request.num_tokens + 1, cached) is None:
            return False
        request.num_computed_tokens = len(cached) * self.kv.block_size
        request.num_cached_blocks = len(cached)
        self._count_start(request)
        self.loading[request.request_id] = request
        self.handoff.load(request, len(cached))
        return True

    def _count_start(self, request: Request) -> None:
        if request.started:  # and lost its blocks since
            return
        request.started = True
        request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        self._counters.prompt_tokens += request.num_prompt_tokens
        self._counters.prompt_tokens_cached += request.num_cached_tokens
        self.kv.count_lookup(request.num_tokens, request.num_computed_tokens)

    # How update_from_output() works

    def _advance(self, request: Request, num_tokens: int) -> None:
        before = request.num_computed_tokens
        request.num_computed_tokens += num_tokens
        self._counters.prompt_tokens_computed += max(
            0, min(request.num_computed_tokens, request.num_prompt_tokens) - before
        )
        self.kv.cache_blocks(request, request.num_computed_tokens)

    def _append_sampled(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> None:
        request.token_ids.append(token_id)
        self._counters.generation_tokens += 1
        reason = request.stop_reason(self._eos_token_ids, self.max_model_len)
        self._emit(
            request,
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[token_id],
                token_offset=request.num_generated_tokens - 1,
                finish_reason=reason,
                stop_token_id=token_id if reason is FinishReason.STOP else None,
                new_logprobs=[logprobs] if logprobs is not None else None,
            ),
        )
        if reason is not None:
            self._end(request, reason)

    def _end_load_if_ready(self, request: Request) -> None:
        """Lets a CONSUME request go on once both its load and its prefill leg have ended."""
        result, prefill = self.handoff.load_result(request), request.prefill_result
        if result is None or prefill is None:
            return
        size = self.kv.block_size
        num_cached = request.num_computed_tokens
        num_proved = min(num_cached + result.num_valid_blocks * size, request.num_arrival_tokens)
        if num_proved < request.num_arrival_tokens and self._fail_on_load_error:
            error = result.error or prefill.error or "the prefill side did not send all KV blocks"
            self._finish(request, FinishReason.ERROR, code=ErrorCode.KV_LOAD, error=error)
            return
        self.handoff.end_load(request)
        del self.loading[request.request_id]
        request.kv_transfer = None  # the hand-off is over
        request.num_remote_tokens = max(0, min(num_proved, request.num_prompt_tokens) - num_cached)
        self._counters.prompt_tokens_remote += request.num_remote_tokens
        request.token_ids.extend(prefill.token_ids)
        # Without a first token the last known one is computed here: it gives the logits.
        request.num_computed_tokens = min(num_proved, request.num_tokens - 1)
        if request.num_computed_tokens < num_cached:  # it would be written into a block that others hold, too
            self._reset(request)
            request.status = RequestStatus.WAITING
            self.waiting.push(request)
            return
        self.kv.cache_blocks(request, request.num_computed_tokens)
        reason = request.stop_reason(self._eos_token_ids, self.max_model_len) if prefill.token_ids else None
        if reason is not None:
            self._finish(request, reason)
            return
        request.status = RequestStatus.WAITING
        self.loaded.push(request)

    # How requests end

    def _finish(
        self, request: Request, reason: FinishReason, *, code: ErrorCode | None = None, error: str = ""
    ) -> None:
        """Ends a request outside its own step, with an output that carries no token."""
        self._emit(
            request,
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                token_offset=request.num_generated_tokens,
                finish_reason=reason,
                error=error,
                error_code=code,
            ),
        )
        self._end(request, reason)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request_id = request.request_id
        if request in self.waiting_to_load:
            self.handoff.decline(request)
        self.waiting_to_load.discard(request)
        self.waiting.discard(request)
        self.loaded.discard(request)
        self.running.pop(request_id, None)
        self.loading.pop(request_id, None)
        del self.requests[request_id]
        request.status = RequestStatus.FINISHED
        if request.in_worker:
            self._forgotten_ids.append(request_id)
        if request.consumes:
            self._remember(request_id, None)
        self.handoff.release(request, aborted=reason in (FinishReason.ABORT, FinishReason.ERROR))
        self._finished[str(reason)] += 1

    def _emit(self, request: Request, output: EngineCoreOutput) -> None:
        if not request.has_output:
            request.has_output = True
            output.num_cached_tokens = request.num_cached_tokens
            output.num_remote_tokens = request.num_remote_tokens
        self._outputs.append(output)

    def _remember(self, request_id: str, result: PrefillResult | None) -> None:
        self._early_results[request_id] = result
        self._early_results.move_to_end(request_id)
        while len(self._early_results) > EARLY_RESULTS_KEPT:
            self._early_results.popitem(last=False)
