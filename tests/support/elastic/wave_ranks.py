"""Ranks that go round their loops with the real Waves, without sockets, threads or clocks: every move is one call.

A rank's turn is `take_*` for what has arrived, then `enter` for the exchange before a step. The exchange is done once every member
of the generation has entered; each then ends its own step (`finish`), early or late. Of requests only their tokens are left, and a
step runs one.
"""

from __future__ import annotations

from typing import NamedTuple

from baton_engine.elastic.rank.waves import StepVote, Waves, vote_for
from baton_protocol.topology import StartWave

NONE = -1
"""No generation, no wave."""


class Key(NamedTuple):
    """All that a rank's future depends on."""

    current: int
    wave: int
    running: bool
    awaited: int
    target: int
    committed: bool
    voted: bool
    kept: int
    tokens: int
    paused: bool
    vote: StepVote | None
    votes: tuple[StepVote, ...] | None
    repeats: bool
    told: bool
    broken: bool
    dead: bool


def nonce(generation: int) -> str:
    return f"nonce-{generation}"


class Rank:
    """Its loop's state. Generations are named by their index in `Ranks.generations`."""

    waves_class = Waves

    def __init__(self) -> None:
        self.current = NONE
        """The generation it lives in; NONE: a newcomer, or STANDBY."""
        self.waves: Waves | None = None
        self.target = NONE
        """Prepared beside it."""
        self.committed = False
        """It knows that the target is adopted by all, and votes for it."""
        self.voted = False
        """A vote of its own for the target has been in an exchange."""
        self.kept = NONE
        """The latest wave of the target that it was told of."""
        self.tokens = 0
        """Left to run."""
        self.paused = False
        self.vote: StepVote | None = None
        """It waits in the exchange."""
        self.votes: tuple[StepVote, ...] | None = None
        """The exchange is done; the step is to be run."""
        self.repeats = False
        """Its link sends the StartWave of the running wave again and again."""
        self.told = False
        """It has taken the latest commit, or abort, in."""
        self.broken = False
        """Its generation lost a member: it keeps its requests and has no waves."""
        self.dead = False

    @property
    def settled(self) -> bool:
        return self.vote is None and self.votes is None

    @property
    def wants_vote(self) -> bool:
        return self.committed and not self.voted

    def num_tokens(self) -> int:
        """Of the next step."""
        return 0 if self.paused else min(self.tokens, 1)

    def has_work(self, num_tokens: int) -> bool:
        return num_tokens > 0

    def may_enter(self) -> bool:
        if self.waves is None or not self.settled:
            return False
        return self.waves.running or self.num_tokens() > 0 or self.wants_vote

    def live_in(self, generation: int) -> None:
        self.current = generation
        self.waves = self.waves_class(generation, nonce(generation))

    def key(self) -> Key:
        waves = self.waves
        return Key(
            self.current,
            *((waves.wave, waves.running, waves._awaited) if waves else (0, False, NONE)),
            *(
                self.target,
                self.committed,
                self.voted,
                self.kept,
                self.tokens,
                self.paused,
                self.vote,
                self.votes,
            ),
            *(self.repeats, self.told, self.broken, self.dead),
        )

    @classmethod
    def from_key(cls, key: Key) -> Rank:
        rank = cls()
        if key.current != NONE:
            rank.live_in(key.current)
        if key.broken:
            rank.waves = None
        if rank.waves is not None:
            rank.waves.wave, rank.waves.running, rank.waves._awaited = (
                key.wave,
                key.running,
                key.awaited,
            )
        rank.target, rank.committed, rank.voted, rank.kept = (
            key.target,
            key.committed,
            key.voted,
            key.kept,
        )
        rank.tokens, rank.paused, rank.vote, rank.votes = (
            key.tokens,
            key.paused,
            key.vote,
            key.votes,
        )
        rank.repeats, rank.told, rank.broken, rank.dead = (
            key.repeats,
            key.told,
            key.broken,
            key.dead,
        )
        return rank


class Ranks:
    """All that ever lived, and what is under way between them."""

    def __init__(self, generations: list[tuple[int, ...]], ranks: list[Rank]) -> None:
        self.generations = generations
        """Their members, in rank order."""
        self.ranks = ranks
        self.begun: set[tuple[int, int]] = set()
        """(generation, wave) of every StartWave ever sent: each may arrive anywhere, at any time, any number of times."""
        self.unassigned = 0
        """Tokens that no rank has: of requests the gateway holds, or has been given back."""
        self.num_exchanges = 0

    def members(self, rank: Rank) -> list[Rank]:
        return [self.ranks[member] for member in self.generations[rank.current]]

    # -- what a loop takes in while it is settled

    def take_start(self, index: int, generation: int, wave: int) -> None:
        rank = self.ranks[index]
        if rank.waves is not None and generation == rank.current:
            rank.waves.on_start(StartWave(generation, nonce(generation), wave))
        elif generation == rank.target:
            # Its sender lives there, so it is as good as the commit.
            rank.kept = max(rank.kept, wave)
            self._commit(index)

    def take_target(self, index: int, generation: int) -> None:
        rank = self.ranks[index]
        if not rank.committed and generation > rank.current:
            rank.target = generation

    def take_commit(self, index: int) -> None:
        rank = self.ranks[index]
        rank.told = True
        if rank.target != NONE:
            self._commit(index)

    def take_abort(self, index: int) -> None:
        rank = self.ranks[index]
        rank.told = True
        if not rank.committed:
            rank.target = rank.kept = NONE

    def _commit(self, index: int) -> None:
        self.ranks[index].committed = True
        if self.ranks[index].waves is None:
            self._adopt(index)

    # -- a step

    def enter(self, index: int) -> None:
        """The exchange before a step."""
        rank = self.ranks[index]
        assert rank.waves is not None
        assert rank.settled
        num_tokens = rank.num_tokens()
        if not rank.waves.running:
            self.begun.add((rank.current, rank.waves.begin().wave))
            rank.repeats = True
        commit = vote_for(nonce(rank.target)) if rank.committed else 0
        rank.vote = StepVote(num_tokens, int(rank.has_work(num_tokens)), commit)
        rank.voted = rank.committed
        members = self.members(rank)
        if all(member.current == rank.current and member.vote is not None for member in members):
            self._exchange(members)

    def _exchange(self, members: list[Rank]) -> None:
        assert len({member.waves.wave for member in members if member.waves}) == 1, "waves differ"
        self.num_exchanges += 1
        votes = tuple(member.vote for member in members if member.vote is not None)
        for member in members:
            member.vote, member.votes = None, votes
            member.repeats = False

    def finish(self, index: int) -> None:
        """The step is run, and what the votes decided is done."""
        rank = self.ranks[index]
        assert rank.waves is not None
        assert rank.votes is not None
        own = rank.votes[self.generations[rank.current].index(index)]
        decision = rank.waves.decide(rank.votes)
        rank.votes = None
        rank.tokens -= own.num_tokens
        if decision.commit:
            self._adopt(index)

    def _adopt(self, index: int) -> None:
        rank = self.ranks[index]
        assert rank.committed
        assert rank.settled
        target, kept = rank.target, rank.kept
        rank.target = rank.kept = NONE
        rank.committed = rank.voted = rank.repeats = rank.broken = False
        if index in self.generations[target]:
            rank.live_in(target)
            if kept != NONE:
                self.take_start(index, target, kept)
        else:
            rank.current, rank.waves = NONE, None
            self.unassigned += rank.tokens
            rank.tokens = 0

    # -- when a rank is lost

    def die(self, index: int) -> None:
        rank = self.ranks[index] = type(self.ranks[index])()
        rank.dead = True

    def has_lost(self, index: int) -> bool:
        """A member of the rank's generation is gone from it, so that its exchanges and steps fail."""
        generation = self.ranks[index].current
        return any(
            member.dead
            or member.current > generation
            or (generation == 0 and member.current == NONE)
            or (member.broken and member.current == generation)
            for member in self.members(self.ranks[index])
        )

    def break_(self, index: int, knows_votes: bool = True) -> None:
        """The exchange raises, or the step does. What the votes decided is done all the same, if they have arrived."""
        rank = self.ranks[index]
        votes, rank.vote, rank.votes = rank.votes, None, None
        assert rank.waves is not None
        if votes is not None and knows_votes and rank.waves.decide(votes).commit:
            self._adopt(index)
            return
        rank.waves = None
        rank.broken, rank.repeats = True, False
        if rank.committed:
            self._adopt(index)

    def take_urgent(self, index: int, generation: int) -> None:
        """Interrupts whatever is under way."""
        rank = self.ranks[index]
        rank.told = True
        rank.vote = rank.votes = None
        rank.target, rank.kept = generation, NONE
        rank.committed = True
        self._adopt(index)

    # -- for tests that want one order, not all

    def deliver(self, generation: int, wave: int) -> None:
        for index in range(len(self.ranks)):
            if self.ranks[index].settled:
                self.take_start(index, generation, wave)

    def run(self, max_turns: int = 1000) -> None:
        """Until nobody has anything to do. StartWaves that are repeated arrive."""
        for _ in range(max_turns):
            for rank in list(self.ranks):
                if rank.repeats and rank.waves:
                    self.deliver(rank.current, rank.waves.wave)
            moved = False
            for index, rank in enumerate(self.ranks):
                if rank.votes is not None:
                    self.finish(index)
                    moved = True
                elif rank.may_enter():
                    self.enter(index)
                    moved = True
            if not moved:
                return
        raise AssertionError("the ranks do not come to rest")


def new_ranks(
    generations: list[tuple[int, ...]], num_ranks: int, rank_class: type[Rank] = Rank
) -> Ranks:
    """The members of generation 0 live in it."""
    ranks = Ranks(generations, [rank_class() for _ in range(num_ranks)])
    for member in generations[0]:
        ranks.ranks[member].live_in(0)
    return ranks
