"""Any order of events with a small pool: no block leaks, every request ends once with its text."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton_engine.scheduling.scheduler_state import PauseState
from baton_protocol.engine_messages import (
    EngineCoreRequest,
    KVSide,
    KVTransferParams,
    PrefillResult,
)
from baton_protocol.options.config import SchedulerConfig
from baton_protocol.sampling_params import SamplingParams, StructuredOutput, StructuredOutputKind
from support.engine.scheduling.fake_runner import candidates, continuation, next_token
from support.engine.scheduling.scheduler_machine import (
    BLOCK,
    BUDGET,
    MAX_NUM_SEQS,
    MAX_QUEUE,
    Loss,
    World,
)

SIDES = st.sampled_from([None, None, KVSide.PRODUCE, KVSide.CONSUME])


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        data=st.data(),
        mode=st.sampled_from(["one step", "pipeline", "async"]),
        preemption=st.sampled_from(["auto", "swap", "swap", "recompute"]),
        num_swap_blocks=st.sampled_from([0, 5, 24, 24]),
        num_offload_blocks=st.sampled_from([0, 1, 3, 16]),
        watermark_blocks=st.integers(0, 1),
        prefix_caching=st.booleans(),
        chunked=st.sampled_from([True, True, False]),
    )
    def start(
        self,
        data,
        mode,
        preemption,
        num_swap_blocks,
        num_offload_blocks,
        watermark_blocks,
        prefix_caching,
        chunked,
    ) -> None:
        config = SchedulerConfig(
            max_num_batched_tokens=BUDGET,
            max_num_seqs=MAX_NUM_SEQS,
            max_queue=MAX_QUEUE,
            policy=data.draw(st.sampled_from(["priority", "fcfs"])),
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=data.draw(st.sampled_from([0, 3])),
            preemption_mode=preemption,
            async_scheduling=mode == "async",
        )
        self.world = World(
            config,
            depth={"one step": 1, "async": 2, "pipeline": data.draw(st.integers(1, 3))}[mode],
            num_swap_blocks=num_swap_blocks,
            num_offload_blocks=num_offload_blocks,
            watermark_blocks=watermark_blocks,
            prefix_caching=prefix_caching,
            send_token_ids=mode == "pipeline",
        )
        self.num_drawn = 0
        self.prefill_sent: set[str] = set()

    def _id(self) -> str:
        self.num_drawn += 1
        return f"r{self.num_drawn}"

    def _prompt(self, data: st.DataObject) -> list[int]:
        # Few distinct first tokens, so that requests share prefixes.
        return [data.draw(st.integers(1, 3))] * data.draw(st.integers(1, 24))

    @rule(data=st.data(), side=SIDES, early=st.booleans(), stops=st.booleans())
    def add(self, data: st.DataObject, side: KVSide | None, early: bool, stops: bool) -> None:
        request_id, prompt = self._id(), self._prompt(data)
        generated = continuation(prompt, data.draw(st.integers(0, 3)), ignore_eos=True)
        max_tokens = len(generated) + (
            1 if side is KVSide.PRODUCE else data.draw(st.integers(1, 16))
        )
        stop = continuation([*prompt, *generated], data.draw(st.integers(1, 6)), ignore_eos=True)[
            -1
        ]
        params = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            stop_token_ids=[stop] if stops and side is None else [],
            prompt_logprobs=data.draw(st.sampled_from([None, None, 1])) if side is None else None,
        )
        transfer = None if side is None else _transfer(side, request_id)
        request = EngineCoreRequest(
            request_id,
            prompt,
            params,
            generated,
            arrival_time=float(self.num_drawn),
            priority=data.draw(st.integers(0, 1)),
            kv_transfer=transfer,
        )
        if early and side is KVSide.CONSUME:
            self._prefill(request, data.draw(st.booleans()))
        if not self.world.add(request):
            self.prefill_sent.discard(request_id)

    @rule(data=st.data(), num_samples=st.integers(2, 4), loads=st.booleans())
    def add_group(self, data: st.DataObject, num_samples: int, loads: bool) -> None:
        prompt, group_id, arrival = self._prompt(data), f"g{self.num_drawn}", float(self.num_drawn)
        for index in range(num_samples):
            max_tokens = data.draw(st.integers(1, 12))
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            request_id = self._id()
            self.world.add(
                EngineCoreRequest(
                    request_id,
                    prompt,
                    params,
                    sample_index=index,
                    arrival_time=arrival,
                    kv_transfer=_transfer(KVSide.CONSUME, request_id)
                    if loads and index == 0
                    else None,
                    group_id=group_id,
                )
            )

    @rule(
        data=st.data(), width=st.integers(1, 4), early_stopping=st.booleans(), stops=st.booleans()
    )
    def add_beams(self, data: st.DataObject, width: int, early_stopping: bool, stops: bool) -> None:
        prompt = self._prompt(data)
        stop = candidates([*prompt, candidates(prompt, 1)[0][0]], 2)[data.draw(st.integers(0, 1))][
            0
        ]
        params = SamplingParams(
            max_tokens=data.draw(st.integers(1, 8)),
            beam_width=width,
            early_stopping=early_stopping,
            ignore_eos=True,
            stop_token_ids=[stop] if stops else [],
        )
        self.world.add(
            EngineCoreRequest(self._id(), prompt, params, arrival_time=float(self.num_drawn))
        )

    @rule(data=st.data(), spec=st.sampled_from(["1", "3", "20", "bad"]))
    def add_grammar(self, data: st.DataObject, spec: str) -> None:
        params = SamplingParams(
            max_tokens=data.draw(st.integers(1, 6)),
            ignore_eos=True,
            structured_output=StructuredOutput(StructuredOutputKind.REGEX, spec),
        )
        prompt = self._prompt(data)
        self.world.add(
            EngineCoreRequest(self._id(), prompt, params, arrival_time=float(self.num_drawn))
        )

    @precondition(lambda self: self.world.grammars.pending)
    @rule()
    def compile_one(self) -> None:
        self.world.grammars.compile_one()

    def _prefill(self, request: EngineCoreRequest, good: bool, has_token: bool = True) -> None:
        token = next_token([*request.prompt_token_ids, *request.generated_token_ids])
        self.prefill_sent.add(request.request_id)
        self.world.scheduler.add_prefill_result(
            PrefillResult(
                request.request_id,
                [token] if good and has_token else [],
                "" if good else "prefill died",
            )
        )

    def _without_prefill(self) -> list[EngineCoreRequest]:
        return [
            request
            for request_id, request in self.world.added.items()
            if request.kv_transfer is not None
            and request.kv_transfer.side is KVSide.CONSUME
            and request_id not in self.prefill_sent
        ]

    @rule(data=st.data(), good=st.booleans(), has_token=st.booleans())
    def prefill_result(self, data: st.DataObject, good: bool, has_token: bool) -> None:
        if waiting := self._without_prefill():
            self._prefill(data.draw(st.sampled_from(waiting)), good, has_token)

    @precondition(lambda self: self.world.added)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.abort(data.draw(st.sampled_from(sorted(self.world.added))))

    def _schedule(self) -> None:
        if self.world.may_schedule:
            self.world.schedule()

    def _update(self) -> None:
        if self.world.in_flight:
            self.world.update()

    @rule()
    def schedule(self) -> None:
        self._schedule()

    @rule()
    def update(self) -> None:
        self._update()

    @precondition(lambda self: self.world.may_schedule)
    @rule(lost=st.sampled_from(Loss))
    def lose(self, lost: Loss) -> None:
        """Schedule a step whose tokens are lost. It is discarded after the steps before it."""
        self.world.schedule(lost)

    @rule(num_steps=st.integers(1, 8))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            while self.world.may_schedule:
                self.world.schedule()
            self.world.update()
            self.world.check_blocks()

    @rule(state=st.sampled_from([PauseState.UNPAUSED, *PauseState]))
    def pause(self, state: PauseState) -> None:
        self.world.scheduler.set_pause_state(state)

    @rule()
    def preempt_all(self) -> None:
        self.world.scheduler.preempt_all()

    @rule(reset_running=st.booleans())
    def reset_prefix_cache(self, reset_running: bool) -> None:
        self.world.scheduler.reset_prefix_cache(reset_running)

    @rule(data=st.data())
    def peer_fetches(self, data: st.DataObject) -> None:
        connector = self.world.connector
        done = sorted(
            t for t in connector.sends if t in connector.send_complete | connector.cancelled
        )
        if done:
            connector.end_send(data.draw(st.sampled_from(done)))

    @rule(data=st.data())
    def lease_ends(self, data: st.DataObject) -> None:
        if self.world.connector.sends:
            self.world.connector.end_send(
                data.draw(st.sampled_from(sorted(self.world.connector.sends)))
            )

    @rule(data=st.data(), whole=st.booleans())
    def load_ends(self, data: st.DataObject, whole: bool) -> None:
        connector, runner = self.world.connector, self.world.runner
        if not connector.loads:
            return
        transfer_id = data.draw(st.sampled_from(sorted(connector.loads)))
        load = connector.loads[transfer_id]
        valid = len(load.block_ids) if whole else data.draw(st.integers(0, len(load.block_ids)))
        request = self.world.added["r" + transfer_id[1:]]
        tokens = [*request.prompt_token_ids, *request.generated_token_ids]
        # An aborted load still writes, so its blocks must not belong to another request.
        for index, block_id in enumerate(load.block_ids):
            start = (load.first_block_index + index) * BLOCK
            end = min(start + BLOCK, len(tokens)) if index < valid else start
            runner.write({start // BLOCK: block_id}, tokens, start, end)  # type: ignore[arg-type]
            for offset in range(end - start, BLOCK):
                runner.memory[(block_id, offset)] = [-1]
        connector.end_load(transfer_id, valid, "" if valid == len(load.block_ids) else "lost")

    @precondition(lambda self: len(self.world.added) > 12)
    @rule()
    def drain(self) -> None:
        self.world.scheduler.draining = True

    @invariant()
    def blocks_add_up(self) -> None:
        self.world.check_blocks()

    @invariant()
    def offloaded_blocks_hold_the_tokens_of_their_hash(self) -> None:
        self.world.check_offload_tier()

    @invariant()
    def every_request_is_in_one_queue(self) -> None:
        self.world.check_places()

    @invariant()
    def transfers_own_their_blocks(self) -> None:
        objects, connector = self.world.objects, self.world.connector
        for transfer_id, block_ids in connector.sends.items():
            held = objects["r" + transfer_id[1:]].block_ids
            assert held[: len(block_ids)] == block_ids, (
                "a published block was freed while the peer may read it"
            )
        for transfer_id, load in connector.loads.items():
            if load.block_ids:
                first = load.first_block_index
                assert (
                    objects["r" + transfer_id[1:]].block_ids[first : first + len(load.block_ids)]
                    == load.block_ids
                )

    def teardown(self) -> None:
        """Check that all requests end and free their blocks when peers and gateway respond."""
        if not hasattr(self, "world"):
            return
        world = self.world
        scheduler, connector = world.scheduler, world.connector
        scheduler.set_pause_state(PauseState.UNPAUSED)
        while world.grammars.pending:
            world.grammars.compile_one()
        for request in self._without_prefill():
            self._prefill(request, good=False)
        world.take(scheduler.take_outputs())
        for _ in range(800):
            if not scheduler.has_work:
                break
            self._schedule()
            self._update()
            world.check_blocks()
            for transfer_id in list(connector.sends):
                if transfer_id in connector.send_complete | connector.cancelled:
                    connector.end_send(transfer_id)
            for transfer_id in list(connector.loads):
                connector.end_load(transfer_id, 0, "peer gone")
        while world.in_flight:
            world.update()
        assert not scheduler.has_work, (
            f"requests did not end: {list(scheduler.state.requests.values())}"
        )
        assert world.ended.keys() == world.added.keys()
        assert world.kv.num_free_blocks == world.kv.pool.num_blocks
        assert not scheduler.state.groups._groups


def _transfer(side: KVSide, request_id: str) -> KVTransferParams:
    return KVTransferParams(side, "t" + request_id[1:], "peer", "127.0.0.1", 1)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
