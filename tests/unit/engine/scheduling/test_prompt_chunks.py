"""Chunks of long prompts leave budget to shorter ones."""

from __future__ import annotations

import pytest

from support.engine.scheduling.fake_runner import continuation
from support.engine.scheduling.scheduler_engine import Engine

LONG = list(range(1, 61))


@pytest.mark.parametrize("num_blocks", [64, 20])
@pytest.mark.parametrize("policy", ["priority", "fcfs"])
def test_a_long_prompt_ends_in_bounded_steps_under_a_stream_of_short_ones(
    policy, num_blocks
) -> None:
    engine = Engine(
        num_blocks=num_blocks, budget=8, max_num_seqs=8, max_queue=10_000, policy=policy
    )
    for step in range(200):
        for number in range(3):  # more than the engine can serve
            engine.add(
                f"short-{step}-{number}", [100 + step % 50, number] * 2, 8, arrival_time=float(step)
            )
        if step == 10:
            engine.add("long", LONG, 4, arrival_time=10.0)
        engine.step()
        if "long" in engine.outputs and engine.last("long").finished:
            break
    # 33 short requests of 8 steps come first, 8 at a time. Then the long prompt gets at least
    # one token per step, as the other 7 are decodes.
    assert step < 10 + 33 * 8 / 7 + 60 + 20
    assert engine.text("long") == continuation(LONG, 4, ignore_eos=True)
    if num_blocks == 20:
        assert engine.scheduler.stats().num_preemptions > 0


def test_the_long_prefill_threshold_leaves_budget_to_shorter_prompts() -> None:
    engine = Engine(budget=16, long_prefill_token_threshold=5)
    engine.add("long", LONG, 2)
    engine.add("short", [7] * 6, 2)
    assert engine.step().num_scheduled_tokens == {"long": 5, "short": 6}
    assert engine.step().num_scheduled_tokens == {"short": 1, "long": 15}, (
        "the only prefill gets the whole budget"
    )
    engine.run()
    assert engine.text("long") == continuation(LONG, 2, ignore_eos=True)
