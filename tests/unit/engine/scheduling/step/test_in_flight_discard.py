"""Discarding a step whose tokens were lost: requests continue without lost or repeated tokens."""

from __future__ import annotations

import pytest

from baton_engine.executor.step import ModelRunnerOutput, SchedulerOutput
from baton_protocol.engine_messages import FinishReason, KVSide, KVTransferParams
from support.engine.scheduling.fake_runner import continuation
from support.engine.scheduling.scheduler_engine import Engine
from support.engine.scheduling.scheduler_machine import Loss

pytestmark = pytest.mark.parametrize("loss", Loss)


def schedule_lost(engine: Engine, loss: Loss) -> SchedulerOutput:
    step = engine.scheduler.schedule()
    if loss is Loss.IN_THE_WORKER:
        engine.runner.fail_to_run(step)
        engine.connector.start(step.without_tokens())
    return step


def discard(engine: Engine, step: SchedulerOutput, loss: Loss) -> None:
    engine.scheduler.discard(step)
    if loss is Loss.BEFORE_THE_WORKER:
        rest = step.without_tokens()
        output = (
            engine.runner.execute_model(rest) if rest.reaches_model_runner else ModelRunnerOutput()
        )
        output.connector = engine.connector.step(rest)
        for out in engine.scheduler.update_from_output(rest, output):
            engine.outputs.setdefault(out.request_id, []).append(out)


def lose(engine: Engine, loss: Loss) -> SchedulerOutput:
    step = schedule_lost(engine, loss)
    discard(engine, step, loss)
    return step


def test_requests_keep_their_kv_and_run_the_tokens_of_the_lost_step_again(loss) -> None:
    engine = Engine()
    engine.add("a", list(range(1, 8)), 6)
    engine.step()
    engine.add("b", [9, 9, 9], 6)
    lost = lose(engine, loss)
    assert lost.num_scheduled_tokens == {"a": 1, "b": 3}
    again = engine.step()
    assert again.num_scheduled_tokens == lost.num_scheduled_tokens
    starts = {new.request_id: new.num_computed_tokens for new in again.new_requests}
    assert starts == {"a": 7, "b": 0}, "requests are sent to the worker as new, but keep their KV"
    engine.run()
    for request_id, prompt in (("a", list(range(1, 8))), ("b", [9, 9, 9])):
        assert engine.text(request_id) == continuation(prompt, 6, ignore_eos=True)
    assert engine.scheduler.stats().num_preemptions == 0
    assert engine.scheduler.stats().prompt_tokens_computed == 10
    assert engine.kv.num_free_blocks == 32


def test_a_request_that_ended_during_the_lost_step_stays_ended(loss) -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("a", [1, 2, 3], 6)
    engine.step()
    step = schedule_lost(engine, loss)
    engine.scheduler.abort_requests(["a"])
    discard(engine, step, loss)
    engine.add("b", [4], 3)
    engine.run()
    assert engine.last("a").finish_reason is FinishReason.ABORT
    assert engine.text("b") == continuation([4], 3, ignore_eos=True)
    assert not engine.runner.sequences.keys() - {"b"}


def test_blocks_are_published_by_the_step_that_computes_them_again(loss) -> None:
    engine = Engine(budget=6)
    engine.add(
        "r", list(range(1, 11)), 1, kv_transfer=KVTransferParams(KVSide.PRODUCE, "t", "decode-1")
    )
    engine.step()
    lost = lose(engine, loss)
    assert lost.connector.saves[0].last
    assert len(engine.connector.sends["t"]) == 1
    assert "t" not in engine.connector.send_complete
    again = engine.step()
    assert again.connector.saves == lost.connector.saves
    assert "t" in engine.connector.send_complete
    engine.connector.end_send("t")
    engine.run()
    assert engine.kv.num_free_blocks == 32


def test_a_group_waits_for_its_prompt_after_a_lost_step(loss) -> None:
    engine = Engine()
    for index in range(3):
        engine.add(f"s{index}", [7] * 6, 4, sample_index=index, group_id="g")
    lost = lose(engine, loss)
    assert list(lost.num_scheduled_tokens) == ["s0"]
    engine.run()
    for index in range(3):
        assert engine.text(f"s{index}") == continuation([7] * 6, 4, ignore_eos=True)
    assert engine.scheduler.stats().prompt_tokens_computed == 6 + 2, (
        "each further sample computes only the last prompt token"
    )


def test_prefixes_of_a_lost_step_are_not_found_before_they_are_computed(loss) -> None:
    engine = Engine()
    engine.add("a", [5] * 9, 3)
    lose(engine, loss)
    engine.add("b", [5] * 9, 3)
    step = engine.step()
    assert step.num_scheduled_tokens == {"a": 9, "b": 7}, (
        "b gets the rest of the budget, and no prefix hit"
    )
    engine.run()
    assert engine.text("a") == engine.text("b") == continuation([5] * 9, 3, ignore_eos=True)
