"""Single requests in the scheduler: budget, order, preemption, prefix hits and ends."""

from __future__ import annotations

import pytest

from baton_protocol.engine_messages import EngineCoreRequest, FinishReason
from baton_protocol.sampling_params import SamplingParams
from support.engine.scheduling.fake_runner import continuation, next_token
from support.engine.scheduling.scheduler_engine import Engine


def test_long_prompts_are_chunked_and_do_not_stall_decodes() -> None:
    engine = Engine(budget=8)
    engine.add("short", [1, 2], 30)
    engine.step()
    engine.add("long", list(range(1, 31)), 2)
    scheduled = [engine.step().num_scheduled_tokens for _ in range(6)]
    assert all(step["short"] == 1 for step in scheduled)
    assert [step["long"] for step in scheduled] == [7, 7, 7, 7, 2, 1]
    assert engine.text("long") == continuation(list(range(1, 31)), 2, ignore_eos=True)


def test_requests_run_by_lower_priority_value_then_by_arrival() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("late", [1], arrival_time=2.0)
    engine.add("early", [2], arrival_time=1.0)
    engine.add("urgent", [3], arrival_time=3.0, priority=-1)
    engine.run()
    assert list(engine.outputs) == ["urgent", "early", "late"]


def test_the_last_request_in_order_is_preempted_and_its_text_does_not_change() -> None:
    engine = Engine(num_blocks=8, budget=64)
    prompts = {"a": [1] * 12, "b": [2] * 12}
    for request_id, prompt in prompts.items():
        engine.add(request_id, prompt, 18)
    engine.run()
    assert engine.scheduler.stats().num_preemptions > 0
    for request_id, prompt in prompts.items():
        assert engine.text(request_id) == continuation(prompt, 18, ignore_eos=True)
        assert [output.token_offset for output in engine.outputs[request_id]] == list(range(18))
    assert len(engine.outputs["a"]) <= len(engine.outputs["b"])
    assert engine.kv.pool.num_free_blocks == 8


def test_a_repeated_prompt_computes_only_its_last_block() -> None:
    engine = Engine()
    prompt = list(range(1, 9))
    engine.add("first", prompt)
    engine.run()
    engine.add("second", prompt)
    step = engine.step()
    # The whole prompt is cached, but the logits need its last token.
    assert step.num_scheduled_tokens["second"] == 4
    assert engine.last("second").num_cached_tokens == 4
    stats = engine.scheduler.stats()
    assert (stats.prompt_tokens, stats.prompt_tokens_computed, stats.prompt_tokens_cached) == (
        16,
        12,
        4,
    )


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("eos", FinishReason.STOP),
        ("stop_token_ids", FinishReason.STOP),
        (None, FinishReason.LENGTH),
    ],
)
def test_requests_end_at_stop_tokens_or_length(stop, expected) -> None:
    engine = Engine()
    third = continuation([5], 3, ignore_eos=True)[2]
    params = SamplingParams(
        max_tokens=6, stop_token_ids=[third] if stop == "stop_token_ids" else []
    )
    if stop == "eos":
        engine.scheduler.state.stop_rules.eos_token_ids = frozenset([third])
    engine.scheduler.add_request(EngineCoreRequest("r", [5], params))
    engine.run()
    assert engine.last("r").finish_reason is expected
    assert engine.last("r").stop_token_id == (third if stop else None)
    assert len(engine.text("r")) == (3 if stop else 6)


def test_stop_tokens_before_min_tokens_do_not_end_a_request() -> None:
    engine = Engine()
    first = next_token([5])
    params = SamplingParams(max_tokens=4, min_tokens=3, stop_token_ids=[first])
    engine.scheduler.add_request(EngineCoreRequest("r", [5], params))
    engine.run()
    assert len(engine.text("r")) == 4
