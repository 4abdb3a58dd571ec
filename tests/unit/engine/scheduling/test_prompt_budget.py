"""Prompt tokens beside decodes fit the target time between tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_engine.scheduling.prompt_budget import MIN_PROMPT_TOKENS, PromptBudget
from support.engine.scheduling.scheduler_engine import Engine

BUDGET = 512


@given(
    target=st.floats(0.01, 0.5),
    decode=st.floats(0.001, 0.1),
    token=st.floats(1e-6, 1e-2),
    fixed=st.floats(0, 0.02),
)
def test_the_step_time_converges_to_the_target(
    target: float, decode: float, token: float, fixed: float
) -> None:
    """`fixed` is a cost per step with prompt tokens, which the estimate does not model."""
    budget = PromptBudget(target)
    budget.observe(0, decode)
    budget.observe(BUDGET, fixed + BUDGET * token)
    for _ in range(300):
        limit = budget.limit(BUDGET)
        assert MIN_PROMPT_TOKENS <= limit <= BUDGET
        seconds = decode + fixed + limit * token
        budget.observe(limit, seconds)
    if limit > MIN_PROMPT_TOKENS:
        assert seconds <= 1.1 * target
    if limit < BUDGET:
        assert seconds + token >= 0.9 * target or limit == MIN_PROMPT_TOKENS


def test_a_slow_machine_still_computes_prompts() -> None:
    budget = PromptBudget(0.01)
    budget.observe(0, 1.0)
    budget.observe(100, 10.0)
    assert budget.limit(BUDGET) == MIN_PROMPT_TOKENS


@pytest.mark.parametrize("target", [0.0, 0.05])
def test_without_a_target_or_an_observation_there_is_no_limit(target: float) -> None:
    budget = PromptBudget(target)
    if not target:
        budget.observe(0, 1.0)
        budget.observe(100, 10.0)
    assert budget.limit(BUDGET) == BUDGET


def test_only_steps_with_decodes_have_shorter_prompt_chunks() -> None:
    engine = Engine(num_blocks=256, budget=64, target_itl_s=0.1)
    engine.scheduler.state.prompt_budget.observe(64, 0.4)  # 16 tokens in 0.1 s
    engine.add("first", list(range(1, 65)), 30)
    assert engine.step().num_scheduled_tokens == {"first": 64}
    engine.add("second", list(range(1, 101))[::-1], 2)
    for _ in range(3):
        assert engine.step().num_scheduled_tokens == {"first": 1, "second": 16}
