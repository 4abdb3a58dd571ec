"""A scheduler with a fake model and a client that checks every output, for stateful tests.

For the stateful tests of the scheduler, and those of its outputs.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from baton_engine.executor.step import ModelRunnerOutput, SchedulerOutput
from baton_engine.kv_cache.kv_cache_manager import KVCacheManager
from baton_engine.scheduling.request import Request
from baton_engine.scheduling.request_limits import RequestRefusedError
from baton_engine.scheduling.scheduler import Scheduler
from baton_engine.scheduling.scheduler_state import SchedulerState
from baton_protocol.block_hash import root_hash
from baton_protocol.engine_messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    ErrorCode,
    FinishReason,
)
from baton_protocol.options.config import SchedulerConfig
from baton_protocol.sampling_params import StructuredOutput
from support.engine.scheduling.block_hashes import hash_blocks
from support.engine.scheduling.fake_runner import (
    EOS,
    VOCAB_SIZE,
    FakeConnector,
    FakeRunner,
    beam_search,
    next_token,
)

BLOCK = 4
NUM_BLOCKS = 12
MAX_MODEL_LEN = 40
BUDGET = 9
MAX_NUM_SEQS = 4
MAX_QUEUE = 8


class Loss(enum.Enum):
    """The point at which the tokens of a step were lost."""

    #: No worker received the step.
    BEFORE_THE_WORKER = enum.auto()
    #: The worker applied the step, but its tokens failed.
    IN_THE_WORKER = enum.auto()


class FakeGrammar:
    """A grammar of `length` even tokens."""

    error = ""

    def __init__(self, length: int) -> None:
        self.length = length
        self.accepted: list[int] = []

    def accept(self, token_ids: Sequence[int]) -> bool:
        self.accepted += token_ids
        return not any(token_id % 2 for token_id in token_ids)

    @property
    def is_terminated(self) -> bool:
        return len(self.accepted) >= self.length


class FakeGrammars:
    """A fake StructuredOutputManager. Each call of `compile_one()` ends one compilation.

    A spec is the length of the grammar. The spec `bad` does not compile.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[StructuredOutput, Future[FakeGrammar]]] = []
        self.cache_salts: list[str] = []

    def compile(self, spec: StructuredOutput, cache_salt: str = "") -> Future[FakeGrammar]:
        future: Future[FakeGrammar] = Future()
        self.pending.append((spec, future))
        self.cache_salts.append(cache_salt)
        return future

    def compile_one(self) -> None:
        spec, future = self.pending.pop(0)
        if not future.set_running_or_notify_cancel():  # its request has ended
            return
        if spec.spec == "bad":
            future.set_exception(ValueError("no such grammar"))
        else:
            future.set_result(FakeGrammar(int(spec.spec)))

    def bitmask(self, grammars: Sequence[FakeGrammar]) -> np.ndarray:
        row = np.full(-(-VOCAB_SIZE // 32), 0x55555555, dtype=np.int32)
        return np.stack([row] * len(grammars))


def generate(request: EngineCoreRequest) -> tuple[list[int], FinishReason]:
    """Return the expected response to `request`: its new tokens, and the finish reason."""
    params = request.sampling_params
    tokens = [*request.prompt_token_ids, *request.generated_token_ids]
    start, num_generated = len(tokens), len(request.generated_token_ids)
    grammar = params.structured_output
    while True:
        token = next_token(tokens)
        if grammar is not None and token % 2:
            token = (token + 1) % VOCAB_SIZE
        tokens.append(token)
        num_generated += 1
        if token in params.stop_token_ids or (
            grammar is not None and num_generated >= int(grammar.spec)
        ):
            return tokens[start:], FinishReason.STOP
        if num_generated == params.max_tokens or len(tokens) == MAX_MODEL_LEN:
            return tokens[start:], FinishReason.LENGTH


@dataclass
class World:
    """One scheduler with its worker and client. At most `depth` steps are in flight."""

    config: SchedulerConfig
    depth: int = 1
    num_swap_blocks: int = 0
    num_offload_blocks: int = 0
    watermark_blocks: int = 0
    prefix_caching: bool = True
    send_token_ids: bool = False
    added: dict[str, EngineCoreRequest] = field(default_factory=dict)
    objects: dict[str, Request] = field(default_factory=dict)
    received: dict[str, list[int]] = field(default_factory=dict)
    #: Tokens that the prefill side sampled.
    skipped: dict[str, int] = field(default_factory=dict)
    ended: dict[str, FinishReason] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.kv = KVCacheManager(
            NUM_BLOCKS,
            BLOCK,
            "model",
            num_swap_blocks=self.num_swap_blocks,
            num_offload_blocks=self.num_offload_blocks,
            enable_prefix_caching=self.prefix_caching,
        )
        self.grammars = FakeGrammars()
        state = SchedulerState(
            self.config,
            self.kv,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=[EOS],
            watermark_blocks=self.watermark_blocks,
            num_stages=2 if self.send_token_ids else 1,
            structured_output=self.grammars,  # type: ignore[arg-type]
        )
        self.scheduler = Scheduler(state)
        self.runner = FakeRunner(
            BLOCK, BUDGET, appends=not self.send_token_ids, max_num_seqs=MAX_NUM_SEQS
        )
        self.connector = FakeConnector()
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        #: The loss of the newest step in flight. No step is scheduled until it is discarded.
        self.lost: Loss | None = None

    @property
    def may_schedule(self) -> bool:
        return len(self.in_flight) < self.depth and self.lost is None

    def add(self, request: EngineCoreRequest) -> bool:
        """Add a request. If it is refused, check that the reason is valid, and return False."""
        scheduler = self.scheduler
        num_queued = scheduler.state.queues.num_without_memory + len(scheduler.state.grammars)
        try:
            scheduler.add_request(request)
        except RequestRefusedError as error:
            if error.code is ErrorCode.LENGTH:
                num_tokens = len(request.prompt_token_ids) + len(request.generated_token_ids)
                assert num_tokens > BUDGET
                assert not self.config.enable_chunked_prefill or num_tokens >= MAX_MODEL_LEN
            else:
                assert scheduler.draining or num_queued >= MAX_QUEUE
            scheduler.forget_refused(request.request_id)
            return False
        self.added[request.request_id] = request
        self.objects[request.request_id] = scheduler.state.requests[request.request_id]
        self.received[request.request_id] = []
        return True

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)
        self.scheduler.abort_requests([request_id])

    def schedule(self, lost: Loss | None = None) -> SchedulerOutput:
        """Schedule a step. The worker runs the step at once. `update()` processes the result later.

        Args:
            lost: where the tokens of the step are lost; None for no loss.
        """
        scheduler = self.scheduler
        before = {
            entry.sequence.request_id for step in scheduler._in_flight.values() for entry in step
        }
        step = scheduler.schedule()
        assert not (step.swap_in and step.swap_out)
        copied = {copy.source for copy in [*step.swap_out, *step.block_copies]}
        copied |= {copy.target for copy in [*step.swap_in, *step.block_copies, *step.restore]}
        for load in step.connector.loads:
            assert not copied & set(load.block_ids), (
                "a load's blocks are also part of copies, which may run after the load"
            )
        for entry in scheduler._in_flight.get(step.step_id, ()):
            request = entry.sequence
            assert self.config.async_scheduling or request.request_id not in before, (
                "the request is already in flight"
            )
            for block in request.blocks[entry.start // BLOCK : -(-entry.end // BLOCK)]:
                assert block.ref_count == 1, "the block being written is shared"
                assert block.block_hash is None, "the block being written is in the prefix cache"
        output = ModelRunnerOutput()
        self.lost = lost
        if lost is Loss.IN_THE_WORKER:
            if step.reaches_model_runner:
                self.runner.fail_to_run(step)
            self.connector.start(step.without_tokens())
        elif lost is None:
            output = self._run(step)
        self.in_flight.append((step, output))
        return step

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        output = ModelRunnerOutput()
        if step.reaches_model_runner:
            output = self.runner.execute_model(step, self.scheduler.grammar_output(step))
        output.connector = self.connector.step(step)
        return output

    def update(self) -> None:
        """Update the scheduler from the oldest step in flight, or discard it if it is lost."""
        step, output = self.in_flight.popleft()
        if self.lost is None or self.in_flight:
            self.take(self.scheduler.update_from_output(step, output))
            return
        lost, self.lost = self.lost, None
        self.scheduler.discard(step)
        if lost is Loss.BEFORE_THE_WORKER:
            rest = step.without_tokens()
            self.take(self.scheduler.update_from_output(rest, self._run(rest)))

    def take(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            request_id = output.request_id
            request = self.added[request_id]
            assert request_id not in self.ended, "an output after the end"
            received = self.received[request_id]
            num_known = len(request.generated_token_ids)
            if output.new_token_ids:
                if not received:
                    self.skipped[request_id] = output.token_offset - num_known
                    assert self.skipped[request_id] in (
                        0,
                        1,
                    )  # 1: after the prefill side's first token
                assert output.token_offset == num_known + self.skipped[request_id] + len(received)
                received += output.new_token_ids
            if output.finish_reason is not None:
                self.ended[request_id] = output.finish_reason
                if request.sampling_params.beam_width:
                    self._check_beams(request, output)
                else:
                    self._check_end(request, output)

    def _check_end(self, request: EngineCoreRequest, output: EngineCoreOutput) -> None:
        spec = request.sampling_params.structured_output
        if spec is not None and spec.spec == "bad":
            assert output.finish_reason is FinishReason.ABORT or output.error == "no such grammar"
            return
        received, (expected, reason) = self.received[request.request_id], generate(request)
        skipped = self.skipped.get(request.request_id, 0)
        assert received == expected[skipped : skipped + len(received)]
        if output.finish_reason is FinishReason.ABORT:
            assert request.request_id in self.aborted
            return
        assert output.finish_reason is reason, output
        # The prefill side's first token is not sent again, even if it ends the request.
        assert len(received) == len(expected) - skipped or (not received and len(expected) == 1)

    def _check_beams(self, request: EngineCoreRequest, output: EngineCoreOutput) -> None:
        if output.finish_reason is FinishReason.ABORT:
            assert request.request_id in self.aborted
        elif output.error:
            assert "has used up all" in output.error
        else:
            params = request.sampling_params
            expected = beam_search(
                request.prompt_token_ids, params, frozenset(params.stop_token_ids)
            )
            assert [beam.token_ids for beam in output.beams] == expected
            assert output.new_token_ids == expected[0]

    def check_blocks(self) -> None:
        """Check that reference counts equal the number of holders, on device and host."""
        sequences = [
            sequence
            for request in self.objects.values()
            for sequence in [request, *_beams(request)]
        ]
        for pool, lists in (
            (self.kv.pool, [sequence.blocks for sequence in sequences]),
            (self.kv.swap_pool, [sequence.swapped_blocks for sequence in sequences]),
        ):
            holders = Counter(block.block_id for blocks in lists for block in blocks)
            for block in pool.blocks:
                assert block.ref_count == holders[block.block_id], block
            assert pool.num_free_blocks == pool.num_blocks - len(holders)

    def check_offload_tier(self) -> None:
        """Check the content of all blocks in the offload tier."""
        tier = self.kv.offload
        for block_hash in list(tier._slots) if tier is not None and self.lost is None else []:
            slot = tier.find(block_hash).slot
            content = [self.runner.offload_memory[slot, offset] for offset in range(BLOCK)]
            tokens = content[-1]
            assert hash_blocks(root_hash("model"), tokens, BLOCK)[-1] == block_hash
            assert content == [tokens[: len(tokens) - BLOCK + 1 + i] for i in range(BLOCK)]

    def check_places(self) -> None:
        """Check that every request is in one queue and that the batch is within its limit."""
        scheduler, state = self.scheduler, self.scheduler.state
        queues = state.queues
        places = [
            scheduler.state.running,
            queues.waiting,
            queues.waiting_to_load,
            queues.loaded,
            queues.loading,
        ]
        num_placed = sum(map(len, places)) + len(state.grammars) + len(state.awaiting_steps)
        num_placed += len(scheduler.state.swapped)
        num_placed += sum(len(group.waiting) for group in state.groups._groups.values())
        assert num_placed == len(scheduler.state.requests)
        assert scheduler.state.running.num_seqs == sum(
            request.max_seqs for request in scheduler.state.running.values()
        )
        assert scheduler.state.running.num_seqs <= MAX_NUM_SEQS


def _beams(request: Request) -> list[Request]:
    return list(request.beams.live) if request.beams is not None else []
