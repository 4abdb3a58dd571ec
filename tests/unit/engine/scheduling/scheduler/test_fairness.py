"""Fairness: requests do not starve or stall others, and memory follows the request order."""

from __future__ import annotations

import pytest

from baton_engine.scheduling.request_limits import RequestRefusedError
from baton_engine.scheduling.scheduler_state import PauseState
from baton_protocol.engine_messages import ErrorCode
from support.engine.scheduling.fake_runner import continuation
from support.engine.scheduling.scheduler_engine import Engine


def test_without_chunked_prefill_a_prompt_runs_in_one_step() -> None:
    engine = Engine(budget=16, enable_chunked_prefill=False)
    for name in ("a", "b", "c"):
        engine.add(name, [ord(name)] * 10, 3)
    scheduled = [engine.step().num_scheduled_tokens for _ in range(3)]
    assert [step.get(name) for step, name in zip(scheduled, "abc", strict=True)] == [10, 10, 10]
    with pytest.raises(RequestRefusedError, match=r"17 prompt .* 16 tokens of a step") as refused:
        engine.add("long", [1] * 17)
    assert refused.value.code is ErrorCode.LENGTH


def test_without_chunked_prefill_a_preempted_request_beyond_the_budget_resumes() -> None:
    engine = Engine(budget=12, num_blocks=8, enable_chunked_prefill=False, prefix_caching=False)
    prompts = {"a": [1] * 10, "b": [2] * 10}
    for name, prompt in prompts.items():
        engine.add(name, prompt, 14)
    engine.run()
    assert engine.scheduler.stats().num_preemptions > 0
    for name, prompt in prompts.items():
        assert engine.text(name) == continuation(prompt, 14, ignore_eos=True)


def test_admission_keeps_the_watermark_free_while_other_requests_run() -> None:
    engine = Engine(num_blocks=8, watermark_blocks=2)
    engine.add("a", [1] * 11, 2)
    engine.add("b", [2] * 13, 2)  # fits, but leaves one block free
    assert "b" not in engine.step().num_scheduled_tokens
    engine.run()
    engine.add("whole", list(range(1, 31)), 2)  # needs all eight blocks
    engine.run()
    assert len(engine.text("b")) == len(engine.text("whole")) == 2


def test_a_request_of_higher_priority_preempts_the_running_one_of_lowest_priority() -> None:
    engine = Engine(num_blocks=9)
    engine.add("low", [1] * 8, 16, priority=2)
    engine.add("middle", [2] * 8, 16, priority=1)
    engine.step()
    engine.add("high", [3] * 8, 16, priority=0)
    engine.run()
    preempted = {
        name: max(len(o.events or []) for o in engine.outputs[name][1:]) for name in engine.outputs
    }
    assert preempted["high"] == 0
    assert preempted["low"] > 0
    for name, token in (("low", 1), ("middle", 2), ("high", 3)):
        assert engine.text(name) == continuation([token] * 8, 16, ignore_eos=True)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_fcfs_policy_ignores_priorities(policy) -> None:
    engine = Engine(max_num_seqs=1, policy=policy)
    engine.add("early", [1], arrival_time=1.0, priority=5)
    engine.add("late", [2], arrival_time=2.0, priority=0)
    engine.run()
    assert next(iter(engine.outputs)) == ("early" if policy == "fcfs" else "late")


def test_swap_mode_swaps_single_requests_and_recomputes_when_the_host_is_full() -> None:
    for num_swap_blocks, swapped in ((24, True), (1, False)):
        engine = Engine(
            num_blocks=8, budget=64, num_swap_blocks=num_swap_blocks, preemption_mode="swap"
        )
        prompts = {"a": [1] * 12, "b": [2] * 12}
        for name, prompt in prompts.items():
            engine.add(name, prompt, 18)
        engine.run()
        stats = engine.scheduler.stats()
        assert stats.num_preemptions > 0
        assert (stats.num_swapped_in_blocks > 0) == swapped
        assert (stats.prompt_tokens_computed == 24) == swapped, (
            "a swapped request must not be recomputed"
        )
        for name, prompt in prompts.items():
            assert engine.text(name) == continuation(prompt, 18, ignore_eos=True)


def test_swapped_requests_resume_before_new_ones_are_admitted() -> None:
    engine = Engine(
        num_blocks=8, budget=64, num_swap_blocks=24, preemption_mode="swap", max_num_seqs=2
    )
    engine.add("a", [1] * 12, 18)
    engine.add("b", [2] * 12, 18)
    engine.add("new", [3], 2)  # waits: max_num_seqs is 2
    while not engine.scheduler.stats().num_requests_swapped:
        step = engine.step()
    assert step.swap_out
    assert not step.new_requests, "the freed blocks are for running requests"
    while engine.scheduler.stats().num_requests_swapped:
        assert "new" not in engine.step().num_scheduled_tokens
    engine.run()
    assert engine.text("b") == continuation([2] * 12, 18, ignore_eos=True)
    assert engine.text("new") == continuation([3], 2, ignore_eos=True)


def test_blocks_freed_by_a_preemption_go_to_running_requests() -> None:
    engine = Engine(num_blocks=8, budget=64, max_num_seqs=2)
    engine.add("a", [1] * 12, 18)
    engine.add("b", [2] * 12, 18)
    engine.step()
    engine.add("urgent", [3], 2, priority=-1)  # waits: max_num_seqs is 2
    while not engine.scheduler.stats().num_preemptions:
        step = engine.step()
    assert list(step.num_scheduled_tokens) == ["a"]
    assert list(engine.step().num_scheduled_tokens) == ["a", "urgent"]


def test_a_prompt_can_be_preempted_between_its_chunks() -> None:
    engine = Engine(num_blocks=8, budget=3, prefix_caching=False)
    engine.add("decodes", [1] * 3, 20)
    engine.step()
    engine.add("long", list(range(1, 25)), 2)
    while not engine.scheduler.stats().num_preemptions:
        step = engine.step()
    assert list(step.num_scheduled_tokens) == ["decodes"]
    engine.run()
    assert engine.text("decodes") == continuation([1] * 3, 20, ignore_eos=True)
    assert engine.text("long") == continuation(list(range(1, 25)), 2, ignore_eos=True)


def test_a_swapped_request_resumes_only_after_its_steps_in_flight() -> None:
    engine = Engine(
        num_blocks=8, num_swap_blocks=24, preemption_mode="swap", async_scheduling=True, budget=64
    )
    engine.add("a", [1] * 12, 18)
    engine.add("b", [2] * 12, 18)
    while not engine.schedule().swap_out:
        if len(engine.in_flight) == 2:
            engine.update()
    assert "b" in engine.in_flight[-2][0].num_scheduled_tokens
    engine.scheduler.abort_requests(["a"])
    assert not engine.schedule().swap_in
    while engine.in_flight:
        engine.update()
    assert engine.step().swap_in
    engine.run()
    assert engine.text("b") == continuation([2] * 12, 18, ignore_eos=True)


def test_aborted_requests_are_removed_from_the_waiting_queue() -> None:
    engine = Engine()
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.add("first", [1, 2], 2)
    for index in range(1000):
        engine.add(f"r{index}", [3, 4], 2)
        engine.scheduler.abort_requests([f"r{index}"])
    engine.add("last", [1, 2], 2)
    engine.step()
    assert len(engine.scheduler.state.queues.waiting._heap) < 100, (
        "aborted entries stay in the heap"
    )
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert list(engine.step().num_scheduled_tokens) == ["first", "last"]
