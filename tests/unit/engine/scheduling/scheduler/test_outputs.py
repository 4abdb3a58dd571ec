"""Pauses, resets, statistics and repetitive outputs."""

from __future__ import annotations

import copy

import pytest

from baton_engine.scheduling.scheduler_state import PauseState
from baton_protocol.engine_messages import FinishReason
from baton_protocol.sampling_params import (
    RepetitionDetection,
)
from support.engine.scheduling.fake_runner import continuation
from support.engine.scheduling.scheduler_engine import Engine


def test_stats_do_not_change_after_they_were_returned() -> None:
    engine = Engine()
    engine.add("r", [1, 2], 6)
    engine.step()
    stats = engine.scheduler.stats()
    before = copy.deepcopy(stats)
    engine.run()
    assert stats == before
    assert engine.scheduler.stats().generation_tokens > before.generation_tokens


def test_paused_new_admits_no_requests_and_paused_all_runs_none() -> None:
    engine = Engine()
    engine.add("a", [1], 6)
    engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.add("b", [2], 6)
    assert engine.step().num_scheduled_tokens == {"a": 1}
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not engine.step().num_scheduled_tokens
    assert not engine.scheduler.made_progress
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert engine.text("a") == continuation([1], 6, ignore_eos=True)
    assert engine.text("b") == continuation([2], 6, ignore_eos=True)


def test_preempt_all_frees_all_kv_and_loses_no_text() -> None:
    engine = Engine(num_swap_blocks=8)
    engine.add("a", [1, 2, 3], 6)
    engine.add("beams", [4, 5], 6, {"beam_width": 2})
    for _ in range(3):
        engine.step()
    engine.scheduler.preempt_all()
    assert engine.kv.usage == 0
    engine.run()
    assert engine.text("a") == continuation([1, 2, 3], 6, ignore_eos=True)


@pytest.mark.parametrize("reset_running", [False, True])
def test_a_reset_of_the_prefix_cache_can_include_running_requests(reset_running) -> None:
    engine = Engine()
    engine.add("a", list(range(1, 10)), 6)
    engine.step()
    engine.scheduler.reset_prefix_cache(reset_running)
    assert (engine.kv.usage == 0) == reset_running
    engine.add("b", list(range(1, 10)), 2)
    engine.run()
    assert engine.outputs["b"][0].num_cached_tokens == 0
    assert engine.text("a") == continuation(list(range(1, 10)), 6, ignore_eos=True)


def test_a_repetitive_output_ends_its_request() -> None:
    engine = Engine()
    engine.add("r", [1], 9, {"repetition_detection": RepetitionDetection(1, 1, 3)})
    token = continuation([1], 1, ignore_eos=True)[0]
    step, ran = engine.scheduler.schedule(), engine.runner
    for count in range(3):
        result = ran.execute_model(step)
        result.sampled_token_ids["r"] = ran.sequences["r"].token_ids[-1] = token
        (output,) = engine.scheduler.update_from_output(step, result)
        assert output.finish_reason is (FinishReason.REPETITION if count == 2 else None)
        step = engine.scheduler.schedule()
