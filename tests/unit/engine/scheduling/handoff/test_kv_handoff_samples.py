"""Samples of one prompt whose KV is loaded from a peer: one load, shared with copy-on-write."""

from __future__ import annotations

from typing import Any

import pytest

from baton_engine.scheduling.scheduler import PauseState
from baton_protocol.engine_messages import (
    ErrorCode,
    FinishReason,
    KVSide,
    KVTransferParams,
    PrefillResult,
)
from baton_protocol.sampling_params import StructuredOutput, StructuredOutputKind
from support.engine.scheduling.fake_runner import continuation
from support.engine.scheduling.scheduler_engine import Engine
from support.engine.scheduling.scheduler_machine import FakeGrammars

PROMPT = list(range(1, 11))  # two blocks and a half


def consume(transfer_id: str) -> KVTransferParams:
    return KVTransferParams(KVSide.CONSUME, transfer_id, "prefill-1", "127.0.0.1", 5558)


def group(
    engine: Engine,
    num_samples: int = 4,
    max_tokens: int = 6,
    params: dict[str, Any] | None = None,
    prompt: list[int] = PROMPT,
) -> list[str]:
    """Add samples whose first one loads the prompt by transfer `t`. Return their names."""
    names = [f"s{index}" for index in range(num_samples)]
    for index, name in enumerate(names):
        transfer = consume("t") if index == 0 else None
        engine.add(
            name,
            prompt,
            max_tokens,
            params,
            group_id="g",
            sample_index=index,
            kv_transfer=transfer,
        )
    return names


def check_texts(engine: Engine, names: list[str], max_tokens: int = 6) -> None:
    for name in names:
        assert engine.text(name) == continuation(PROMPT, max_tokens, ignore_eos=True)
    assert engine.kv.num_free_blocks == 32


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 6])
def test_all_samples_start_from_the_blocks_that_the_first_one_loads(
    prefix_caching, max_tokens
) -> None:
    engine = Engine(prefix_caching=prefix_caching)
    names = group(engine, max_tokens=max_tokens)
    engine.run()
    assert engine.outputs == {}, "samples must wait for the load"
    assert list(engine.connector.loads) == ["t"]
    engine.load("t", PROMPT)
    engine.scheduler.add_prefill_result(PrefillResult("s0"))
    engine.step()
    step = engine.step()
    assert step.num_scheduled_tokens == dict.fromkeys(names, 1), "each runs the last prompt token"
    assert len(step.block_copies) == 3, "all samples but one copy the partial block"
    engine.run()
    check_texts(engine, names, max_tokens)
    stats = engine.scheduler.stats()
    assert (stats.prompt_tokens_remote, stats.prompt_tokens_computed) == (10, 4)
    assert stats.kv_transfer_recomputed_tokens == 0


@pytest.mark.parametrize("prompt_len", [1, 4, 5])
def test_samples_share_a_prompt_of_any_length(prompt_len) -> None:
    engine, prompt = Engine(), PROMPT[:prompt_len]
    names = group(engine, prompt=prompt)
    engine.step()
    engine.load("t", prompt)
    engine.scheduler.add_prefill_result(PrefillResult("s0"))
    engine.run()
    for name in names:
        assert engine.text(name) == continuation(prompt, 6, ignore_eos=True)
    assert engine.scheduler.stats().prompt_tokens_computed == 4
    assert engine.kv.num_free_blocks == 32


def test_samples_that_wait_for_a_load_do_not_block_other_requests() -> None:
    engine = Engine(max_num_seqs=1)
    group(engine)
    engine.add("other", [7, 8], 2)
    engine.run()
    assert engine.text("other") == continuation([7, 8], 2, ignore_eos=True)
    assert engine.outputs.keys() == {"other"}


def test_the_missing_part_of_a_failed_load_is_computed_once() -> None:
    engine = Engine()
    names = group(engine)
    engine.step()
    engine.scheduler.add_prefill_result(PrefillResult("s0", error="prefill died"))
    engine.load("t", PROMPT, num_valid=1, error="peer gone")
    engine.run()
    check_texts(engine, names)
    stats = engine.scheduler.stats()
    assert (stats.prompt_tokens_remote, stats.prompt_tokens_computed) == (4, 6 + 3)
    assert stats.kv_transfer_recomputed_tokens == 6


@pytest.mark.parametrize("arrival", ["before the request", "before the load"])
def test_a_prompt_whose_prefill_stage_fails_at_once_is_computed_once(arrival) -> None:
    engine = Engine()
    failed = PrefillResult("s0", error="prefill died")
    if arrival == "before the request":
        engine.scheduler.add_prefill_result(failed)
    names = group(engine)
    if arrival == "before the load":
        engine.scheduler.add_prefill_result(failed)
    engine.run()
    check_texts(engine, names)
    assert engine.scheduler.stats().prompt_tokens_computed == 10 + 3


def test_the_fail_policy_ends_all_samples_that_wait_for_the_load() -> None:
    engine = Engine(fail=True)
    names = group(engine)
    engine.step()
    engine.connector.end_load("t", 1, "checksum mismatch")
    engine.scheduler.add_prefill_result(PrefillResult("s0"))
    engine.run()
    for name in names:
        assert engine.last(name).error_code is ErrorCode.KV_LOAD
        assert "checksum mismatch" in engine.last(name).error
    assert engine.scheduler.stats().prompt_tokens_computed == 0
    assert engine.kv.num_free_blocks == 32


@pytest.mark.parametrize("is_loaded", [False, True])
def test_the_others_compute_the_prompt_once_if_the_first_is_aborted_during_its_load(
    is_loaded,
) -> None:
    engine = Engine(prefix_caching=False)
    names = group(engine)
    engine.step()
    if is_loaded:  # but its prefill stage has not ended
        engine.load("t", PROMPT)
        engine.step()
    engine.scheduler.abort_requests(["s0"])
    engine.step()
    if not is_loaded:
        engine.connector.end_load("t", 0, "cancelled")
    engine.run()
    assert engine.last("s0").finish_reason is FinishReason.ABORT
    check_texts(engine, names[1:])
    assert engine.scheduler.stats().prompt_tokens_computed == 10 + 2


def test_the_others_share_loaded_blocks_while_the_first_waits_for_its_grammar() -> None:
    grammars = FakeGrammars()
    engine = Engine(grammars=grammars, prefix_caching=False)
    even = {"structured_output": StructuredOutput(StructuredOutputKind.REGEX, "3")}
    names = group(engine, params=even)
    engine.step()
    engine.load("t", PROMPT)
    engine.scheduler.add_prefill_result(PrefillResult("s0"))
    first, *others = grammars.pending
    grammars.pending[:] = [*others, first]
    for _ in others:
        grammars.compile_one()
    engine.run()
    assert engine.outputs.keys() == set(names[1:])
    grammars.compile_one()
    engine.run()
    assert len({tuple(engine.text(name)) for name in names}) == 1
    assert engine.scheduler.stats().prompt_tokens_computed == 4
    assert engine.kv.num_free_blocks == 32


def test_loaded_samples_that_lose_their_memory_compute_the_prompt_once() -> None:
    engine = Engine(prefix_caching=False)
    names = group(engine)
    engine.step()
    engine.load("t", PROMPT)
    engine.scheduler.add_prefill_result(PrefillResult("s0"))
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.step()  # the load ends, and no request starts
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.scheduler.preempt_all()
    engine.run()
    check_texts(engine, names)
    assert engine.scheduler.stats().prompt_tokens_computed == 10 + 3


def test_a_later_load_of_a_running_group_is_a_load_of_its_own() -> None:
    engine = Engine()
    names = group(engine, 2, max_tokens=12)
    engine.step()
    engine.load("t", PROMPT)
    engine.scheduler.add_prefill_result(PrefillResult("s0"))
    engine.step()
    engine.step()
    engine.add("late", PROMPT, 12, group_id="g", sample_index=2, kv_transfer=consume("u"))
    engine.step()
    engine.load("u", PROMPT)
    engine.scheduler.add_prefill_result(PrefillResult("late"))
    engine.run()
    check_texts(engine, [*names, "late"], 12)
