"""Beam search in the scheduler gives the hypotheses of a reference search without blocks."""

from __future__ import annotations

import pytest

from baton_engine.scheduling.request_limits import RequestRefusedError
from baton_protocol.engine_messages import ErrorCode, FinishReason
from baton_protocol.sampling_params import SamplingParams
from support.engine.scheduling.fake_runner import beam_search, candidates
from support.engine.scheduling.scheduler_engine import Engine

PROMPT = list(range(1, 11))


def expected(
    prompt: list[int], max_tokens: int, width: int, stops: frozenset[int] = frozenset(), **params
) -> list[list[int]]:
    return beam_search(
        prompt, SamplingParams(max_tokens=max_tokens, beam_width=width, **params), stops
    )


def beams_of(engine: Engine, request_id: str) -> list[list[int]]:
    (output,) = engine.outputs[request_id]
    assert output.new_token_ids == output.beams[0].token_ids
    assert [beam.score for beam in output.beams] == sorted(
        (beam.score for beam in output.beams), reverse=True
    )
    return [beam.token_ids for beam in output.beams]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize(("width", "max_tokens"), [(1, 5), (2, 9), (4, 7), (3, 1)])
def test_beams_equal_those_of_the_reference_search(width, max_tokens, prefix_caching) -> None:
    engine = Engine(prefix_caching=prefix_caching)
    engine.add("r", PROMPT, max_tokens, {"beam_width": width})
    engine.run()
    assert beams_of(engine, "r") == expected(PROMPT, max_tokens, width)
    assert engine.last("r").finish_reason is FinishReason.LENGTH
    assert engine.kv.num_free_blocks == 32


@pytest.mark.parametrize("early_stopping", [True, False])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 3.0])
def test_stop_tokens_end_a_hypothesis(early_stopping, length_penalty) -> None:
    engine = Engine()
    first = candidates(PROMPT, 2)[0][0]
    stops = [candidates([*PROMPT, first], 1)[0][0], candidates(PROMPT, 2)[1][0]]
    params = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    engine.add("r", PROMPT, 8, {"beam_width": 2, "stop_token_ids": stops, **params})
    engine.run()
    assert beams_of(engine, "r") == expected(PROMPT, 8, 2, frozenset(stops), **params)
    if length_penalty <= 1.0:  # otherwise the longest hypotheses have the best scores
        assert {beam.stop_token_id for beam in engine.last("r").beams or []} & set(stops)


def test_eos_ends_a_hypothesis_unless_it_is_ignored() -> None:
    for ignore_eos in (True, False):
        engine = Engine()
        eos = candidates(PROMPT, 1)[0][0]
        engine.scheduler.state.stop_rules.eos_token_ids = frozenset([eos])
        engine.add("r", PROMPT, 4, {"beam_width": 2, "ignore_eos": ignore_eos})
        engine.run()
        assert beams_of(engine, "r") == expected(
            PROMPT, 4, 2, frozenset() if ignore_eos else frozenset([eos])
        )


def test_beams_run_with_other_requests_within_the_budget() -> None:
    engine = Engine(budget=4, max_num_seqs=4)
    engine.add("r", PROMPT, 6, {"beam_width": 3})
    engine.add("single", [5, 6], 9)
    engine.run()
    assert beams_of(engine, "r") == expected(PROMPT, 6, 3)
    assert len(engine.text("single")) == 9


def test_a_search_counts_as_many_sequences_as_it_has_beams() -> None:
    engine = Engine(max_num_seqs=4)
    engine.add("r", PROMPT, 6, {"beam_width": 3})
    engine.add("a", [5], 4)
    engine.add("b", [6], 4)
    engine.step()
    assert len(engine.scheduler.state.running) == 2
    engine.run()
    assert len(engine.text("b")) == 4
    with pytest.raises(RequestRefusedError, match="beam_width=5 exceeds the 4") as refused:
        engine.add("wide", PROMPT, 6, {"beam_width": 5})
    assert refused.value.code is ErrorCode.INVALID


@pytest.mark.parametrize("preemption_mode", ["auto", "recompute"])
def test_a_preempted_search_finds_the_same_beams(preemption_mode) -> None:
    engine = Engine(num_blocks=14, num_swap_blocks=24, preemption_mode=preemption_mode)
    engine.add("first", [50] * 8, 36, priority=-1)
    engine.step()
    engine.add("r", PROMPT, 16, {"beam_width": 4})
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_swapped_out_blocks > 0) == (preemption_mode == "auto")
    assert beams_of(engine, "r") == expected(PROMPT, 16, 4)
    assert engine.kv.num_free_blocks == 14
    assert engine.kv.swap_pool.num_free_blocks == 24


@pytest.mark.parametrize(
    ("first", "length"), [(4, 7), (4, 9), (6, 8), (7, 4), (8, 5), (8, 10), (10, 6)]
)
def test_a_search_swapped_out_while_its_step_is_in_flight_finds_the_same_beams(
    first, length
) -> None:
    engine = Engine(num_blocks=12, num_swap_blocks=24)
    engine.add("first", [50] * first, 28, priority=-1)
    engine.schedule()  # from now on two steps are in flight
    prompt = list(range(1, length + 1))
    engine.add("r", prompt, 16, {"beam_width": 4})
    swapped_in_flight = False
    while engine.scheduler.state.requests:
        step = engine.schedule()
        before = engine.in_flight[-2][0].num_scheduled_tokens
        swapped_in_flight |= bool(step.swap_out) and any(name.startswith("r#") for name in before)
        engine.update()
    assert swapped_in_flight
    assert beams_of(engine, "r") == expected(prompt, 16, 4)


def test_a_search_that_uses_all_kv_blocks_ends_with_an_error() -> None:
    engine = Engine(num_blocks=6)
    engine.add("r", PROMPT, 12, {"beam_width": 4})
    engine.run()
    assert engine.last("r").error_code is ErrorCode.LENGTH
    assert "beam_width=4 has used up all 6 KV blocks" in engine.last("r").error
    assert engine.kv.num_free_blocks == 6


def test_a_search_whose_first_tokens_do_not_fit_is_refused() -> None:
    engine = Engine(num_blocks=6)
    with pytest.raises(
        RequestRefusedError,
        match=r"10 prompt and generated tokens.* 5 beams, need 7 KV blocks.* has 6",
    ) as refused:
        engine.add("r", PROMPT, 4, {"beam_width": 5})
    assert refused.value.code is ErrorCode.LENGTH


def test_an_aborted_search_frees_its_blocks_and_worker_sequences() -> None:
    engine = Engine()
    engine.add("r", PROMPT, 12, {"beam_width": 4})
    for _ in range(4):
        engine.step()
    engine.scheduler.abort_requests(["r"])
    assert engine.kv.num_free_blocks == 32
    engine.add("next", [1], 2)
    engine.run()
    assert list(engine.runner.sequences) == ["next"], "the worker still has the beams"


def test_beams_report_the_logprobs_of_their_tokens() -> None:
    engine = Engine()
    engine.add("r", PROMPT, 3, {"beam_width": 2, "logprobs": 1})
    engine.run()
    for beam in engine.last("r").beams or []:
        assert [entry.token_id for entry in beam.logprobs] == beam.token_ids
        assert sum(entry.logprob for entry in beam.logprobs) == pytest.approx(
            beam.cumulative_logprob
        )
        assert all(len(entry.top) == 1 for entry in beam.logprobs)


def test_a_request_id_that_could_be_that_of_a_beam_is_refused() -> None:
    engine = Engine()
    engine.add("r", PROMPT, 3, {"beam_width": 2})
    with pytest.raises(RequestRefusedError, match="r#1 could be the id of a beam") as refused:
        engine.add("r#1", [1, 2], 3)
    assert refused.value.code is ErrorCode.INVALID
    engine.add("s#1", [1, 2], 3)
    with pytest.raises(RequestRefusedError, match="s could be the id of a beam"):
        engine.add("s", PROMPT, 3, {"beam_width": 2})
    engine.add("s", PROMPT, 3)
    engine.add("r#x", [1, 2], 3)
    engine.run()
    assert beams_of(engine, "r") == expected(PROMPT, 3, 2)
    engine.add("r#1", [1, 2], 3)
    engine.run()
    assert engine.text("r#1") == engine.text("s#1")


@pytest.mark.parametrize("budget", [1, 2, 3, 5])
@pytest.mark.parametrize("num_blocks", [7, 8, 10])
def test_a_search_wider_than_the_budget_leaks_no_blocks(budget, num_blocks) -> None:
    engine = Engine(budget=max(budget, 4), num_blocks=num_blocks, prefix_caching=False)
    engine.add("other", [5, 6, 7], 8)
    engine.add("r", PROMPT, 6, {"beam_width": 4})
    engine.scheduler.max_num_batched_tokens = budget  # the batch still holds the 4 beams
    engine.run()
    assert engine.text("other")
    last = engine.last("r")
    if last.error_code is None:
        assert beams_of(engine, "r") == expected(PROMPT, 6, 4)
    else:
        assert "has used up all" in last.error
    assert engine.kv.num_free_blocks == num_blocks


def test_a_preempted_search_waits_until_it_has_the_blocks_to_progress() -> None:
    engine = Engine(num_blocks=12, prefix_caching=False, max_num_seqs=8, budget=32)
    engine.add("long", [7] * 4, 28)  # grows to 8 of the 12 blocks
    engine.add("r", PROMPT, 12, {"beam_width": 4})
    engine.run()
    assert beams_of(engine, "r") == expected(PROMPT, 12, 4)
    assert len(engine.text("long")) == 28
    stats = engine.scheduler.stats()
    assert 0 < stats.num_preemptions <= 3, (
        "the search was resumed as soon as its prompt fitted, and preempted again"
    )
