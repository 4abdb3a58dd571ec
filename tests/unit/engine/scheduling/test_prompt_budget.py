"""Prompt tokens beside decodes fit the target time between tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_engine.scheduling.prompt_budget import MIN_PROMPT_TOKENS, PromptBudget
from support.engine.scheduling.scheduler_engine import Engine
from support.engine.scheduling.scheduler_machine import FakeGrammars

BUDGET = 512
TARGET_S = 0.05


def run_backlog(
    budget: PromptBudget, num_steps: int, decode_s: float, token_s: float
) -> tuple[int, float]:
    """Run steps that use the whole limit beside decodes. Return the last limit and step time."""
    for _ in range(num_steps):
        limit = budget.limit(BUDGET)
        seconds = decode_s + limit * token_s
        budget.observe(limit, 4, seconds)
    return limit, seconds


@given(first=st.integers(1, BUDGET), decode=st.floats(0.001, 0.045), token=st.floats(2e-5, 1e-3))
def test_the_step_time_converges_to_the_target(first: int, decode: float, token: float) -> None:
    budget = PromptBudget(TARGET_S)
    budget.observe(first, 0, first * token)
    limit, seconds = run_backlog(budget, 300, decode, token)
    assert MIN_PROMPT_TOKENS <= limit <= BUDGET
    assert seconds <= 1.02 * TARGET_S or limit == MIN_PROMPT_TOKENS
    assert seconds + token >= 0.98 * TARGET_S or limit == BUDGET


def test_the_limit_recovers_after_decodes_that_took_longer_than_the_target() -> None:
    budget = PromptBudget(TARGET_S)
    budget.observe(BUDGET, 0, 0.1)
    assert run_backlog(budget, 20, 0.06, 1e-4)[0] == MIN_PROMPT_TOKENS
    limit, seconds = run_backlog(budget, 60, 0.02, 1e-4)
    assert 0.98 * TARGET_S < seconds <= TARGET_S
    budget.observe(0, 4, 0.3)  # a slow step without prompt tokens does not count
    assert budget.limit(BUDGET) == pytest.approx(limit, abs=2)


def test_steps_with_few_prompt_tokens_hardly_change_the_limit() -> None:
    """Prompts whose prefix is cached have short chunks, whose cost per token is high."""
    budget = PromptBudget(TARGET_S)
    budget.observe(BUDGET, 0, 0.1)
    limit, _ = run_backlog(budget, 100, 0.02, 1e-4)
    for seconds in (0.02, 0.04, 0.06) * 10:
        budget.observe(2, 4, seconds)
    assert 0.9 * limit <= budget.limit(BUDGET) <= limit


def test_one_slow_step_halves_the_limit_at_most() -> None:
    budget = PromptBudget(TARGET_S)
    budget.observe(BUDGET, 0, 0.1)
    limit, _ = run_backlog(budget, 100, 0.02, 1e-4)
    budget.observe(limit, 4, 3.0)
    assert budget.limit(BUDGET) >= limit // 2
    assert run_backlog(budget, 12, 0.02, 1e-4)[0] >= 0.95 * limit


@pytest.mark.parametrize("target", [0.0, TARGET_S])
def test_without_a_target_or_an_observation_there_is_no_limit(target: float) -> None:
    budget = PromptBudget(target)
    if not target:
        budget.observe(100, 4, 10.0)
    assert budget.limit(BUDGET) == BUDGET


def make_engine(**options: object) -> Engine:
    engine = Engine(num_blocks=256, budget=64, target_itl_s=0.1, **options)
    engine.scheduler.state.prompt_budget.observe(64, 0, 0.4)  # 16 tokens in 0.1 s
    engine.add("first", list(range(1, 65)), 30)
    assert engine.step().num_scheduled_tokens == {"first": 64}
    return engine


def test_only_steps_with_decodes_have_shorter_prompt_chunks() -> None:
    engine = make_engine()
    engine.add("second", list(range(1, 101))[::-1], 2)
    for _ in range(3):
        assert engine.step().num_scheduled_tokens == {"first": 1, "second": 16}


def test_a_prompt_chunk_of_one_token_is_not_a_decode() -> None:
    """A slow step lowers the limit only if a decode waited for it."""
    engine = Engine(num_blocks=256, budget=64, target_itl_s=0.1)
    budget = engine.scheduler.state.prompt_budget
    budget.observe(64, 0, 0.1)
    engine.add("first", list(range(1, 66)), 30)
    for num_tokens in (64, 1):
        step = engine.schedule()
        assert step.num_scheduled_tokens == {"first": num_tokens}
        assert engine.scheduler.num_decodes(step) == 0
        engine.scheduler.observe_duration(step, 10.0)
        engine.update()
        assert budget.limit(64) == 64
    assert engine.scheduler.num_decodes(engine.schedule()) == 1


def test_prompts_are_limited_while_the_decodes_are_in_flight() -> None:
    """A request with a grammar has only one step in flight."""
    engine = Engine(
        num_blocks=256,
        budget=64,
        target_itl_s=0.1,
        async_scheduling=True,
        grammars=FakeGrammars(),
    )
    engine.scheduler.state.prompt_budget.observe(64, 0, 0.4)
    engine.add("first", [1, 2, 3], 30)
    engine.step()
    engine.add("second", list(range(1, 101))[::-1], 2)
    state = engine.scheduler.state
    state.requests["first"].grammar = object()  # type: ignore[assignment]
    assert engine.scheduler.schedule().num_scheduled_tokens == {"first": 1, "second": 16}
    state.requests["second"].grammar = None
    assert engine.scheduler.schedule().num_scheduled_tokens == {"second": 16}
