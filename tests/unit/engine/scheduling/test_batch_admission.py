"""Admission: tables of the waiting requests that join the batch, and of the loads that start."""

from __future__ import annotations

from typing import Any

import pytest

from baton_engine.scheduling.batch_admission import BatchAdmission
from baton_engine.scheduling.decisions import (
    Admitted,
    LoadStarted,
    Preempted,
    WaitsForPrompt,
)
from baton_engine.scheduling.scheduler_state import SchedulerState
from baton_engine.scheduling.step.builder import StepBuilder
from support.engine.scheduling.filled_state import (
    SAMPLE,
    Spec,
    decided,
    fill_state,
    loaded,
    loading,
    running,
    swapped,
    to_load,
    waiting,
)

Decided = tuple[Any, ...] | None
#: Requests in the order of arrival, arguments of `fill_state`, and the first decision.
Cases = dict[str, tuple[list[Spec], dict[str, Any], Decided]]

#: A request needs two blocks for its 8 tokens.
ADMITTED: Cases = {
    # The order, and places in the batch.
    "the first waiting request in order joins": (
        [waiting("a"), waiting("b", priority=-1)], {}, (Admitted, "b"),
    ),
    "a first request that does not fit is not overtaken": (
        [waiting("a"), waiting("b", num_tokens=4)], {"num_free": 1}, None,
    ),
    "no request joins a full batch": (
        [running("x"), waiting("a")], {"max_num_seqs": 1}, None,
    ),
    "a beam search waits for a place for each beam": (
        [running("x"), waiting("a", beam_width=2)], {"max_num_seqs": 2}, None,
    ),
    # Memory.
    "without running requests, a request takes all free blocks": (
        [waiting("a")], {"watermark_blocks": 1, "num_free": 2}, (Admitted, "a"),
    ),
    "beside running requests, the watermark stays free": (
        [running("x"), waiting("a")], {"watermark_blocks": 1, "num_free": 2}, None,
    ),
    "beside running requests, a request takes all blocks above the watermark": (
        [running("x"), waiting("a")], {"watermark_blocks": 1, "num_free": 3}, (Admitted, "a"),
    ),
    "cached blocks in use need no free block": (
        [running("a1"), waiting("a2", num_tokens=9)], {"num_free": 1}, (Admitted, "a2"),
    ),
    "a request with prompt_logprobs uses no cached blocks": (
        [running("a1"), waiting("a2", num_tokens=9, prompt_logprobs=0)], {"num_free": 1}, None,
    ),
    "a fully cached prompt needs a block of its own for its last token": (
        [running("a1"), waiting("a2")], {"num_free": 0}, None,
    ),
    "a fully cached prompt shares all blocks but the last": (
        [running("a1"), waiting("a2")], {"num_free": 1}, (Admitted, "a2"),
    ),
    "a preempted beam search waits for the blocks that it had": (
        [waiting("a", beam_width=2, num_blocks_wanted=6)], {"num_free": 5}, None,
    ),
    "a preempted beam search joins when it can have its blocks again": (
        [waiting("a", beam_width=2, num_blocks_wanted=6)], {"num_free": 6}, (Admitted, "a"),
    ),
    # Samples of one prompt.
    "a sample waits while another one computes the prompt": (
        [running("s1", num_computed=4, **SAMPLE), waiting("s2", **SAMPLE)], {},
        (WaitsForPrompt, "s2"),
    ),
    "a sample shares the prompt of another one, except the block of the last token": (
        [running("s1", **SAMPLE), waiting("s2", **SAMPLE)], {"num_free": 1},
        (Admitted, "s2", "s1"),
    ),
    "a sample waits for a block for the last token": (
        [running("s1", **SAMPLE), waiting("s2", **SAMPLE)], {"num_free": 0}, None,
    ),
    "a sample shares the prompt of one that has loaded it": (
        [loaded("s1", **SAMPLE), waiting("s2", **SAMPLE)], {}, (Admitted, "s2", "s1"),
    ),
    "a sample with prompt_logprobs computes the prompt again": (
        [running("s1", **SAMPLE), waiting("s2", prompt_logprobs=0, **SAMPLE)], {},
        (Admitted, "s2"),
    ),
}  # fmt: skip

#: A load reserves a block for the next token: three blocks in all.
LOADS: Cases = {
    "an earlier load starts before a waiting request": (
        [to_load("l"), waiting("a")], {}, (LoadStarted, "l"),
    ),
    "an earlier waiting request joins before a load": (
        [waiting("a"), to_load("l")], {}, (Admitted, "a"),
    ),
    "a load needs no place in the batch": (
        [running("x"), to_load("l")], {"max_num_seqs": 1}, (LoadStarted, "l"),
    ),
    "a load starts while an earlier request waits for a place": (
        [running("x"), waiting("a"), to_load("l")], {"max_num_seqs": 1, "num_free": 5},
        (LoadStarted, "l"),
    ),
    "a load leaves the blocks of this earlier request free": (
        [running("x"), waiting("a"), to_load("l")], {"max_num_seqs": 1, "num_free": 4}, None,
    ),
    "a load takes all blocks if no sequence can grow": (
        [to_load("l")], {"num_free": 3}, (LoadStarted, "l"),
    ),
    "a load leaves a block to each sequence that runs, loads or has loaded": (
        [running("x"), loading("y"), loaded("z"), to_load("l")], {"num_free": 6},
        (LoadStarted, "l"),
    ),
    "a load waits if one of these sequences would have no block": (
        [running("x"), loading("y"), loaded("z"), to_load("l")], {"num_free": 5}, None,
    ),
    "a load needs no blocks for a prompt that is cached, its last token included": (
        [running("l1"), to_load("l2")], {"num_free": 2}, (LoadStarted, "l2"),
    ),
}  # fmt: skip


def first_admission(state: SchedulerState, step: StepBuilder) -> Decided:
    return decided(next(BatchAdmission(state).admit(step), None))


@pytest.mark.parametrize(
    ("specs", "options", "expected"),
    [*ADMITTED.values(), *LOADS.values()],
    ids=[*ADMITTED.keys(), *LOADS.keys()],
)
def test_the_request_that_starts_next(
    specs: list[Spec], options: dict[str, Any], expected: Decided
) -> None:
    state = fill_state(specs, **options)
    assert first_admission(state, StepBuilder(state.kv, state.worker, 0, budget=16)) == expected


def test_without_token_budget_only_loads_start() -> None:
    for specs, expected in (
        ([waiting("a")], None),
        ([waiting("a"), to_load("l")], (LoadStarted, "l")),
    ):
        state = fill_state(specs)
        assert first_admission(state, StepBuilder(state.kv, state.worker, 0, budget=0)) == expected


@pytest.mark.parametrize(
    ("enable_chunked_prefill", "others_run", "expected"),
    [(True, True, (Admitted, "a")), (False, True, None), (False, False, (Admitted, "a"))],
    ids=["a chunk beside others", "no whole prompt beside others", "a whole prompt alone"],
)
def test_a_prompt_that_exceeds_the_budget_of_the_step(
    enable_chunked_prefill: bool, others_run: bool, expected: Decided
) -> None:
    state = fill_state(
        [running("x", num_computed=7), waiting("a")], enable_chunked_prefill=enable_chunked_prefill
    )
    step = StepBuilder(state.kv, state.worker, 0, budget=7)
    if others_run:
        step.run(state.requests["x"], 1)
    assert first_admission(state, step) == expected


LOADED: Cases = {
    "a loaded request joins": ([loaded("l")], {}, (Admitted, "l")),
    "the first loaded request in order joins": (
        [loaded("k"), loaded("l", priority=-1)], {}, (Admitted, "l"),
    ),
    "no loaded request joins a full batch": (
        [running("x"), loaded("l")], {"max_num_seqs": 1}, None,
    ),
    "an earlier waiting request joins first": (
        [waiting("a"), loaded("l")], {}, (Admitted, "a"),
    ),
    "a later waiting request does not join first": (
        [loaded("l"), waiting("a")], {}, (Admitted, "l"),
    ),
    "an earlier waiting request without memory does not delay loaded ones": (
        [waiting("a"), loaded("l")], {"num_free": 1}, (Admitted, "l"),
    ),
    "an earlier beam search keeps the places that are free, until it has enough": (
        [running("x"), waiting("a", beam_width=2), loaded("l")], {"max_num_seqs": 2}, None,
    ),
    "a waiting request behind one that will load does not join first": (
        [to_load("k"), waiting("a"), loaded("l")], {}, (Admitted, "l"),
    ),
    "while requests are swapped out, no waiting request joins first": (
        [swapped("s"), waiting("a"), loaded("l")], {}, (Admitted, "l"),
    ),
    "a loaded request gets a block for the tokens that exceed its blocks": (
        [loaded("l", num_more_tokens=1)], {"num_free": 1}, (Admitted, "l"),
    ),
    "a loaded request without such a block is preempted": (
        [loaded("l", num_more_tokens=1)], {"num_free": 0}, (Preempted, "l"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("specs", "options", "expected"), LOADED.values(), ids=LOADED.keys())
def test_loaded_requests_join_in_order(
    specs: list[Spec], options: dict[str, Any], expected: Decided
) -> None:
    state = fill_state(specs, **options)
    step = StepBuilder(state.kv, state.worker, 0, budget=16)
    assert decided(next(BatchAdmission(state).admit_loaded(step), None)) == expected


def test_without_token_budget_no_loaded_request_joins() -> None:
    state = fill_state([loaded("l")])
    step = StepBuilder(state.kv, state.worker, 0, budget=0)
    assert list(BatchAdmission(state).admit_loaded(step)) == []
