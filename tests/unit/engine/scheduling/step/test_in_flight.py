"""Several steps in flight: scheduling ahead, late tokens, and prefix hits."""

from __future__ import annotations

import pytest

from baton_engine.scheduling.scheduler_state import PauseState
from baton_protocol.engine_messages import FinishReason
from baton_protocol.sampling_params import StructuredOutput, StructuredOutputKind
from support.engine.scheduling.fake_runner import continuation
from support.engine.scheduling.scheduler_engine import Engine
from support.engine.scheduling.scheduler_machine import FakeGrammars


def run_with(engine: Engine, depth: int) -> None:
    """Keep `depth` steps in flight until all requests have ended."""
    for _ in range(500):
        while len(engine.in_flight) < depth:
            engine.schedule()
        engine.update()
        if not engine.scheduler.state.requests:
            while engine.in_flight:
                engine.update()
            return
    raise AssertionError(f"requests did not end: {list(engine.scheduler.state.requests.values())}")


def test_in_a_pipeline_a_request_is_in_one_step_at_a_time() -> None:
    engine = Engine(max_num_seqs=2)
    engine.add("a", [1, 2, 3])
    first = engine.schedule()
    engine.add("b", [4, 5])
    second, third = engine.schedule(), engine.schedule()
    assert [list(step.num_scheduled_tokens) for step in (first, second, third)] == [
        ["a"],
        ["b"],
        [],
    ]
    engine.update()
    assert list(engine.schedule().num_scheduled_tokens) == ["a"]
    run_with(engine, 2)
    assert engine.text("a") == continuation([1, 2, 3], 4, ignore_eos=True)
    assert engine.text("b") == continuation([4, 5], 4, ignore_eos=True)


def test_async_scheduling_runs_a_decode_before_its_token_is_known() -> None:
    engine = Engine(async_scheduling=True)
    engine.add("a", [1, 2, 3], 5)
    engine.schedule()
    step = engine.schedule()
    assert step.num_scheduled_tokens == {"a": 1}
    assert (step.cached_requests[0].num_computed_tokens, step.cached_requests[0].new_token_ids) == (
        3,
        [],
    )
    run_with(engine, 2)
    assert engine.text("a") == continuation([1, 2, 3], 5, ignore_eos=True)


@pytest.mark.parametrize("limit", ["max_tokens", "max_model_len"])
def test_async_scheduling_stops_at_max_tokens_and_max_model_len(limit) -> None:
    engine = Engine(async_scheduling=True, num_blocks=2)  # max_model_len is 8
    engine.add("a", [1, 2, 3], 3 if limit == "max_tokens" else 99)
    num_tokens = 0
    for _ in range(9):
        num_tokens += engine.schedule().total_num_scheduled_tokens
    expected = 3 if limit == "max_tokens" else 5
    assert num_tokens == 3 + expected - 1, "the last sampled token is not run"
    while engine.in_flight:
        engine.update()
    assert engine.last("a").finish_reason is FinishReason.LENGTH
    assert len(engine.text("a")) == expected


def test_tokens_after_a_stop_are_dropped_and_the_blocks_are_freed_at_once() -> None:
    engine = Engine(async_scheduling=True)
    stop = continuation([5], 3, ignore_eos=True)[2]
    engine.add("a", [5], 20, {"stop_token_ids": [stop]})
    for _ in range(3):
        engine.schedule()
    engine.update()
    engine.update()
    engine.schedule()  # the step after the stop
    engine.update()
    assert engine.last("a").finish_reason is FinishReason.STOP
    assert engine.kv.num_free_blocks == 32
    engine.add("b", [6] * 9, 4)  # gets the blocks that the step in flight writes
    run_with(engine, 2)
    assert engine.text("a") == continuation([5], 3, ignore_eos=True)
    assert engine.text("b") == continuation([6] * 9, 4, ignore_eos=True)


def test_async_scheduling_runs_several_chunks_of_a_prompt_in_flight() -> None:
    engine = Engine(async_scheduling=True, budget=4)
    engine.add("a", list(range(1, 11)), 2)
    assert [engine.schedule().total_num_scheduled_tokens for _ in range(5)] == [4, 4, 2, 1, 0]
    run_with(engine, 5)
    assert engine.text("a") == continuation(list(range(1, 11)), 2, ignore_eos=True)


def test_a_preempted_request_waits_for_its_steps_in_flight_and_keeps_their_tokens() -> None:
    engine = Engine(async_scheduling=True)
    engine.add("a", [1, 2, 3], 5)
    engine.schedule()
    engine.schedule()
    engine.scheduler.preempt_all()
    assert engine.schedule().num_scheduled_tokens == {}, (
        "the steps of the request are still in flight"
    )
    for _ in range(3):
        engine.update()
    assert len(engine.text("a")) == 2
    step = engine.schedule()
    assert step.new_requests[0].generated_token_ids == engine.text("a")
    run_with(engine, 2)
    assert engine.text("a") == continuation([1, 2, 3], 5, ignore_eos=True)


def test_blocks_are_found_only_after_the_update_of_their_step() -> None:
    engine = Engine()
    prompt = list(range(1, 10))
    engine.add("a", prompt)
    engine.schedule()
    engine.add("b", prompt)
    assert engine.schedule().num_scheduled_tokens == {"b": 9}
    engine.update()
    engine.add("c", prompt)
    assert engine.schedule().num_scheduled_tokens["c"] == 1


def test_blocks_of_a_step_are_not_found_if_the_request_was_preempted_during_it() -> None:
    engine = Engine()
    prompt = list(range(1, 10))
    engine.add("a", prompt)
    engine.schedule()
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.scheduler.preempt_all()
    engine.update()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert engine.schedule().num_scheduled_tokens == {"a": 10}
    run_with(engine, 1)
    assert engine.text("a") == continuation(prompt, 4, ignore_eos=True)


@pytest.mark.parametrize("feature", ["grammar", "beams"])
def test_async_scheduling_does_not_run_grammars_and_beams_ahead(feature) -> None:
    grammars = FakeGrammars()
    engine = Engine(async_scheduling=True, grammars=grammars)
    if feature == "grammar":
        spec = StructuredOutput(StructuredOutputKind.REGEX, "9")
        engine.add("a", [1, 2, 3], 5, {"structured_output": spec})
        grammars.compile_one()
    else:
        engine.add("a", [1, 2, 3], 5, {"beam_width": 2})
    assert engine.schedule().total_num_scheduled_tokens == 3
    assert engine.schedule().total_num_scheduled_tokens == 0
    run_with(engine, 2)
    assert engine.last("a").finish_reason is FinishReason.LENGTH


def test_a_request_with_the_id_of_an_aborted_one_does_not_get_its_tokens() -> None:
    engine = Engine()
    engine.add("a", [1, 2, 3])
    engine.schedule()
    engine.scheduler.abort_requests(["a"])
    engine.add("a", [7, 8], 3)
    engine.schedule()
    engine.update()
    engine.outputs.clear()
    run_with(engine, 2)
    assert engine.text("a") == continuation([7, 8], 3, ignore_eos=True)
