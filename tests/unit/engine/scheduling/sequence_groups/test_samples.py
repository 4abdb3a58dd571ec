"""Groups of samples compute their prompt once and share its blocks with copy-on-write."""

from __future__ import annotations

import pytest

from baton_engine.scheduling.request_limits import RequestRefusedError
from baton_protocol.engine_messages import ErrorCode, FinishReason
from support.engine.scheduling.fake_runner import continuation
from support.engine.scheduling.scheduler_engine import Engine

PROMPT = list(range(1, 11))  # two blocks and a half


def group(
    engine: Engine, num_samples: int, max_tokens: int = 6, prompt: list[int] = PROMPT
) -> list[str]:
    names = [f"s{index}" for index in range(num_samples)]
    for index, name in enumerate(names):
        engine.add(name, prompt, max_tokens, group_id="g", sample_index=index)
    return names


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_group_computes_its_prompt_once_and_shares_its_full_blocks(prefix_caching) -> None:
    engine = Engine(prefix_caching=prefix_caching)
    names = group(engine, 4)
    first = engine.step()
    assert first.num_scheduled_tokens == {"s0": 10}
    second = engine.step()
    assert second.num_scheduled_tokens == dict.fromkeys(names, 1)
    assert {new.num_computed_tokens for new in second.new_requests} == {9}, (
        "each sample computes only the last prompt token"
    )
    assert len(second.block_copies) == 3, "all members but one copy the partial block"
    assert 32 - engine.kv.num_free_blocks == 2 + 4
    engine.run()
    for name in names:
        assert engine.text(name) == continuation(PROMPT, 6, ignore_eos=True)
    assert engine.kv.num_free_blocks == 32


def test_members_that_wait_for_the_prompt_do_not_block_other_requests() -> None:
    engine = Engine(budget=4)
    group(engine, 3)
    engine.add("other", [7, 8], 2)
    engine.step()
    step = engine.step()
    assert "other" in step.num_scheduled_tokens or "other" in engine.step().num_scheduled_tokens
    engine.run()
    assert engine.text("other") == continuation([7, 8], 2, ignore_eos=True)
    # The whole prompt, the last prompt token of two members, and the two tokens of `other`.
    assert engine.scheduler.stats().prompt_tokens_computed == 10 + 2 + 2


@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_the_next_member_computes_the_prompt_if_the_first_is_aborted_or_preempted(how) -> None:
    engine = Engine(budget=4, prefix_caching=False)
    names = group(engine, 3)
    engine.step()
    if how == "abort":
        engine.scheduler.abort_requests(["s0"])
        names.remove("s0")
    else:
        engine.scheduler.preempt_all()
    engine.run()
    for name in names:
        assert engine.text(name) == continuation(PROMPT, 6, ignore_eos=True)
    assert engine.kv.num_free_blocks == 32


def test_no_member_shares_a_block_that_the_same_step_copies_to() -> None:
    """The first sample is preempted in its step, so the others start from each other."""
    engine = Engine(async_scheduling=True, prefix_caching=False)
    names = group(engine, 3)
    engine.schedule()
    engine.scheduler.preempt_all()
    engine.schedule()
    for _ in range(12):
        engine.update()
        engine.schedule()
    for name in names:
        assert engine.text(name) == continuation(PROMPT, 6, ignore_eos=True)


def test_the_end_of_a_member_does_not_free_blocks_of_the_others() -> None:
    engine = Engine()
    names = group(engine, 3, max_tokens=9)
    engine.step()
    engine.step()
    engine.scheduler.abort_requests(["s0"])
    engine.add("reuses", [99] * 30, 3)
    engine.run()
    assert engine.last("s0").finish_reason is FinishReason.ABORT
    for name in names[1:]:
        assert engine.text(name) == continuation(PROMPT, 9, ignore_eos=True)


def test_a_late_member_shares_the_computed_blocks_of_the_first() -> None:
    engine = Engine()
    engine.add("s0", PROMPT, 12, group_id="g")
    for _ in range(5):
        engine.step()
    engine.add("s1", PROMPT, 12, group_id="g", sample_index=1)
    step = engine.step()
    assert step.num_scheduled_tokens["s1"] == 1
    engine.scheduler.abort_requests(["s0"])  # s1 is now the only holder of the shared blocks
    engine.run()
    assert engine.text("s1") == continuation(PROMPT, 12, ignore_eos=True)


def test_a_member_with_another_prompt_is_refused() -> None:
    engine = Engine()
    engine.add("a", [1, 2], group_id="g")
    with pytest.raises(RequestRefusedError, match="equal prompts") as refused:
        engine.add("b", [1, 3], group_id="g")
    assert refused.value.code is ErrorCode.INVALID
    engine.run()
    engine.add("c", [1, 3], group_id="g")  # the group has ended, so its id can be used again


def test_a_group_is_swapped_out_as_a_whole_and_shares_blocks_after_its_return() -> None:
    engine = Engine(num_blocks=12, num_swap_blocks=24, prefix_caching=False)
    engine.add("first", [50] * 10, 24, priority=-1)
    engine.step()
    names = group(engine, 3, max_tokens=10)
    steps = [engine.step() for _ in range(60)]
    (out,) = [step.swap_out for step in steps if step.swap_out]
    (back,) = [step.swap_in for step in steps if step.swap_in]
    assert sorted(copy.target for copy in out) == sorted(copy.source for copy in back)
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.num_swapped_out_blocks == stats.num_swapped_in_blocks == len(out)
    assert stats.num_preemptions == 3
    assert stats.prompt_tokens_computed == 10 + 10 + 2, "tokens were computed again"
    for name in names:
        assert engine.text(name) == continuation(PROMPT, 10, ignore_eos=True)
    assert engine.kv.swap_pool.num_free_blocks == 24


def test_a_group_that_lacks_blocks_for_itself_preempts_only_its_last_member() -> None:
    engine = Engine(num_blocks=8, num_swap_blocks=24, preemption_mode="swap", prefix_caching=False)
    names = group(engine, 3, max_tokens=16)
    for _ in range(100):
        assert not engine.step().swap_out, "the group was swapped out to free blocks for itself"
    assert engine.scheduler.stats().num_preemptions > 0
    for name in names:
        assert engine.text(name) == continuation(PROMPT, 16, ignore_eos=True)
    assert engine.last("s0").finish_reason is FinishReason.LENGTH


def test_a_member_with_another_cache_salt_is_refused() -> None:
    engine = Engine()
    engine.add("s0", PROMPT, group_id="g", cache_salt="salt")
    with pytest.raises(RequestRefusedError, match="the same cache_salt") as refused:
        engine.add("s1", PROMPT, group_id="g", cache_salt="pepper")
    assert refused.value.code is ErrorCode.INVALID
    engine.add("s2", PROMPT, group_id="g", cache_salt="salt")
    engine.run()
    assert engine.text("s0") == engine.text("s2")
    assert "s1" not in engine.outputs


def start_of_late_member(*, async_scheduling: bool, steps: int) -> set[int]:
    """Return the first positions that a late member computes.

    It arrives after `steps` steps of the first member, whose prompt takes two chunks.
    """
    engine = Engine(budget=6, async_scheduling=async_scheduling, prefix_caching=False)
    group(engine, 1)
    for _ in range(steps):
        engine.schedule()
    if not async_scheduling:
        while engine.in_flight:
            engine.update()
    engine.add("s1", PROMPT, 6, group_id="g", sample_index=1)
    started: set[int] = set()
    for _ in range(20):
        step = engine.schedule()
        started |= {new.num_computed_tokens for new in step.new_requests if new.request_id == "s1"}
        engine.update()
    while engine.in_flight:
        engine.update()
    engine.run()
    assert engine.text("s0") == engine.text("s1") == continuation(PROMPT, 6, ignore_eos=True)
    return started


def test_a_late_member_shares_a_prompt_whose_step_is_still_in_flight() -> None:
    assert start_of_late_member(async_scheduling=True, steps=2) == {9}
    assert start_of_late_member(async_scheduling=True, steps=1) == {9}, (
        "the member must wait for the chunk that is not scheduled"
    )


def test_a_late_member_waits_until_a_preempted_member_has_recomputed_the_prompt() -> None:
    engine = Engine(prefix_caching=False)
    group(engine, 1)
    engine.step()
    engine.scheduler.preempt_all()
    engine.add("s1", PROMPT, 6, group_id="g", sample_index=1)
    step = engine.step()
    assert step.num_scheduled_tokens == {"s0": 11}, (
        "s1 must wait for the prompt, which is computed again"
    )
    engine.run()
    assert engine.text("s0") == engine.text("s1") == continuation(PROMPT, 6, ignore_eos=True)
