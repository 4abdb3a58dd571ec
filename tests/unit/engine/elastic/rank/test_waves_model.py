"""Every interleaving of a few ranks that go round their loops with the real Waves: StartWaves late, lost, twice and in any order,
directives at any time, pauses, a rank that joins, one that leaves, one that dies. Loops and machines with a known fault are caught.
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
def test_ranks_of_one_generation_run_all_requests_and_rest(num_ranks: int) -> None:
    assert Model([tuple(range(num_ranks))], num_tokens=2, num_pauses=1).explore() > 30


def test_two_ranks_change_their_generation_under_requests() -> None:
    assert Model(TWO_CHANGE[:], num_tokens=2).explore() > 10_000


def test_two_ranks_change_their_generation_while_one_is_paused() -> None:
    assert Model(TWO_CHANGE[:], num_tokens=1, num_pauses=1).explore() > 5_000


def test_three_ranks_change_their_generation_under_a_request() -> None:
    assert Model(THREE_CHANGE[:], num_tokens=1).explore() > 10_000


def test_votes_may_be_repeated() -> None:
    Model(TWO_CHANGE[:], num_tokens=1, num_pauses=1, may_repeat_votes=True).explore()


def test_all_go_on_without_a_rank_that_dies_at_any_time() -> None:
    Model(TWO_CHANGE[:], num_tokens=1, mortals=(0, 1, 2), may_repeat_votes=True).explore()
    Model(THREE_CHANGE[:], num_tokens=0, mortals=(0, 2, 3)).explore()


def test_another_coordinator_finishes_a_commit_that_some_have_heard_of_and_may_drop_one_that_nobody_has() -> (
    None
):
    Model(TWO_CHANGE[:], num_tokens=1, num_restarts=2).explore()
    Model(THREE_CHANGE[:], num_tokens=0, num_restarts=1).explore()
    Model(
        TWO_CHANGE[:], num_tokens=0, num_restarts=1, mortals=(0, 1, 2), may_repeat_votes=True
    ).explore()


def test_another_coordinator_must_learn_what_ranks_were_told() -> None:
    with pytest.raises(FaultError, match="not committed"):
        Model(TWO_CHANGE[:], num_tokens=0, num_restarts=1, learns=False).explore()


def test_the_change_is_done_though_the_rank_that_leaves_dies_on_its_way_out() -> None:
    Model(
        TWO_CHANGE[:], num_tokens=1, mortals=(1,), waits_for_commit=True, may_repeat_votes=True
    ).explore()
    Model(
        THREE_CHANGE[:], num_tokens=0, mortals=(2,), waits_for_commit=True, may_repeat_votes=True
    ).explore()


def test_votes_must_be_repeated_for_the_sake_of_a_rank_that_dies_before_it_is_told() -> None:
    with pytest.raises(FaultError, match="not in the generation that was decided"):
        Model(TWO_CHANGE[:], num_tokens=0, mortals=(1,), waits_for_commit=True).explore()


# What is wrong is found


class JoinsLateWaves(Waves):
    """A StartWave wakes, whatever wave it is of."""

    def on_start(self, start: StartWave) -> None:
        if (start.generation, start.nonce) == (self.generation, self.nonce):
            self.running = True


class KeepsTheNumber(Waves):
    """A wave without tokens leaves the number as it is."""

    def decide(self, votes: Sequence[StepVote]) -> StepDecision:
        wave = self.wave
        decision = super().decide(votes)
        self.wave = wave
        return decision


class AdoptsForOne(Waves):
    """One vote is enough."""

    def decide(self, votes: Sequence[StepVote]) -> StepDecision:
        decision = super().decide(votes)
        return decision._replace(commit=any(vote.commit for vote in votes))


class StepsForUnfinishedRequests(Rank):
    """Work is what is there, and not what can run."""

    def has_work(self, num_tokens: int) -> bool:
        return self.tokens > 0


class WaitsToBeWoken(Rank):
    """Tokens of its own begin no wave."""

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
        (rank_with(JoinsLateWaves), [(0, 1)], "nobody has begun"),
        (rank_with(KeepsTheNumber), [(0, 1)], "never done"),
        (rank_with(AdoptsForOne), TWO_CHANGE, "finish"),
        (StepsForUnfinishedRequests, [(0, 1)], "for ever without a reason"),
        (WaitsToBeWoken, [(0, 1)], "does not run its tokens"),
        (VotesInsideWavesOnly, TWO_CHANGE, "not in the generation that was decided"),
    ],
)
def test_the_checker_finds(
    rank_class: type[Rank], generations: list[tuple[int, ...]], fault: str
) -> None:
    with pytest.raises(FaultError, match=fault):
        Model(generations[:], num_tokens=2, num_pauses=1, rank_class=rank_class).explore()


# The same faults in other engines (vLLM), by the number of the report, in order


def test_36594_a_late_start_does_not_wake_ranks_that_have_paused() -> None:
    """There: START_DP_WAVE of a wave that was over reached a rank that had paused; it stepped again and waited for the others for
    ever."""
    ranks = new_ranks([(0, 1, 2)], 3)
    ranks.ranks[0].tokens = 2
    ranks.enter(0)
    late = StartWave(0, nonce(0), 0)
    ranks.run()
    for rank in ranks.ranks:
        rank.paused = True
        assert rank.waves is not None
        rank.waves.on_start(late)
        assert not rank.may_enter()
    ranks.ranks[1].tokens, ranks.ranks[1].paused = 1, False
    ranks.run()
    assert not ranks.ranks[1].tokens


def test_51476_a_request_that_comes_during_a_pause_does_not_keep_the_wave_running() -> None:
    """There: a rank was running from the moment a request came, and stopped only after it had seen none unfinished; a request that
    came to a paused rank never ran, so the group stepped for ever."""
    ranks = new_ranks([(0, 1)], 2)
    ranks.ranks[1].paused = True
    ranks.ranks[1].tokens = 1
    ranks.ranks[0].tokens = 3
    ranks.run()
    assert ranks.num_exchanges == 4, "three steps with tokens, and the one that ends the wave"
    assert not any(rank.may_enter() for rank in ranks.ranks)
    assert ranks.ranks[1].tokens == 1
    ranks.ranks[1].paused = False
    ranks.run()
    assert (ranks.ranks[1].tokens, ranks.num_exchanges) == (0, 6)


def test_52957_a_pause_costs_one_exchange_and_no_forward() -> None:
    """There: whether to stop was agreed on every 32 steps, so each pause cost up to 32 dummy forwards."""
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
    assert votes is not None
    assert [vote.num_tokens for vote in votes] == [0, 0], "nobody runs the model"
    ranks.run()
    assert ranks.num_exchanges == 11
    assert not any(rank.may_enter() for rank in ranks.ranks)


def test_55229_resuming_twice_changes_nothing() -> None:
    """There: the second resume began a wave on ranks of which some ran one, and the group waited for itself."""
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
    """There: the first wave was begun by the front end of rank 0; ranks without one of their own never started."""
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


def test_a_change_of_an_idle_group_costs_one_exchange_per_rank_at_most() -> None:
    for order in itertools.permutations(range(4)):
        ranks = new_ranks([(0, 1, 2), (0, 1, 3)], 4)
        for index in range(4):
            ranks.take_target(index, 1)
        for index in order:
            ranks.take_commit(index)
            ranks.run()
        assert [rank.current for rank in ranks.ranks] == [1, 1, -1, 1]
        assert ranks.num_exchanges <= 3
