"""Pause and sleep: text does not change, every wait is answered, every state can be left."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton_engine.core.engine_core import EngineCore
from baton_engine.core.pause import PauseControl
from baton_engine.scheduling.scheduler_state import PauseState
from baton_protocol.engine_messages import EngineCoreRequest, FinishReason
from baton_protocol.options.config import (
    CacheConfig,
    EngineConfig,
    KVRole,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from baton_protocol.sampling_params import SamplingParams
from support.engine.engine_fakes import FakeExecutor, continuation

PROMPTS = {f"r{i}": list(range(1, 2 + 5 * i)) for i in range(5)}
NUM_TOKENS = 12
OVERLAPS = {
    "one by one": {},
    "pipeline": {"parallel": ParallelConfig(pipeline_parallel_size=2)},
    "asynchronous": {"scheduler": SchedulerConfig(async_scheduling=True)},
}


class Texts:
    """An engine core and the tokens of its requests."""

    def __init__(self, **sections: object) -> None:
        config = EngineConfig(
            model=ModelConfig(path="/nowhere"),
            cache=CacheConfig(block_size=4, num_blocks=64),
            **sections,  # type: ignore[arg-type]
        )
        self.executor = FakeExecutor(config, "instance", lambda: None)
        self.core = EngineCore(config, self.executor)
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}

    def add(self, *request_ids: str) -> None:
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        for request_id in request_ids:
            self.tokens[request_id] = []
            assert (
                self.core.add_request(EngineCoreRequest(request_id, PROMPTS[request_id], params))
                is None
            )

    def run(self, max_steps: int = 1000) -> None:
        """Step until the core makes no progress."""
        for _ in range(max_steps):
            if not self.core.has_requests:
                return
            for output in self.core.step_fn():
                self.tokens[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self.reasons[output.request_id] = output.finish_reason
            if not self.core.made_progress:
                return

    def assert_complete(self) -> None:
        for request_id, tokens in self.tokens.items():
            assert tokens == continuation(PROMPTS[request_id], NUM_TOKENS, ignore_eos=True), (
                request_id
            )


@pytest.fixture(params=OVERLAPS.values(), ids=OVERLAPS.keys())
def texts(request: pytest.FixtureRequest) -> Texts:
    return Texts(**request.param)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_sleep_that_keeps_requests_does_not_change_their_text(texts, level) -> None:
    texts.add(*PROMPTS)
    texts.run(max_steps=5)
    assert texts.core.sleep(level, "keep") is None
    assert texts.core.is_sleeping()
    assert texts.core.get_stats().sleep_level == level
    before = {request_id: list(tokens) for request_id, tokens in texts.tokens.items()}
    texts.run()  # takes the outputs of steps in flight
    after = {request_id: list(tokens) for request_id, tokens in texts.tokens.items()}
    texts.run()
    assert texts.tokens == after
    assert all(len(after[request_id]) - len(tokens) <= 2 for request_id, tokens in before.items())
    texts.core.wake_up()
    texts.run()
    texts.assert_complete()
    assert texts.executor.calls == (
        [("sleep", level), ("wake_up", ["kv_cache", "weights"])] if level else []
    )
    assert not texts.core.is_paused()


def test_a_request_that_arrives_during_a_pause_waits_for_resume(texts) -> None:
    assert texts.core.pause("keep") is None
    texts.add("r1")
    texts.run()
    assert texts.tokens == {"r1": []}
    assert texts.core.has_requests
    for _ in range(3):
        texts.core.step_fn()
        assert not texts.core.made_progress, "the engine loop would spin"
    texts.core.resume()
    texts.run()
    texts.assert_complete()


def test_a_pause_that_waits_for_running_requests_leaves_waiting_ones_queued() -> None:
    texts = Texts(scheduler=SchedulerConfig(max_num_seqs=1))
    texts.add("r1", "r2")
    texts.run(max_steps=2)
    future = texts.core.pause("wait")
    assert isinstance(future, Future)
    assert not future.done()
    texts.run()
    assert future.done()
    assert texts.reasons == {"r1": FinishReason.LENGTH}
    texts.core.resume()
    texts.run()
    texts.assert_complete()


def test_a_pause_that_aborts_ends_every_request(texts) -> None:
    texts.add(*PROMPTS)
    texts.run(max_steps=3)
    assert texts.core.pause("abort") is None
    texts.run()
    assert set(texts.reasons.values()) == {FinishReason.ABORT}
    assert texts.reasons.keys() == PROMPTS.keys()
    assert texts.core.get_stats().kv_cache_usage == 0


def test_resume_answers_pending_calls_of_pause(texts) -> None:
    texts.add("r1")
    texts.run(max_steps=2)
    first = texts.core.pause("wait")
    texts.core.resume()
    with pytest.raises(RuntimeError, match="resumed before"):
        first.result(timeout=0)
    texts.core.resume()
    second = texts.core.pause("wait")
    texts.run()
    assert second is None or second.result(timeout=0) is None
    assert texts.core.is_paused()


def test_a_sleeping_engine_cannot_be_resumed_but_can_wake_in_parts(texts) -> None:
    texts.add("r1")
    texts.core.sleep(1, "keep")
    with pytest.raises(RuntimeError, match=r"sleeps at level 1; call wake_up\(\) first"):
        texts.core.resume()
    with pytest.raises(
        ValueError, match="tags must be some of weights, kv_cache, scheduling, got gpu"
    ):
        texts.core.wake_up(["gpu"])
    texts.core.wake_up(["weights"])
    texts.run()
    assert texts.core.is_sleeping()
    assert texts.tokens == {"r1": []}
    texts.core.wake_up(["kv_cache"])
    texts.run()
    texts.assert_complete()


def test_an_engine_that_was_paused_before_it_slept_stays_paused(texts) -> None:
    texts.core.pause("keep")
    texts.core.sleep(1)
    texts.core.wake_up()
    assert texts.core.is_paused()
    assert not texts.core.is_sleeping()


@pytest.mark.parametrize("can_wake_up", [True, False])
def test_a_failure_of_one_worker_to_sleep_leaves_all_workers_awake_or_asleep(
    texts, monkeypatch, can_wake_up
) -> None:
    calls: list[str] = []

    def fail(method: str, args: tuple[object, ...] = ()) -> list[object]:
        calls.append(method)
        if method == "sleep" or not can_wake_up:
            raise RuntimeError(f"no host memory left to {method}")
        return ["hash"]

    with monkeypatch.context() as patch:
        patch.setattr(texts.executor, "collective_rpc", fail)
        with pytest.raises(RuntimeError, match="no host memory left"):
            texts.core.sleep(1)
    assert calls == ["sleep", "wake_up"]
    assert texts.core.is_paused()
    assert texts.core.is_sleeping() is not can_wake_up
    if not can_wake_up:
        with pytest.raises(RuntimeError, match=r"call wake_up\(\) first"):
            texts.core.resume()
        texts.core.wake_up()
    else:
        texts.core.resume()
    texts.add("r1")
    texts.run()
    texts.assert_complete()


def test_a_reset_of_the_prefix_cache_can_preempt_running_requests(texts) -> None:
    texts.add(*PROMPTS)
    texts.run(max_steps=5)
    texts.core.reset_prefix_cache(True)
    texts.run()
    texts.assert_complete()
    assert texts.core.get_stats().num_preemptions > 0


class FakePausedEngine:
    def __init__(self) -> None:
        self.state = PauseState.UNPAUSED
        self.running = 0
        self.held_blocks = False
        self.awake = {"weights", "kv_cache"}

    def set_pause_state(self, state: PauseState) -> None:
        self.state = state

    def end_requests(self) -> None:
        self.running = 0

    def finish_steps(self) -> None:
        pass

    def num_running(self) -> int:
        return self.running

    def free_kv_cache(self) -> bool:
        return not self.held_blocks

    def sleep_workers(self, level: int) -> None:
        assert self.awake == {"weights", "kv_cache"}, "asleep already"
        assert not self.held_blocks, "a transfer writes into memory that is freed"
        self.awake = set()

    def wake_workers(self, tags: list[str]) -> None:
        assert tags
        assert not self.awake & set(tags), "awake already"
        self.awake |= set(tags)


MODES = st.sampled_from(["abort", "wait", "keep"])


class PauseMachine(RuleBasedStateMachine):
    """Calls in any order, between starts and ends of requests and transfers."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = FakePausedEngine()
        self.control = PauseControl(self.engine)
        self.futures: list[Future[None]] = []

    def take(self, future: Future[None] | None) -> None:
        if future is not None:
            self.futures.append(future)

    @rule(mode=MODES)
    def pause(self, mode) -> None:
        self.take(self.control.pause(mode))
        assert self.control.is_paused

    @rule(level=st.sampled_from([0, 1, 2]), mode=MODES)
    def sleep(self, level, mode) -> None:
        try:
            self.take(self.control.sleep(level, mode))
        except RuntimeError:
            assert self.control.memory_dropped
        assert self.control.is_paused

    @rule()
    def resume(self) -> None:
        if self.control.memory_dropped:
            with pytest.raises(RuntimeError, match="wake_up"):
                self.control.resume()
        else:
            self.control.resume()
            assert self.engine.state is PauseState.UNPAUSED

    @rule(
        tags=st.none()
        | st.lists(st.sampled_from(["weights", "kv_cache", "scheduling"]), unique=True)
    )
    def wake_up(self, tags) -> None:
        self.control.wake_up(tags)
        if tags is None:
            assert self.control.sleep_level is None

    @precondition(lambda self: self.engine.state is PauseState.UNPAUSED)
    @rule()
    def requests_start(self) -> None:
        self.engine.running = 3

    @precondition(lambda self: self.engine.state is not PauseState.PAUSED_ALL)
    @rule()
    def requests_end(self) -> None:
        self.engine.running = 0
        self.control.advance()

    @rule(held=st.booleans())
    def transfers(self, held) -> None:
        if self.engine.awake or not held:
            self.engine.held_blocks = held
            self.control.advance()

    @invariant()
    def states_agree(self) -> None:
        assert (self.engine.state is not PauseState.UNPAUSED) == self.control.is_paused
        assert self.control.memory_dropped == (self.engine.awake != {"weights", "kv_cache"})
        if self.control.memory_dropped:
            assert self.control.sleep_level in (1, 2)
            assert self.control.is_paused

    @invariant()
    def waits_end_with_requests_and_transfers(self) -> None:
        waits_for_requests = self.engine.state is PauseState.PAUSED_NEW and self.engine.running
        if not waits_for_requests and not self.engine.held_blocks:
            assert all(future.done() for future in self.futures)

    def teardown(self) -> None:
        self.control.wake_up()
        self.control.resume()
        assert all(future.done() for future in self.futures), "a call is never answered"
        assert self.engine.state is PauseState.UNPAUSED
        assert self.engine.awake == {"weights", "kv_cache"}


PauseMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestPauseMachine = PauseMachine.TestCase


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_an_engine_with_kv_transfer_refuses_to_sleep_and_keeps_its_requests(level, mode) -> None:
    texts = Texts(kv_transfer=KVTransferConfig(role=KVRole.PRODUCER))
    texts.add(*PROMPTS)
    texts.run(max_steps=3)
    with pytest.raises(RuntimeError, match=f"role=producer cannot sleep at level {level}"):
        texts.core.sleep(level, mode)
    assert not texts.core.is_paused()
    texts.run()
    texts.assert_complete()
    assert texts.core.sleep(0, "keep") is None, "level 0 frees no memory"
