"""Ranks of an expert-parallel group: steps in waves, topology changes between steps, failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from baton_engine.executor.step import ModelRunnerOutput
from baton_protocol.engine_messages import ErrorCode
from baton_protocol.topology import Activity, RankPhase, StartWave
from support.engine.engine_fakes import continuation
from support.engine.ranks.rank_fakes import (
    DEADLINE_S,
    Network,
    Rank,
    commit,
    generation,
    prepare,
)
from support.waiting import eventually

Start = Callable[[int], list[Rank]]


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture
def start(network: Network) -> Iterator[Start]:
    def start_ranks(number: int) -> list[Rank]:
        return [Rank(network, f"rank-{len(network.ranks)}") for _ in range(number)]

    yield start_ranks
    for rank in network.ranks.values():
        rank.stop()
    for rank in network.ranks.values():
        assert rank.error is None, rank.error


def form(ranks: list[Rank]) -> None:
    commit(generation(1, ranks), ranks, serving=ranks)


def begin(ranks: list[Rank], prompt: list[int], num_tokens: int) -> None:
    """Start the request "long" on each of `ranks`, and wait for its first tokens."""
    for rank in ranks:
        rank.add("long", prompt, num_tokens)
        rank.until(lambda rank=rank: len(rank.tokens("long")) > 3, "tokens")


def prompt_of(number: int) -> list[int]:
    return [number + 1] * (1 + 5 * number)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_with_uneven_load_generate_the_text_of_one_engine(start, size) -> None:
    ranks = start(size)
    form(ranks)
    lengths = {}
    for number, rank in enumerate(ranks):
        for index in range(number * 3 + (size == 1)):  # the first of several ranks has no request
            lengths[f"r{number}-{index}"] = (
                rank,
                [7 * number + index + 1] * (1 + 9 * index),
                5 + 7 * index,
            )
    for request_id, (rank, prompt, length) in lengths.items():
        rank.add(request_id, prompt, length)
    for request_id, (rank, prompt, length) in lengths.items():
        assert rank.text(request_id) == continuation(prompt, length, ignore_eos=True)
    if size > 1:
        first = ranks[0].topology()
        assert first.num_steps_without_tokens == first.num_steps > 0, (
            "an idle rank runs dummy batches"
        )


def test_a_wave_ends_without_requests_and_the_next_starts_with_a_request(start, network) -> None:
    ranks = start(3)
    form(ranks)
    for number in range(3):
        ranks[number].add("r", prompt_of(number), 8)
        assert ranks[number].text("r") == continuation(prompt_of(number), 8, ignore_eos=True)
        for rank in ranks:
            rank.wait_wave_end()
        waves = {rank.topology().wave for rank in ranks}
        assert len(waves) == 1, "ranks count waves differently"
    steps = [rank.executor.num_wave_steps for rank in ranks]
    assert len(set(steps)) == 1
    assert all(rank.topology().num_steps == steps[0] for rank in ranks)


def test_a_wave_starts_despite_lost_start_messages_and_ignores_late_ones(start, network) -> None:
    ranks = start(2)
    form(ranks)
    network.lost_starts = 3
    ranks[0].add("a", [1, 2, 3], 6)
    assert ranks[0].text("a") == continuation([1, 2, 3], 6, ignore_eos=True)
    for rank in ranks:
        rank.wait_wave_end()
    steps = ranks[1].executor.num_wave_steps
    for start_wave in (*network.starts, StartWave(7, "unknown", 0)):
        ranks[1].inputs.put(lambda start_wave=start_wave: ranks[1].core.on_start_wave(start_wave))
    ranks[0].add("b", [4], 6)
    assert ranks[0].text("b") == continuation([4], 6, ignore_eos=True)
    ranks[1].wait_wave_end()
    assert ranks[1].executor.num_wave_steps - steps == 6


def test_a_group_grows_during_requests_and_the_new_rank_serves(start) -> None:
    ranks = start(3)
    form(ranks[:2])
    begin(ranks[:2], [1, 2, 3], 240)
    commit(generation(2, ranks), ranks, serving=ranks)
    assert not any(rank.ended("long") for rank in ranks[:2]), "the requests ended before the commit"
    ranks[2].add("new", [9, 8], 30)
    assert ranks[2].text("new") == continuation([9, 8], 30, ignore_eos=True)
    for rank in ranks[:2]:
        assert rank.text("long") == continuation([1, 2, 3], 240, ignore_eos=True)
        assert rank.core.get_stats().num_preemptions == 0, "requests were preempted"
        assert rank.core.ready.data_parallel_size == 3
    assert ranks[2].core.ready.data_parallel_rank == 2


def test_an_idle_group_commits_a_generation_without_running_a_step(start) -> None:
    ranks = start(3)
    form(ranks)
    commit(generation(2, ranks[:2]), ranks, serving=ranks[:2])
    ranks[2].wait_phase(RankPhase.STANDBY)
    assert all(rank.executor.num_wave_steps == 0 for rank in ranks)
    assert all(rank.status().commit_seen == "nonce-2" for rank in ranks)


def test_requests_of_a_removed_rank_end_with_draining_and_can_continue_elsewhere(start) -> None:
    ranks = start(3)
    form(ranks)
    begin(ranks, [5, 6], 240)
    commit(generation(2, [ranks[2], ranks[0]]), ranks, serving=[ranks[0], ranks[2]])
    last = ranks[1].until(lambda: ranks[1].ended("long"), "the end")
    assert last.error_code is ErrorCode.DRAINING
    assert "generation 2 continues without this rank" in last.error
    generated = ranks[1].tokens("long")
    whole = continuation([5, 6], 240, ignore_eos=True)
    assert generated == whole[: len(generated)]
    assert ranks[1].status().phase is RankPhase.STANDBY
    assert ranks[1].executor.generation is None
    ranks[1].add("late", [1])
    assert (
        ranks[1].until(lambda: ranks[1].ended("late"), "a refusal").error_code is ErrorCode.DRAINING
    )
    ranks[0].add("moved", [5, 6], 240, generated_token_ids=generated)
    assert ranks[0].text("moved") == whole[len(generated) :]
    assert ranks[2].text("long") == whole


@pytest.mark.parametrize("where", ["exchange", "step"])
def test_survivors_of_a_lost_rank_keep_their_requests_and_tokens(start, where) -> None:
    ranks = start(3)
    form(ranks)
    for number, rank in enumerate(ranks):
        rank.add("long", prompt_of(number), 120)
        rank.until(lambda rank=rank: len(rank.tokens("long")) > 3, "tokens")
    if where == "step":
        ranks[2].executor.breaks_at_step = ranks[2].executor.num_wave_steps + 3
    else:
        ranks[2].inputs.put(lambda: ranks[2].core._group.abort())
    for rank in ranks[:2]:
        rank.wait_phase(RankPhase.BROKEN)
        assert rank.status().failure
        assert rank.status().generation.number == 1
    ranks[0].add("during the break", [3, 3], 10)
    num_generated = [len(rank.tokens("long")) for rank in ranks[:2]]
    survivors = ranks[:2]
    commit(generation(2, survivors, urgent=True), survivors, serving=survivors)
    for number, rank in enumerate(survivors):
        assert rank.text("long") == continuation(prompt_of(number), 120, ignore_eos=True)
        assert [output.token_offset for output in rank.outputs["long"]] == list(range(120))
        assert rank.core.get_stats().num_preemptions == 0
        assert num_generated[number] < 120
    assert ranks[0].text("during the break") == continuation([3, 3], 10, ignore_eos=True)
    assert ranks[0].status().failure == ""


def test_an_urgent_target_replaces_a_frozen_rank_which_is_dismissed_when_it_wakes(
    start, network
) -> None:
    ranks = start(3)
    form(ranks)
    begin(ranks, [4, 2], 200)
    ranks[1].frozen.set()
    votes = network.meeting(ranks[0].core.generation, "votes")
    ranks[0].until(lambda: votes.num_waiting == 2, "a wait for the frozen rank")
    survivors = [ranks[0], ranks[2]]
    commit(generation(2, survivors, urgent=True), survivors, serving=survivors)
    for rank in survivors:
        assert rank.text("long") == continuation([4, 2], 200, ignore_eos=True)
    ranks[1].frozen.clear()
    ranks[1].receive_directive(dismissed=True)
    last = ranks[1].until(lambda: ranks[1].ended("long"), "the end")
    assert last.error_code is ErrorCode.DRAINING
    assert ranks[1].status().phase is RankPhase.STANDBY
    commit(generation(3, ranks), ranks, serving=ranks)
    ranks[1].add("again", [1, 1], 10)
    assert ranks[1].text("again") == continuation([1, 1], 10, ignore_eos=True)


@pytest.mark.parametrize("cause", ["workers", "vote group"])
def test_a_failed_preparation_is_reported_and_the_old_generation_keeps_serving(
    start, cause
) -> None:
    ranks = start(2)
    form(ranks[:1])
    if cause == "workers":
        ranks[0].executor.preparation_fails = "the checkpoint is gone"
    else:
        ranks[0].join_fails = "the checkpoint is gone"
    target = generation(2, ranks)
    ranks[0].receive_directive(target)
    ranks[0].until(lambda: ranks[0].status().failed == target.nonce, "the failure")
    assert "the checkpoint is gone" in ranks[0].status().failure
    assert ranks[0].status().prepared == ""
    ranks[0].add("r", [1, 2], 10)
    assert ranks[0].text("r") == continuation([1, 2], 10, ignore_eos=True)
    ranks[0].executor.preparation_fails = ranks[0].join_fails = ""
    commit(generation(3, ranks), ranks, serving=ranks)


def test_a_target_withdrawn_or_replaced_before_its_commit_is_dropped(start) -> None:
    ranks = start(3)
    form(ranks[:2])
    first = generation(2, ranks)
    prepare(first, ranks)
    ranks[0].receive_directive(None)
    ranks[0].until(lambda: ranks[0].status().prepared == "", "dropped")
    second = generation(2, [ranks[1], ranks[0]], nonce="other")
    commit(second, ranks[:2], serving=ranks[:2])
    assert ranks[0].core.rank == 1
    ranks[2].receive_directive(None)
    ranks[2].until(lambda: ranks[2].status().prepared == "", "dropped")
    assert ranks[2].status().phase is RankPhase.STANDBY


def test_a_rank_that_has_seen_a_commit_completes_it(start) -> None:
    ranks = start(2)
    form(ranks)
    target = generation(2, [ranks[1], ranks[0]])
    prepare(target, ranks)
    ranks[0].receive_directive(target, commit=True)
    ranks[0].until(lambda: ranks[0].status().commit_seen == target.nonce, "the commit")
    assert ranks[0].status().committed is target, (
        "another coordinator could not complete the commit"
    )
    assert ranks[1].status().committed is None
    ranks[0].receive_directive(None)
    ranks[0].receive_directive(generation(3, ranks))
    ranks[1].receive_directive(target, commit=True)
    for rank in ranks:
        rank.wait_serving(target)
        assert rank.status().committed is None


def test_a_rank_that_voted_commits_when_a_rank_that_has_not_voted_is_lost(start) -> None:
    ranks = start(3)
    form(ranks)
    target = generation(2, ranks[:2])
    prepare(target, ranks[:2])
    ranks[0].receive_directive(target, commit=True)
    ranks[0].until(lambda: ranks[0].topology().wave > 0, "an exchange with its vote")
    assert ranks[0].status().generation.number == 1, "not all have voted"
    ranks[2].inputs.put(lambda: ranks[2].core._group.abort())
    ranks[0].until(lambda: ranks[0].serves(target), "committed, as no further vote is possible")


def test_an_urgent_target_above_a_committed_one_follows_it(start) -> None:
    ranks = start(3)
    form(ranks)
    begin(ranks, [1, 7], 80)
    target = generation(2, ranks[:2])
    for rank in ranks:
        rank.receive_directive(target)
    for rank in ranks[:2]:
        rank.wait_prepared(target)
    ranks[2].frozen.set()
    for rank in ranks:
        rank.receive_directive(target, commit=True)
    survivors = [ranks[1], ranks[0]]
    commit(generation(3, survivors, urgent=True), ranks, serving=survivors)
    for rank in survivors:
        assert rank.text("long") == continuation([1, 7], 80, ignore_eos=True)
    ranks[2].frozen.clear()
    last = ranks[2].until(lambda: ranks[2].ended("long"), "the end")
    assert last.error_code is ErrorCode.DRAINING
    assert ranks[2].status().phase is RankPhase.STANDBY


def test_a_removed_rank_leaves_once_if_an_urgent_target_follows_the_commit(start) -> None:
    ranks = start(3)
    form(ranks)
    target = generation(2, ranks[:2])
    ranks[2].receive_directive(target, commit=True)
    ranks[2].until(lambda: ranks[2].status().commit_seen == target.nonce, "the commit")
    commit(generation(3, ranks[:2], urgent=True), ranks, serving=ranks[:2])
    ranks[2].wait_phase(RankPhase.STANDBY)
    commit(generation(4, ranks), ranks, serving=ranks)


def test_a_new_rank_commits_and_joins_when_a_wave_of_its_generation_starts(start, network) -> None:
    ranks = start(2)
    network.repeats = False
    form(ranks[:1])
    target = generation(2, ranks)
    prepare(target, ranks)
    ranks[0].receive_directive(target, commit=True)
    ranks[0].wait_serving(target)
    assert ranks[1].status().phase is RankPhase.STANDBY
    ranks[0].add("r", [1, 2], 10)
    assert ranks[0].text("r") == continuation([1, 2], 10, ignore_eos=True)
    assert ranks[1].serves(target)
    assert ranks[1].status().commit_seen == target.nonce


def test_a_step_that_breaks_after_all_votes_is_dropped_and_the_generation_committed(start) -> None:
    ranks = start(2)
    form(ranks)
    begin(ranks, [8, 1], 100)
    target = generation(2, ranks)
    prepare(target, ranks)
    original = ranks[1].executor.execute_model

    def break_in_the_last_step(step) -> None:
        if (
            step.wave_tokens
            and ranks[1].core._standby is not None
            and ranks[1].core._standby.vote_due
        ):
            ranks[1].executor.breaks_at_step = ranks[1].executor.num_wave_steps + 1
        original(step)

    ranks[1].executor.execute_model = break_in_the_last_step
    ranks[1].receive_directive(target, commit=True)
    ranks[0].receive_directive(target, commit=True)
    for rank in ranks:
        rank.wait_serving(target)
        assert rank.text("long") == continuation([8, 1], 100, ignore_eos=True)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_pause_of_one_rank_does_not_stop_the_others(start, mode) -> None:
    ranks = start(2)
    form(ranks)
    begin(ranks, [2, 2], 60)
    ranks[0].inputs.put(lambda: ranks[0].core.pause(mode))
    ranks[0].until(lambda: ranks[0].core.is_paused(), "the pause")
    ranks[0].add("waits", [6], 10)
    assert ranks[1].text("long") == continuation([2, 2], 60, ignore_eos=True)
    ranks[1].add("more", [3], 20)
    assert ranks[1].text("more") == continuation([3], 20, ignore_eos=True)
    for rank in ranks:
        rank.wait_wave_end()
    assert not ranks[0].tokens("waits")
    ranks[0].inputs.put(lambda: ranks[0].core.resume())
    assert ranks[0].text("waits") == continuation([6], 10, ignore_eos=True)
    if mode != "abort":
        assert ranks[0].text("long") == continuation([2, 2], 60, ignore_eos=True)


def test_a_rank_refuses_sleep_and_requests_for_another_rank(start) -> None:
    (rank, other) = start(2)
    form([rank, other])
    for method in ("sleep", "wake_up"):
        with pytest.raises(RuntimeError, match="cannot sleep"):
            getattr(rank.core, method)()
    other.add("wrong", [1], data_parallel_rank=0)
    refusal = other.until(lambda: other.ended("wrong"), "a refusal")
    assert refusal.error_code is ErrorCode.DRAINING
    assert "this engine is rank 1" in refusal.error
    other.add("right", [1], 5, data_parallel_rank=1)
    assert other.text("right") == continuation([1], 5, ignore_eos=True)


def test_targets_older_than_the_current_generation_are_ignored(start) -> None:
    ranks = start(2)
    form(ranks)
    commit(generation(5, ranks), ranks, serving=ranks)
    stale = generation(4, [ranks[1], ranks[0]], urgent=True)
    for rank in ranks:
        rank.receive_directive(stale, commit=True)
    ranks[0].add("r", [1], 10)
    assert ranks[0].text("r") == continuation([1], 10, ignore_eos=True)
    assert all(
        rank.status().generation.number == 5 and rank.status().prepared == "" for rank in ranks
    )


def test_a_rank_in_standby_accepts_an_older_generation_number(start) -> None:
    ranks = start(2)
    form(ranks)
    commit(generation(5, ranks), ranks, serving=ranks)
    for rank in ranks:
        rank.receive_directive(dismissed=True)
        rank.wait_phase(RankPhase.STANDBY)
    commit(generation(2, ranks, nonce="of a restarted coordinator"), ranks, serving=ranks)


def test_the_position_shows_which_rank_waits_and_which_is_stalled(start) -> None:
    ranks = start(2)
    form(ranks)
    ranks[1].frozen.set()
    ranks[0].add("r", [1, 2], 10)
    ranks[0].until(
        lambda: ranks[0].core.position == (1, Activity.WAITS), "a wait for the other rank"
    )
    assert ranks[1].core.position == (0, Activity.RESTS)
    held, run = threading.Event(), ranks[1].executor._run

    def hang(step) -> ModelRunnerOutput:
        assert held.wait(DEADLINE_S)
        return run(step)

    ranks[1].executor._run = hang
    ranks[1].frozen.clear()
    for rank in ranks:
        rank.until(lambda rank=rank: rank.core.position == (1, Activity.RUNS), "a step")
    held.set()
    ranks[0].text("r")
    for rank in ranks:
        rank.until(lambda rank=rank: rank.core.position[1] is Activity.RESTS, "idle")
    assert ranks[0].core.position == ranks[1].core.position


def test_a_status_reports_expert_loads_and_the_shape_of_the_model(start) -> None:
    ranks = start(2)
    form(ranks)
    eventually(lambda: ranks[0].status().loads, timeout_s=10, what="loads")
    status = ranks[0].status()
    assert (status.num_sparse_layers, status.num_experts, status.expert_bytes) == (2, 4, 96)
