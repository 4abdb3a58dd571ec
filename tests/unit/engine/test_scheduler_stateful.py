"""Any order of events under a tiny pool: no block leaks or is used twice, every request ends once, with the right text."""

from __future__ import annotations

from engine_fakes import EOS, FakeConnector, FakeRunner, continuation, next_token
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton_engine.core.kv_cache_manager import KVCacheManager
from baton_engine.core.request import Request
from baton_engine.core.scheduler import RequestRefusedError, Scheduler
from baton_engine.core.step import ModelRunnerOutput
from baton_engine.protocol.config import SchedulerConfig
from baton_engine.protocol.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    KVSide,
    KVTransferParams,
    PrefillResult,
)
from baton_engine.protocol.sampling import SamplingParams

BLOCK = 4
NUM_BLOCKS = 12
MAX_MODEL_LEN = 40
BUDGET = 9


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCacheManager(NUM_BLOCKS, BLOCK, "model")
        config = SchedulerConfig(max_num_batched_tokens=BUDGET, max_num_seqs=4, max_queue=6)
        self.scheduler = Scheduler(config, self.kv, max_model_len=MAX_MODEL_LEN, eos_token_ids=[EOS])
        self.runner = FakeRunner(BLOCK, BUDGET)
        self.connector = FakeConnector()
        self.num_drawn = 0
        self.added: dict[str, EngineCoreRequest] = {}
        self.objects: dict[str, Request] = {}
        self.received: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.prefill_sent: set[str] = set()
        self.aborted: set[str] = set()

    def _request(self, data: st.DataObject, side: KVSide | None) -> EngineCoreRequest:
        number, self.num_drawn = self.num_drawn, self.num_drawn + 1
        # Few distinct first tokens: prefixes are shared.
        prompt = [data.draw(st.integers(1, 2))] * data.draw(st.integers(1, 24))
        generated = continuation(prompt, data.draw(st.integers(0, 3)), ignore_eos=True)
        max_tokens = len(generated) + (1 if side is KVSide.PRODUCE else data.draw(st.integers(1, 10)))
        transfer = None if side is None else KVTransferParams(side, f"t{number}", "peer", "127.0.0.1", 1)
        return EngineCoreRequest(
            f"r{number}",
            prompt,
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            generated,
            arrival_time=float(number),
            priority=data.draw(st.integers(0, 1)),
            kv_transfer=transfer,
        )

    @rule(data=st.data(), side=st.sampled_from([None, KVSide.PRODUCE, KVSide.CONSUME]), early=st.booleans())
    def add(self, data: st.DataObject, side: KVSide | None, early: bool) -> None:
        request = self._request(data, side)
        if early and side is KVSide.CONSUME:
            self._prefill(request, data.draw(st.booleans()))
        try:
            self.scheduler.add_request(request)
        except RequestRefusedError:
            queued = len(self.scheduler.waiting) + len(self.scheduler.waiting_to_load)
            assert self.scheduler.draining or queued >= 6
            self.scheduler.forget_refused(request.request_id)
            self.prefill_sent.discard(request.request_id)
            return
        self.added[request.request_id] = request
        self.objects[request.request_id] = self.scheduler.requests[request.request_id]
        self.received[request.request_id] = []

    def _prefill(self, request: EngineCoreRequest, good: bool) -> None:
        token = next_token([*request.prompt_token_ids, *request.generated_token_ids])
        self.prefill_sent.add(request.request_id)
        self.scheduler.add_prefill_result(
            PrefillResult(request.request_id, [token] if good else [], "" if good else "prefill died")
        )

    @rule(data=st.data(), good=st.booleans())
    def prefill_result(self, data: st.DataObject, good: bool) -> None:
        waiting = [
            request
            for request_id, request in self.added.items()
            if request.kv_transfer is not None
            and request.kv_transfer.side is KVSide.CONSUME
            and request_id not in self.prefill_sent
        ]
        if waiting:
            self._prefill(data.draw(st.sampled_from(waiting)), good)

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.added)))
        self.aborted.add(request_id)
        self.scheduler.abort_requests([request_id])

    @rule(abort_meanwhile=st.booleans(), data=st.data())
    def step(self, abort_meanwhile: bool, data: st.DataObject) -> None:
        step = self.scheduler.schedule()
        output = self.runner.execute_model(step) if step.num_scheduled_tokens else ModelRunnerOutput()
        output.connector = self.connector.step(step)
        if abort_meanwhile and self.scheduler.running:
            request_id = data.draw(st.sampled_from(sorted(self.scheduler.running)))
            self.aborted.add(request_id)
            self.scheduler.abort_requests([request_id])
        self._take(self.scheduler.update_from_output(step, output))

    @rule(data=st.data())
    def peer_fetches(self, data: st.DataObject) -> None:
        done = sorted(t for t in self.connector.sends if t in self.connector.send_complete | self.connector.cancelled)
        if done:
            self.connector.end_send(data.draw(st.sampled_from(done)))

    @rule(data=st.data())
    def lease_ends(self, data: st.DataObject) -> None:
        if self.connector.sends:
            self.connector.end_send(data.draw(st.sampled_from(sorted(self.connector.sends))))

    @rule(data=st.data(), whole=st.booleans())
    def load_ends(self, data: st.DataObject, whole: bool) -> None:
        if not self.connector.loads:
            return
        transfer_id = data.draw(st.sampled_from(sorted(self.connector.loads)))
        load = self.connector.loads[transfer_id]
        valid = len(load.block_ids) if whole else data.draw(st.integers(0, len(load.block_ids)))
        request = self.added["r" + transfer_id[1:]]
        tokens = [*request.prompt_token_ids, *request.generated_token_ids]
        # Even an aborted load still writes: the blocks must not be anybody else's.
        for index, block_id in enumerate(load.block_ids):
            start = (load.first_block_index + index) * BLOCK
            end = min(start + BLOCK, len(tokens)) if index < valid else start
            self.runner.write({start // BLOCK: block_id}, tokens, start, end)  # type: ignore[arg-type]
            for offset in range(end - start, BLOCK):
                self.runner.memory[(block_id, offset)] = [-1]
        self.connector.end_load(transfer_id, valid, "" if valid == len(load.block_ids) else "lost")

    @precondition(lambda self: len(self.added) > 5)
    @rule()
    def drain(self) -> None:
        self.scheduler.draining = True

    def _take(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            request = self.added[output.request_id]
            assert output.request_id not in self.ended, "an output after the end"
            received = self.received[output.request_id]
            if output.new_token_ids and not received:
                skipped = output.token_offset - len(request.generated_token_ids)
                assert skipped in (0, 1)  # 1: after the prefill side's first token
                received += continuation(self._known(request), skipped, ignore_eos=True)
            if output.new_token_ids:
                assert output.token_offset == len(request.generated_token_ids) + len(received)
                received += output.new_token_ids
            if output.finish_reason is not None:
                self.ended[output.request_id] = output.finish_reason
                self._check_end(request, output.finish_reason)

    def _known(self, request: EngineCoreRequest) -> list[int]:
        return [*request.prompt_token_ids, *request.generated_token_ids]

    def _check_end(self, request: EngineCoreRequest, reason: FinishReason) -> None:
        received = self.received[request.request_id]
        assert received == continuation(self._known(request), len(received), ignore_eos=True)
        if reason is FinishReason.ABORT:
            assert request.request_id in self.aborted
            return
        assert reason is FinishReason.LENGTH
        assert request.sampling_params.max_tokens is not None
        room = min(request.sampling_params.max_tokens - len(request.generated_token_ids), MAX_MODEL_LEN)
        # A first token of the prefill side that ends the request is not emitted again.
        assert len(received) == room or (not received and room == 1)

    @invariant()
    def blocks_add_up(self) -> None:
        holders: dict[int, int] = {}
        for request in self.objects.values():
            for block_id in request.block_ids:
                holders[block_id] = holders.get(block_id, 0) + 1
        for block in self.kv.pool.blocks:
            assert block.ref_count == holders.get(block.block_id, 0)
        assert self.kv.pool.num_free_blocks == NUM_BLOCKS - len(holders)

    @invariant()
    def transfers_own_their_blocks(self) -> None:
        for transfer_id, block_ids in self.connector.sends.items():
            held = self.objects["r" + transfer_id[1:]].block_ids
            assert held[: len(block_ids)] == block_ids, "a published block was freed while the peer may read it"
        for transfer_id, load in self.connector.loads.items():
            if load.block_ids:
                held = self.objects["r" + transfer_id[1:]].block_ids
                first = load.first_block_index
                assert held[first : first + len(load.block_ids)] == load.block_ids

    @invariant()
    def limits_hold(self) -> None:
        assert len(self.scheduler.running) <= 4
        queues = (self.scheduler.running, self.scheduler.loading)
        num_placed = sum(map(len, queues)) + len(self.scheduler.waiting) + len(self.scheduler.waiting_to_load)
        num_placed += len(self.scheduler.loaded)
        assert num_placed == len(self.scheduler.requests)

    def teardown(self) -> None:
        """Whatever happened: once peers and gateway do their part, everything ends and every block is free."""
        for request_id, request in self.added.items():
            transfer = request.kv_transfer
            if transfer is not None and transfer.side is KVSide.CONSUME and request_id not in self.prefill_sent:
                self._prefill(request, good=False)
        self._take(self.scheduler.take_outputs())
        for _ in range(600):
            if not self.scheduler.has_work:
                break
            step = self.scheduler.schedule()
            output = self.runner.execute_model(step) if step.num_scheduled_tokens else ModelRunnerOutput()
            output.connector = self.connector.step(step)
            self._take(self.scheduler.update_from_output(step, output))
            self.blocks_add_up()
            for transfer_id in list(self.connector.sends):
                if transfer_id in self.connector.send_complete | self.connector.cancelled:
                    self.connector.end_send(transfer_id)
            for transfer_id in list(self.connector.loads):
                self.connector.end_load(transfer_id, 0, "peer gone")
        assert not self.scheduler.has_work, f"still there: {list(self.scheduler.requests.values())}"
        assert self.ended.keys() == self.added.keys()
        assert self.kv.pool.num_free_blocks == NUM_BLOCKS


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
