"""Preemption: tables of the requests that lose their memory, and of those that resume."""

from __future__ import annotations

from typing import Any

import pytest

from baton_engine.scheduling.decisions import Finished, Preempted, SwappedIn, SwappedOut
from baton_engine.scheduling.preemption import Preemptor
from support.engine.scheduling.filled_state import (
    SAMPLE,
    Spec,
    decided,
    fill_state,
    loaded,
    running,
    swapped,
    waiting,
)

Decided = tuple[Any, ...] | None

#: Requests in the order of arrival, the request that needs memory, and the decision.
VICTIMS: dict[str, tuple[list[Spec], str, Decided]] = {
    "the last running request is preempted": (
        [running("a"), running("b"), running("c")], "a", (Preempted, "c"),
    ),
    "a request with a lower priority value comes before earlier ones": (
        [running("a"), running("b", priority=-1)], "b", (Preempted, "a"),
    ),
    "the last request preempts itself": (
        [running("a"), running("b")], "b", (Preempted, "b"),
    ),
    "a running request behind is preempted before a loaded one": (
        [running("a"), running("b"), loaded("c")], "a", (Preempted, "b"),
    ),
    "the last running request preempts a loaded one behind it": (
        [running("a"), loaded("b")], "a", (Preempted, "b"),
    ),
    "of the loaded requests, the last in order is preempted": (
        [running("a"), loaded("b", priority=1), loaded("c", priority=3), loaded("d", priority=2)],
        "a", (Preempted, "c"),
    ),
    "a loaded request in front keeps its memory": (
        [loaded("a"), running("b")], "b", (Preempted, "b"),
    ),
    "a request whose blocks a peer reads is skipped": (
        [running("a"), running("b"), running("c", produces=True)], "a", (Preempted, "b"),
    ),
    "a request preempts itself if peers read the blocks of all behind it": (
        [running("a"), running("b", produces=True)], "a", (Preempted, "a"),
    ),
    "a request whose blocks a peer reads waits if it is the last": (
        [running("a"), running("b", produces=True)], "b", None,
    ),
    "a request whose blocks a peer reads preempts a loaded one behind it": (
        [running("a", produces=True), loaded("b")], "a", (Preempted, "b"),
    ),
    "a beam search that holds all memory ends": (
        [running("a", beam_width=2)], "a", (Finished, "a"),
    ),
    "a beam search preempts itself if another request holds memory": (
        [running("a"), running("b", beam_width=2)], "b", (Preempted, "b"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("specs", "needs", "expected"), VICTIMS.values(), ids=VICTIMS.keys())
def test_preemption_takes_the_memory_of_the_last_request_that_can_lose_it(
    specs: list[Spec], needs: str, expected: Decided
) -> None:
    state = fill_state(specs, preemption_mode="recompute")
    assert decided(Preemptor(state).preempt_for(state.requests[needs])) == expected


SAMPLES = [running("a"), running("s1", **SAMPLE), running("s2", **SAMPLE)]

#: Mode, blocks in host memory, requests, the request that needs memory, and the decision.
SWAPS: dict[str, tuple[str, int, list[Spec], str, Decided]] = {
    "mode swap: a request is swapped out": (
        "swap", 2, [running("a"), running("b")], "a", (SwappedOut, "b"),
    ),
    "mode swap: a request that does not fit in host memory is preempted": (
        "swap", 1, [running("a"), running("b")], "a", (Preempted, "b"),
    ),
    "mode swap: the last request swaps itself out": (
        "swap", 2, [running("a"), running("b")], "b", (SwappedOut, "b"),
    ),
    "mode swap: a loaded request is preempted": (
        "swap", 2, [running("a"), loaded("b")], "a", (Preempted, "b"),
    ),
    "mode recompute: samples of a prompt are preempted one by one": (
        "recompute", 16, SAMPLES, "a", (Preempted, "s2"),
    ),
    "mode auto: a single sequence is preempted": (
        "auto", 16, [running("a"), running("b")], "a", (Preempted, "b"),
    ),
    "mode auto: the running samples of a prompt are swapped out together": (
        "auto", 4, SAMPLES, "a", (SwappedOut, "s1", "s2"),
    ),
    "mode auto: samples that do not all fit in host memory are preempted one by one": (
        "auto", 3, SAMPLES, "a", (Preempted, "s2"),
    ),
    "mode auto: a block that samples share needs one block in host memory": (
        "auto", 2, [*SAMPLES[:2], running("s2", shares="s1", **SAMPLE)], "a",
        (SwappedOut, "s1", "s2"),
    ),
    "mode auto: the only running sample of a prompt is preempted": (
        "auto", 16, [*SAMPLES[:2], waiting("s2", **SAMPLE)], "a", (Preempted, "s1"),
    ),
    "mode auto: a sample preempts another one of its prompt without a swap": (
        "auto", 16, SAMPLES, "s1", (Preempted, "s2"),
    ),
    "mode auto: a beam search is swapped out": (
        "auto", 2, [running("a"), running("b", beam_width=2)], "a", (SwappedOut, "b"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "num_swap_blocks", "specs", "needs", "expected"), SWAPS.values(), ids=SWAPS.keys()
)
def test_preemption_swaps_out_if_the_mode_and_the_host_memory_allow_it(
    mode: str, num_swap_blocks: int, specs: list[Spec], needs: str, expected: Decided
) -> None:
    state = fill_state(specs, num_swap_blocks=num_swap_blocks, preemption_mode=mode)
    assert decided(Preemptor(state).preempt_for(state.requests[needs])) == expected


#: Requests, arguments of `fill_state`, and the first decision. "a" needs two blocks.
RESUMED: dict[str, tuple[list[Spec], dict[str, Any], Decided]] = {
    "the first swapped request in order is resumed": (
        [swapped("a"), swapped("b", priority=-1)], {}, (SwappedIn, "b"),
    ),
    "samples that were swapped out together are resumed together": (
        [swapped("s1", **SAMPLE), swapped("s2", **SAMPLE)], {}, (SwappedIn, "s1", "s2"),
    ),
    "a request with a step in flight waits and is not overtaken": (
        [swapped("a", num_in_flight=1), swapped("b")], {}, None,
    ),
    "a request waits for a place in the batch": (
        [running("x"), swapped("a")], {"max_num_seqs": 1}, None,
    ),
    "a beam search waits for a place for each beam": (
        [running("x"), swapped("a", beam_width=2)], {"max_num_seqs": 2}, None,
    ),
    "a beam search is resumed if each beam has a place": (
        [running("x"), swapped("a", beam_width=2)], {"max_num_seqs": 3}, (SwappedIn, "a"),
    ),
    "beside running requests, the watermark and a block to grow stay free": (
        [running("x"), swapped("a")], {"watermark_blocks": 3, "num_free": 6}, (SwappedIn, "a"),
    ),
    "beside running requests, a request waits with one free block less": (
        [running("x"), swapped("a")], {"watermark_blocks": 3, "num_free": 5}, None,
    ),
    "without running requests, only a block to grow stays free": (
        [swapped("a")], {"watermark_blocks": 3, "num_free": 3}, (SwappedIn, "a"),
    ),
    "without running requests, a request waits with one free block less": (
        [swapped("a")], {"watermark_blocks": 3, "num_free": 2}, None,
    ),
    "a request that fills the whole memory is resumed": (
        [swapped("a", num_tokens=64)], {}, (SwappedIn, "a"),
    ),
    "a block that samples share is needed once": (
        [swapped("s1", **SAMPLE), swapped("s2", shares="s1", **SAMPLE)], {"num_free": 4},
        (SwappedIn, "s1", "s2"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("specs", "options", "expected"), RESUMED.values(), ids=RESUMED.keys())
def test_swapped_requests_are_resumed_in_order(
    specs: list[Spec], options: dict[str, Any], expected: Decided
) -> None:
    preemptor = Preemptor(fill_state(specs, **options))
    assert decided(next(preemptor.resume(), None)) == expected
