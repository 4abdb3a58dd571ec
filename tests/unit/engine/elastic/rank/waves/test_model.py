"""Every interleaving of a few ranks' loops with the real Waves.

StartWaves arrive late, twice, in any order or not at all. Directives arrive at any time. Ranks
pause, join, leave and die. The model checker also finds known faults in loops and in Waves.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from baton_engine.elastic.rank.waves import StepDecision, StepVote, Waves
from baton_protocol.topology import StartWave
from support.elastic.wave_model import FaultError, Model
from support.elastic.wave_ranks import Rank, new_ranks, nonce

TWO_CHANGE = [(0, 1), (0, 2)]
THREE_CHANGE = [(0, 1, 2), (0, 1, 3)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_of_one_generation_run_all_requests_and_become_idle(num_ranks: int) -> None:
    assert Model([tuple(range(num_ranks))], num_tokens=2, num_pauses=1).explore() > 30


def test_two_ranks_change_their_generation_under_requests() -> None:
    assert Model(TWO_CHANGE[:], num_tokens=2).explore() > 10_000


def test_two_ranks_change_their_generation_while_one_is_paused() -> None:
    assert Model(TWO_CHANGE[:], num_tokens=1, num_pauses=1).explore() > 5_000


def test_three_ranks_change_their_generation_under_a_request() -> None:
    assert Model(THREE_CHANGE[:], num_tokens=1).explore() > 10_000


def test_votes_may_be_repeated() -> None:
    Model(TWO_CHANGE[:], num_tokens=1, num_pauses=1, may_repeat_votes=True).explore()


def test_the_other_ranks_continue_when_one_dies_at_any_time() -> None:
    Model(TWO_CHANGE[:], num_tokens=1, mortals=(0, 1, 2), may_repeat_votes=True).explore()
    Model(THREE_CHANGE[:], num_tokens=0, mortals=(0, 2, 3)).explore()


def test_a_new_coordinator_completes_a_commit_that_ranks_have_received() -> None:
    Model(TWO_CHANGE[:], num_tokens=1, num_restarts=2).explore()
    Model(THREE_CHANGE[:], num_tokens=0, num_restarts=1).explore()
    Model(
        TWO_CHANGE[:], num_tokens=0, num_restarts=1, mortals=(0, 1, 2), may_repeat_votes=True
    ).explore()


def test_a_new_coordinator_must_find_commits_that_ranks_have_received() -> None:
    with pytest.raises(FaultError, match="not committed"):
        Model(TWO_CHANGE[:], num_tokens=0, num_restarts=1, finds_commits=False).explore()


def test_a_change_completes_although_the_leaving_rank_dies() -> None:
    Model(
        TWO_CHANGE[:], num_tokens=1, mortals=(1,), waits_for_commit=True, may_repeat_votes=True
    ).explore()
    Model(
        THREE_CHANGE[:], num_tokens=0, mortals=(2,), waits_for_commit=True, may_repeat_votes=True
    ).explore()


def test_without_repeated_votes_a_rank_that_dies_before_the_commit_blocks_the_change() -> None:
    with pytest.raises(FaultError, match="not in the generation that was decided"):
        Model(TWO_CHANGE[:], num_tokens=0, mortals=(1,), waits_for_commit=True).explore()


# The model checker finds faults


class JoinsLateWaves(Waves):
    """A fault: every StartWave wakes the rank, also that of an ended wave."""

    def on_start(self, start: StartWave) -> None:
        if (start.generation, start.nonce) == (self.generation, self.nonce):
            self.running = True


class KeepsTheNumber(Waves):
    """A fault: a wave without tokens does not increase the number."""

    def decide(self, votes: Sequence[StepVote]) -> StepDecision:
        wave = self.wave
        decision = super().decide(votes)
        self.wave = wave
        return decision


class CommitsForOneVote(Waves):
    """A fault: one vote is enough for a commit."""

    def decide(self, votes: Sequence[StepVote]) -> StepDecision:
        decision = super().decide(votes)
        return decision._replace(commit=any(vote.commit for vote in votes))


class StepsForUnfinishedRequests(Rank):
    """A fault: paused requests count as work."""

    def has_work(self, num_tokens: int) -> bool:
        return self.tokens > 0


class WaitsToBeWoken(Rank):
    """A fault: the rank's own tokens begin no wave."""

    def may_enter(self) -> bool:
        return super().may_enter() and (self.wants_vote or bool(self.waves and self.waves.running))


class VotesInsideWavesOnly(Rank):
    def may_enter(self) -> bool:
        return super().may_enter() and (
            self.num_tokens() > 0 or bool(self.waves and self.waves.running)
        )


def rank_with(machine: type[Waves]) -> type[Rank]:
    return type("FaultyRank", (Rank,), {"waves_class": machine})


@pytest.mark.parametrize(
    ("rank_class", "generations", "fault"),
    [
        (rank_with(JoinsLateWaves), [(0, 1)], "no rank has begun"),
        (rank_with(KeepsTheNumber), [(0, 1)], "never completes"),
        (rank_with(CommitsForOneVote), TWO_CHANGE, "finish"),
        (StepsForUnfinishedRequests, [(0, 1)], "never stop stepping"),
        (WaitsToBeWoken, [(0, 1)], "does not run its tokens"),
        (VotesInsideWavesOnly, TWO_CHANGE, "not in the generation that was decided"),
    ],
)
def test_the_model_checker_finds_the_fault(
    rank_class: type[Rank], generations: list[tuple[int, ...]], fault: str
) -> None:
    with pytest.raises(FaultError, match=fault):
        Model(generations[:], num_tokens=2, num_pauses=1, rank_class=rank_class).explore()


# The same faults in vLLM, by the number of the issue


def test_36594_a_late_start_does_not_wake_ranks_that_have_paused() -> None:
    """In vLLM a START_DP_WAVE of an ended wave reached a paused rank.

    The rank stepped again and waited for the others without end.
    """
    ranks = new_ranks([(0, 1, 2)], 3)
    ranks.ranks[0].tokens = 2
    ranks.enter(0)
    late = StartWave(0, nonce(0), 0)
    ranks.run()
    for rank in ranks.ranks:
        rank.paused = True
        rank.waves.on_start(late)
        assert not rank.may_enter()
    ranks.ranks[1].tokens, ranks.ranks[1].paused = 1, False
    ranks.run()
    assert not ranks.ranks[1].tokens


def test_51476_a_request_during_a_pause_does_not_keep_the_wave_running() -> None:
    """In vLLM a request to a paused rank never ran, but kept the wave running without end."""
    ranks = new_ranks([(0, 1)], 2)
    ranks.ranks[1].paused = True
    ranks.ranks[1].tokens = 1
    ranks.ranks[0].tokens = 3
    ranks.run()
    assert ranks.num_exchanges == 4, "expected three steps with tokens and one that ends the wave"
    assert not any(rank.may_enter() for rank in ranks.ranks)
    assert ranks.ranks[1].tokens == 1
    ranks.ranks[1].paused = False
    ranks.run()
    assert (ranks.ranks[1].tokens, ranks.num_exchanges) == (0, 6)


def test_52957_a_pause_costs_one_exchange_and_no_forward() -> None:
    """In vLLM ranks agreed to stop every 32 steps, so a pause cost up to 32 dummy batches."""
    ranks = new_ranks([(0, 1)], 2)
    ranks.ranks[0].tokens = 100
    for _ in range(10):
        for index in (0, 1):
            if ranks.ranks[index].may_enter():
                ranks.enter(index)
            ranks.deliver(0, 0)
        if ranks.ranks[1].may_enter():
            ranks.enter(1)
        ranks.finish(0)
        ranks.finish(1)
    assert (ranks.num_exchanges, ranks.ranks[0].tokens) == (10, 90)
    ranks.ranks[0].paused = True
    ranks.enter(0)
    ranks.enter(1)
    votes = ranks.ranks[0].votes
    assert [vote.num_tokens for vote in votes] == [0, 0], "a rank runs the model"
    ranks.run()
    assert ranks.num_exchanges == 11
    assert not any(rank.may_enter() for rank in ranks.ranks)


def test_55229_resuming_twice_changes_nothing() -> None:
    """In vLLM a second resume began a wave while some ranks ran one, and the group deadlocked."""
    for first, second in itertools.product(range(2), repeat=2):
        ranks = new_ranks([(0, 1)], 2)
        for rank in ranks.ranks:
            rank.tokens, rank.paused = 2, True
        ranks.run()
        assert not ranks.num_exchanges
        ranks.ranks[first].paused = False
        ranks.enter(first)
        ranks.ranks[first].paused = False
        ranks.ranks[second].paused = False
        if second != first:
            ranks.enter(second)
        ranks.run()
        assert [rank.tokens for rank in ranks.ranks] == [2 * rank.paused for rank in ranks.ranks]
        assert not any(rank.may_enter() for rank in ranks.ranks)


@pytest.mark.parametrize("woken_by", range(4))
def test_54762_any_rank_begins_the_first_wave(woken_by: int) -> None:
    """In vLLM only the front end of rank 0 began the first wave, so other ranks never started."""
    ranks = new_ranks([(0, 1, 2, 3)], 4)
    ranks.ranks[woken_by].tokens = 1
    ranks.run()
    assert (ranks.ranks[woken_by].tokens, ranks.num_exchanges) == (0, 2)
    assert {rank.waves.wave for rank in ranks.ranks if rank.waves} == {1}


def test_an_idle_group_exchanges_nothing() -> None:
    ranks = new_ranks([(0, 1)], 2)
    ranks.ranks[0].tokens, ranks.ranks[0].paused = 5, True
    ranks.run()
    assert not ranks.num_exchanges


def test_a_change_of_an_idle_group_takes_at_most_one_exchange_per_rank() -> None:
    for order in itertools.permutations(range(4)):
        ranks = new_ranks([(0, 1, 2), (0, 1, 3)], 4)
        for index in range(4):
            ranks.take_target(index, 1)
        for index in order:
            ranks.take_commit(index)
            ranks.run()
        assert [rank.current for rank in ranks.ranks] == [1, 1, -1, 1]
        assert ranks.num_exchanges <= 3
