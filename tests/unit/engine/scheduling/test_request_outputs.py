"""The fields of outputs other than tokens."""

from __future__ import annotations

import pytest

from baton_protocol.engine_messages import EngineCoreEventType
from support.engine.scheduling.scheduler_engine import Engine


def test_events_are_sent_with_the_next_output() -> None:
    engine = Engine()
    engine.add("r", [1, 2], 4)
    engine.step()
    engine.scheduler.preempt_all()
    engine.run()
    first, second, *others = engine.outputs["r"]
    assert [event.type for event in first.events or []] == [
        EngineCoreEventType.QUEUED,
        EngineCoreEventType.SCHEDULED,
    ]
    assert [event.type for event in second.events or []] == [
        EngineCoreEventType.PREEMPTED,
        EngineCoreEventType.SCHEDULED,
    ]
    times = [event.timestamp for output in (first, second) for event in output.events or []]
    assert times == sorted(times)
    assert not any(output.events for output in others)


@pytest.mark.parametrize("preempt_after", [None, 1, 2])
def test_prompt_logprobs_are_sent_in_full_with_the_first_token(preempt_after) -> None:
    engine = Engine(budget=4)
    prompt = list(range(1, 11))
    engine.add("fills the cache", prompt, 1)
    engine.run()
    engine.add("r", prompt, 3, {"prompt_logprobs": 0})
    for step in range(1, 4):
        engine.step()
        if step == preempt_after:
            engine.scheduler.preempt_all()
    engine.run()
    first, *others = engine.outputs["r"]
    assert [entry.token_id for entry in first.prompt_logprobs or []] == prompt[1:]
    assert first.num_cached_tokens == 0
    assert not any(output.prompt_logprobs for output in others)


def test_outputs_carry_routed_experts_and_nan_counts() -> None:
    engine = Engine(budget=4)
    engine.add("r", list(range(1, 11)), 2, {"return_routed_experts": True})
    engine.run()
    first, second = engine.outputs["r"]
    assert first.routed_experts.shape == (10, 1, 1)
    assert list(first.routed_experts.expert_ids[::2]) == list(range(10)), (
        "the experts of all chunks in order"
    )
    assert second.routed_experts.shape == (1, 1, 1)
    engine.add("n", [1], 1)
    step = engine.scheduler.schedule()
    result = engine.runner.execute_model(step)
    result.num_nans_in_logits["n"] = 7
    (output,) = engine.scheduler.update_from_output(step, result)
    assert output.num_nans_in_logits == 7
