"""Running requests: tables of the tokens that they get, and of the requests that yield memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from baton_engine.executor.step import SchedulerOutput
from baton_engine.scheduling.decisions import Finished, Preempted, SwappedOut
from baton_engine.scheduling.preemption import Preemptor
from baton_engine.scheduling.request import Request, RequestStatus
from baton_engine.scheduling.scheduler import Scheduler
from baton_engine.scheduling.scheduler_state import PauseState, SchedulerState
from baton_engine.scheduling.step import in_flight
from support.engine.scheduling.filled_state import (
    Spec,
    decided,
    fill_state,
    running,
    waiting,
)

#: The last of 8 tokens is not computed, and has a place in an allocated block.
decode = partial(running, num_computed=7)
#: The ninth token is not computed, and needs a new block.
growing = partial(running, num_more_tokens=1)
#: No token of the prompt is computed. All its blocks are allocated.
prompt = partial(running, num_computed=0)

#: The target of the prompt budget, see `schedule`.
TARGET_S = 0.05

#: Token counts in the order in which the step got them.
Tokens = dict[str, int]
#: Decisions in the order in which they were made, as `decided` describes them.
Decisions = list[tuple[Any, ...]]
#: Requests in the order of arrival, arguments of `schedule`, and the tokens of each sequence.
Cases = dict[str, tuple[list[Spec], dict[str, Any], Tokens]]

BUDGET: Cases = {
    "each decode gets one token": (
        [decode("a"), decode("b")], {}, {"a": 1, "b": 1},
    ),
    "decodes come before an earlier prompt, which gets the tokens that they leave": (
        [prompt("a", 20), decode("b"), decode("c")], {"budget": 10}, {"b": 1, "c": 1, "a": 8},
    ),
    "the first prompt takes the budget before the next one": (
        [prompt("a", 6), prompt("b", 20), prompt("c", 6)], {"budget": 10}, {"a": 6, "b": 4},
    ),
    "a prompt with a lower priority value comes first": (
        [prompt("a", 8), prompt("b", 8, priority=-1)], {"budget": 10}, {"b": 8, "a": 2},
    ),
    "of more decodes than tokens, the first in order run": (
        [decode("a"), decode("b"), decode("c", priority=-1)], {"budget": 2}, {"c": 1, "a": 1},
    ),
    "a request with two tokens left is no decode": (
        [running("a", num_computed=6), decode("b")], {"budget": 2}, {"b": 1, "a": 1},
    ),
    "without budget no request runs": (
        [decode("a"), prompt("b")], {"budget": 0}, {},
    ),
}  # fmt: skip

#: The limit of the prompt budget is 16 tokens.
PROMPT_BUDGET: Cases = {
    "beside a decode, the prompt budget limits a prompt": (
        [decode("a"), prompt("b", 30)], {"budget": 40, "prompt_limit": 16}, {"a": 1, "b": 16},
    ),
    "several prompts share the prompt budget": (
        [decode("a"), prompt("b", 10), prompt("c", 10)], {"budget": 40, "prompt_limit": 16},
        {"a": 1, "b": 10, "c": 6},
    ),
    "the rest of the step's budget is the limit if it is smaller": (
        [decode("a"), prompt("b", 30)], {"budget": 9, "prompt_limit": 16}, {"a": 1, "b": 8},
    ),
    "without decodes, a prompt gets the whole budget": (
        [prompt("b", 30)], {"budget": 40, "prompt_limit": 16}, {"b": 30},
    ),
    "a decode in flight counts, because the step delays its next token": (
        [decode("a"), prompt("b", 30)],
        {"budget": 40, "prompt_limit": 16, "runs": {"a": 1}}, {"b": 16},
    ),
    "a prompt in flight does not count": (
        [prompt("a", 20), prompt("b", 30)],
        {"budget": 40, "prompt_limit": 16, "runs": {"a": 4}}, {"b": 30},
    ),
    "without a target, prompts have no limit": (
        [decode("a"), prompt("b", 30)], {"budget": 40}, {"a": 1, "b": 30},
    ),
}  # fmt: skip

#: A prompt gets at most the threshold while a shorter prompt waits.
LONG_PREFILL: Cases = {
    "a long prompt alone gets the budget": (
        [prompt("a", 20)], {"long_prefill_token_threshold": 4}, {"a": 16},
    ),
    "a long prompt lets a shorter running one pass": (
        [prompt("a", 20), prompt("b", 6)], {"long_prefill_token_threshold": 4},
        {"a": 4, "b": 6},
    ),
    "a shorter prompt that this step runs whole no longer waits": (
        [prompt("a", 6), prompt("b", 20)], {"long_prefill_token_threshold": 4},
        {"a": 6, "b": 10},
    ),
    "a long prompt leaves tokens for a shorter waiting one": (
        [prompt("a", 20), waiting("b", 6)], {"long_prefill_token_threshold": 4}, {"a": 4},
    ),
    "a waiting prompt of the same length is not shorter": (
        [prompt("a", 20), waiting("b", 20)], {"long_prefill_token_threshold": 4}, {"a": 16},
    ),
    "only the first waiting prompt counts": (
        [prompt("a", 20), waiting("b", 20), waiting("c", 6)],
        {"long_prefill_token_threshold": 4}, {"a": 16},
    ),
    "the uncomputed tokens count, not the whole prompt": (
        [running("a", 20, num_computed=16), waiting("b", 6)],
        {"long_prefill_token_threshold": 2}, {"a": 4},
    ),
    "a budget below the threshold is the limit": (
        [prompt("a", 20), waiting("b", 6)], {"long_prefill_token_threshold": 4, "budget": 3},
        {"a": 3},
    ),
}  # fmt: skip

#: `runs` names the tokens that a step in flight runs.
IN_FLIGHT: Cases = {
    "a decode in flight waits for its token": (
        [decode("a"), decode("b")], {"runs": {"a": 1}}, {"b": 1},
    ),
    "a prompt chunk in flight delays the next chunk": (
        [prompt("a", 12)], {"runs": {"a": 4}}, {},
    ),
    "asynchronous: the next chunk of a prompt in flight runs": (
        [prompt("a", 12)], {"runs": {"a": 4}, "async_scheduling": True}, {"a": 8},
    ),
    "asynchronous: a decode runs ahead of the token in flight": (
        [decode("a")], {"runs": {"a": 1}, "async_scheduling": True}, {"a": 1},
    ),
    "asynchronous: one token below max_model_len still runs": (
        [running("a", 62, num_computed=61)], {"runs": {"a": 1}, "async_scheduling": True},
        {"a": 1},
    ),
    "asynchronous: the token in flight may be the last one of max_model_len": (
        [running("a", 63, num_computed=62)], {"runs": {"a": 1}, "async_scheduling": True}, {},
    ),
    "asynchronous: a hand-over waits for its token": (
        [decode("a", produces=True)], {"runs": {"a": 1}, "async_scheduling": True}, {},
    ),
}  # fmt: skip

#: A search of width 2. Each beam needs a block for its ninth token.
BEAMS: Cases = {
    "each beam gets one token": (
        [running("a", beam_width=2)], {}, {"a#0": 1, "a#1": 1},
    ),
    "beams that do not fit in the budget need no memory yet": (
        [running("a", beam_width=2)], {"budget": 1, "num_free": 1}, {"a#0": 1},
    ),
    "the beams that have not run follow in the next step": (
        [running("a", beam_width=2)], {"runs": {"a#0": 1}}, {"a#1": 1},
    ),
    "of two beams that share a block, one needs a copy": (
        [running("a", 7, beam_width=2)], {"num_free": 1}, {"a#0": 1, "a#1": 1},
    ),
}  # fmt: skip


@pytest.fixture
def preemptions(monkeypatch: pytest.MonkeyPatch) -> Decisions:
    """Return the list to which every decision of the preemptor about a running request is added."""
    made: Decisions = []
    preempt_for = Preemptor.preempt_for

    def record(self: Preemptor, request: Request) -> Any:
        decision = preempt_for(self, request)
        if decision is not None:
            made.append(decided(decision) or ())
        return decision

    monkeypatch.setattr(Preemptor, "preempt_for", record)
    return made


def schedule(
    specs: list[Spec],
    *,
    budget: int = 16,
    prompt_limit: int | None = None,
    runs: dict[str, int] | None = None,
    **options: Any,
) -> SchedulerOutput:
    """Return the next step, which admits no request.

    Args:
        specs: the requests in the order of arrival.
        budget: tokens of the step.
        prompt_limit: limit of the prompt budget, with a target of TARGET_S. None: no target.
        runs: by sequence, the tokens that an earlier step still runs.
        **options: further arguments of `fill_state`.
    """
    target_s = TARGET_S if prompt_limit is not None else 0.0
    state = fill_state(specs, target_itl_s=target_s, max_num_batched_tokens=budget, **options)
    if prompt_limit is not None:
        state.prompt_budget.observe(prompt_limit, num_decodes=0, seconds=TARGET_S)
    for name, num_tokens in (runs or {}).items():
        in_flight.count_scheduled(find_sequence(state, name), num_tokens)
    return admitting_none(state).schedule()


def admitting_none(state: SchedulerState) -> Scheduler:
    scheduler = Scheduler(state)
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    return scheduler


def find_sequence(state: SchedulerState, name: str) -> Request:
    """Return the request or beam of this id."""
    sequences = [each for request in state.requests.values() for each in request.sequences]
    return next(sequence for sequence in sequences if sequence.request_id == name)


def tokens_of(step: SchedulerOutput) -> list[tuple[str, int]]:
    return list(step.num_scheduled_tokens.items())


TABLES = {**BUDGET, **PROMPT_BUDGET, **LONG_PREFILL, **IN_FLIGHT, **BEAMS}


@pytest.mark.parametrize(("specs", "options", "expected"), TABLES.values(), ids=TABLES.keys())
def test_the_tokens_that_running_requests_get(
    specs: list[Spec], options: dict[str, Any], expected: Tokens, preemptions: Decisions
) -> None:
    step = schedule(specs, **options)
    assert tokens_of(step) == list(expected.items())
    assert preemptions == []


#: Requests in the order of arrival, arguments of `schedule`, the decisions, the tokens of each
#: sequence and the number of block copies.
MEMORY: dict[str, tuple[list[Spec], dict[str, Any], Decisions, Tokens, int]] = {
    "a decode with a place in its block needs no free block": (
        [decode("a"), decode("b")], {"num_free": 0}, [], {"a": 1, "b": 1}, 0,
    ),
    "a decode takes a free block": (
        [growing("a"), decode("b")], {"num_free": 1}, [], {"a": 1, "b": 1}, 0,
    ),
    "a decode without a free block preempts the last request": (
        [growing("a"), decode("b"), decode("c")], {"num_free": 0},
        [(Preempted, "c")], {"a": 1, "b": 1}, 0,
    ),
    "a prompt that is preempted for a decode gets no tokens": (
        [growing("a"), prompt("b")], {"num_free": 0}, [(Preempted, "b")], {"a": 1}, 0,
    ),
    "of two decodes and one free block, the first gets the block": (
        [growing("a"), growing("b")], {"num_free": 1}, [(Preempted, "b")], {"a": 1}, 0,
    ),
    "preemptions go on until one frees a block that no other request uses": (
        [growing("a"), decode("b"), decode("c", shares="b")], {"num_free": 0},
        [(Preempted, "c"), (Preempted, "b")], {"a": 1}, 0,
    ),
    "a decode whose blocks a peer reads waits for memory, and others run": (
        [decode("a"), growing("b", produces=True), decode("c", produces=True)], {"num_free": 0},
        [], {"a": 1, "c": 1}, 0,
    ),
    "a decode copies a shared block, and the last user of the block writes in place": (
        [decode("a"), decode("b", shares="a")], {"num_free": 1}, [], {"a": 1, "b": 1}, 1,
    ),
    "a decode that cannot copy a shared block preempts the other user": (
        [decode("a"), decode("b", shares="a")], {"num_free": 0}, [(Preempted, "b")], {"a": 1}, 0,
    ),
    "a beam search runs no beam unless there is memory for all": (
        [running("a", beam_width=2)], {"num_free": 1}, [(SwappedOut, "a")], {}, 0,
    ),
    "a beam search preempts later requests until all beams have memory": (
        [running("a", beam_width=2), decode("b")], {"num_free": 1},
        [(Preempted, "b")], {"a#0": 1, "a#1": 1}, 0,
    ),
    "a beam search that holds all memory ends": (
        [running("a", 60, beam_width=2)], {}, [(Finished, "a")], {}, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("specs", "options", "decisions", "expected", "num_copies"), MEMORY.values(), ids=MEMORY.keys()
)
def test_the_requests_that_yield_memory_to_decodes(
    specs: list[Spec],
    options: dict[str, Any],
    decisions: Decisions,
    expected: Tokens,
    num_copies: int,
    preemptions: Decisions,
) -> None:
    step = schedule(specs, **options)
    assert preemptions == decisions
    assert tokens_of(step) == list(expected.items())
    assert len(step.block_copies) == num_copies


def test_the_first_beam_computes_the_prompt_in_chunks(preemptions: Decisions) -> None:
    state = fill_state([waiting("a", beam_width=2)], max_num_batched_tokens=5)
    search = state.requests["a"]
    state.queues.waiting.discard(search)
    assert state.kv.allocate(search.sequences[0], search.num_tokens)
    search.status = RequestStatus.RUNNING
    state.running.add(search)
    step = admitting_none(state).schedule()
    assert (tokens_of(step), preemptions) == ([("a#0", 5)], [])


def test_each_step_collects_the_prompts_again(preemptions: Decisions) -> None:
    state = fill_state([prompt("a", 12)], async_scheduling=True, max_num_batched_tokens=8)
    scheduler = admitting_none(state)
    for num_tokens in (8, 4):
        assert (tokens_of(scheduler.schedule()), preemptions) == ([("a", num_tokens)], [])
