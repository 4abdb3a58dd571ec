"""Random runs of many ranks through many generations: in the end all requests are served."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.elastic.wave_ranks import NONE, Rank, Ranks, new_ranks

NUM_PODS = 10


class WavesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ranks: Ranks
        #: The latest committed generation.
        self.committed = 0
        #: The prepared generation, which may still be aborted.
        self.proposed = NONE
        #: Ranks that have received the commit.
        self.received: set[int] = set()

    @initialize(size=st.integers(4, 8))
    def form(self, size: int) -> None:
        self.ranks = new_ranks([tuple(range(size))], NUM_PODS)
        self.received = set(range(NUM_PODS))

    # The coordinator

    @precondition(lambda self: self.has_changed())
    @rule(members=st.lists(st.integers(0, NUM_PODS - 1), min_size=4, max_size=8, unique=True))
    def propose(self, members: list[int]) -> None:
        generations = self.ranks.generations
        generations.append(tuple(members))
        self.proposed = len(generations) - 1
        # Directives are whole states, so an earlier commit is not sent any more.
        self.received = set(range(NUM_PODS))
        for index in {*members, *generations[self.committed]}:
            self.ranks.take_target(index, self.proposed)

    @precondition(lambda self: self.proposed != NONE)
    @rule()
    def commit(self) -> None:
        self.committed, self.proposed = self.proposed, NONE
        self.received.clear()

    @precondition(lambda self: self.proposed != NONE)
    @rule()
    def abort(self) -> None:
        self.proposed = NONE
        for index in range(NUM_PODS):
            self.ranks.take_abort(index)

    @precondition(lambda self: len(self.received) < NUM_PODS)
    @rule(indices=st.sets(st.integers(0, NUM_PODS - 1), min_size=1))
    def deliver(self, indices: set[int]) -> None:
        for index in sorted(indices - self.received):
            if self.ranks.ranks[index].settled:
                self.received.add(index)
                self.ranks.take_commit(index)

    def has_changed(self) -> bool:
        members = self.ranks.generations[self.committed]
        return self.proposed == NONE and all(
            rank.current == (self.committed if index in members else NONE)
            for index, rank in enumerate(self.ranks.ranks)
        )

    # Users

    @rule(index=st.integers(0, NUM_PODS - 1), tokens=st.integers(1, 3))
    def request(self, index: int, tokens: int) -> None:
        if self.ranks.ranks[index].waves is not None:
            self.ranks.ranks[index].tokens += tokens

    @rule(index=st.integers(0, NUM_PODS - 1), paused=st.booleans())
    def pause(self, index: int, paused: bool) -> None:
        self.ranks.ranks[index].paused = paused

    # Ranks

    @rule(indices=st.lists(st.integers(0, NUM_PODS - 1), min_size=1, max_size=20))
    def go_on(self, indices: list[int]) -> None:
        for index in indices:
            rank = self.ranks.ranks[index]
            if rank.votes is not None:
                self.ranks.finish(index)
            elif rank.may_enter():
                self.ranks.enter(index)

    @precondition(lambda self: self.ranks.begun)
    @rule(index=st.integers(0, NUM_PODS - 1), data=st.data())
    def start_arrives(self, index: int, data: st.DataObject) -> None:
        """Deliver any StartWave that was sent."""
        if self.ranks.ranks[index].settled:
            self.ranks.take_start(index, *data.draw(st.sampled_from(sorted(self.ranks.begun))))

    @rule()
    def starts_are_repeated(self) -> None:
        for rank in list(self.ranks.ranks):
            if rank.repeats and rank.waves:
                self.ranks.deliver(rank.current, rank.waves.wave)

    @rule()
    def come_to_rest(self) -> None:
        """Deliver all commits. Then all work is done and no rank exchanges votes."""
        self.ranks.run()
        for rank in self.ranks.ranks:
            rank.paused = False
        self.ranks.run()
        self.deliver(set(range(NUM_PODS)))
        self.ranks.run()
        assert self.received == set(range(NUM_PODS))
        members = self.ranks.generations[self.committed]
        for index, rank in enumerate(self.ranks.ranks):
            assert rank.current == (self.committed if index in members else NONE), (
                f"rank {index} is in the wrong generation"
            )
            assert rank.settled
            assert not rank.tokens
            assert rank.waves is None or not rank.waves.running
        waves = {rank.waves.wave for rank in self.ranks.ranks if rank.waves is not None}
        assert len(waves) == 1, "waves differ"

    # Invariants

    @invariant()
    def only_begun_waves_run(self) -> None:
        for rank in self.ranks.ranks if hasattr(self, "ranks") else ():
            if rank.waves is not None and rank.waves.running:
                assert (rank.current, rank.waves.wave) in self.ranks.begun

    @invariant()
    def all_members_move_or_none(self) -> None:
        if not hasattr(self, "ranks"):
            return
        serving = {rank.current for rank in self.ranks.ranks if rank.waves is not None}
        assert max(serving) <= self.committed
        for rank in self.ranks.ranks:
            if (
                rank.waves is not None
                and rank.current < self.committed
                and self._has_lost_member(rank)
            ):
                assert rank.votes is not None, "a rank was left behind"
                assert all(vote.commit for vote in rank.votes)

    def _has_lost_member(self, rank: Rank) -> bool:
        return any(member.current != rank.current for member in self.ranks.members(rank))

    def teardown(self) -> None:
        if hasattr(self, "ranks"):
            self.come_to_rest()


WavesMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestWaves = WavesMachine.TestCase
