"""Simulated engine loops of ranks with the real `Waves`, without sockets, threads or clocks.

For the exhaustive and the stateful test of waves.

Every move is one call. A rank calls `take_*` for messages that arrived, then `enter` for the
exchange before a step. The exchange completes when every member of the generation has entered. Each
member then ends its own step (`finish`) at any time. Requests are only counts of tokens, and a step
runs one token.
"""

from __future__ import annotations

from typing import NamedTuple

from baton_engine.elastic.rank.waves import StepVote, Waves, vote_for
from baton_protocol.topology import StartWave

#: No generation, no wave.
NONE = -1


class Key(NamedTuple):
    """The complete state of a rank, as a hashable value."""

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
    received: bool
    broken: bool
    dead: bool


def nonce(generation: int) -> str:
    return f"nonce-{generation}"


class Rank:
    """The state of a rank's loop. Generations are indices in `Ranks.generations`."""

    waves_class = Waves

    def __init__(self) -> None:
        #: The generation that it serves in. NONE: it is new or STANDBY.
        self.current = NONE
        self.waves: Waves | None = None
        #: The prepared generation.
        self.target = NONE
        #: It received the commit of the target and votes for it.
        self.committed = False
        #: Its vote for the target was in an exchange.
        self.voted = False
        #: The latest wave of the target of which it received a StartWave.
        self.kept = NONE
        #: Tokens left to run.
        self.tokens = 0
        self.paused = False
        #: Its vote, while it waits in the exchange.
        self.vote: StepVote | None = None
        #: All votes, from the end of the exchange to the end of the step.
        self.votes: tuple[StepVote, ...] | None = None
        #: Its link repeats the StartWave of the running wave.
        self.repeats = False
        #: It received the latest commit or abort.
        self.received = False
        #: Its generation lost a member: it keeps its requests and has no waves.
        self.broken = False
        self.dead = False

    @property
    def settled(self) -> bool:
        return self.vote is None and self.votes is None

    @property
    def wants_vote(self) -> bool:
        return self.committed and not self.voted

    def num_tokens(self) -> int:
        """Return the number of tokens of the next step."""
        return 0 if self.paused else min(self.tokens, 1)

    def has_work(self, num_tokens: int) -> bool:
        return num_tokens > 0

    def may_enter(self) -> bool:
        if self.waves is None or not self.settled:
            return False
        return self.waves.running or self.num_tokens() > 0 or self.wants_vote

    def join(self, generation: int) -> None:
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
            *(self.repeats, self.received, self.broken, self.dead),
        )

    @classmethod
    def from_key(cls, key: Key) -> Rank:
        rank = cls()
        if key.current != NONE:
            rank.join(key.current)
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
        rank.repeats, rank.received, rank.broken, rank.dead = (
            key.repeats,
            key.received,
            key.broken,
            key.dead,
        )
        return rank


class Ranks:
    """All ranks, and the messages between them."""

    def __init__(self, generations: list[tuple[int, ...]], ranks: list[Rank]) -> None:
        #: Members of each generation, in rank order.
        self.generations = generations
        self.ranks = ranks
        #: (generation, wave) of every StartWave that was sent. Each may arrive at any rank, at any
        #: time, any number of times.
        self.begun: set[tuple[int, int]] = set()
        #: Tokens of requests that the gateway holds or got back.
        self.unassigned = 0
        self.num_exchanges = 0

    def members(self, rank: Rank) -> list[Rank]:
        return [self.ranks[member] for member in self.generations[rank.current]]

    # Messages that a loop processes between steps

    def take_start(self, index: int, generation: int, wave: int) -> None:
        rank = self.ranks[index]
        if rank.waves is not None and generation == rank.current:
            rank.waves.on_start(StartWave(generation, nonce(generation), wave))
        elif generation == rank.target:
            # Its sender is in the target, so the target is committed.
            rank.kept = max(rank.kept, wave)
            self._commit(index)

    def take_target(self, index: int, generation: int) -> None:
        rank = self.ranks[index]
        if not rank.committed and generation > rank.current:
            rank.target = generation

    def take_commit(self, index: int) -> None:
        rank = self.ranks[index]
        rank.received = True
        if rank.target != NONE:
            self._commit(index)

    def take_abort(self, index: int) -> None:
        rank = self.ranks[index]
        rank.received = True
        if not rank.committed:
            rank.target = rank.kept = NONE

    def _commit(self, index: int) -> None:
        self.ranks[index].committed = True
        if self.ranks[index].waves is None:
            self._move_to_target(index)

    # A step

    def enter(self, index: int) -> None:
        """Enter the exchange before a step."""
        rank = self.ranks[index]
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
        """End the step and apply the decision of the votes."""
        rank = self.ranks[index]
        own = rank.votes[self.generations[rank.current].index(index)]
        decision = rank.waves.decide(rank.votes)
        rank.votes = None
        rank.tokens -= own.num_tokens
        if decision.commit:
            self._move_to_target(index)

    def _move_to_target(self, index: int) -> None:
        rank = self.ranks[index]
        assert rank.committed
        assert rank.settled
        target, kept = rank.target, rank.kept
        rank.target = rank.kept = NONE
        rank.committed = rank.voted = rank.repeats = rank.broken = False
        if index in self.generations[target]:
            rank.join(target)
            if kept != NONE:
                self.take_start(index, target, kept)
        else:
            rank.current, rank.waves = NONE, None
            self.unassigned += rank.tokens
            rank.tokens = 0

    # When a rank is lost

    def die(self, index: int) -> None:
        rank = self.ranks[index] = type(self.ranks[index])()
        rank.dead = True

    def has_lost(self, index: int) -> bool:
        """Return whether the rank's generation has lost a member. Its exchanges and steps fail."""
        generation = self.ranks[index].current
        return any(
            member.dead
            or member.current > generation
            or (generation == 0 and member.current == NONE)
            or (member.broken and member.current == generation)
            for member in self.members(self.ranks[index])
        )

    def break_(self, index: int, knows_votes: bool = True) -> None:
        """Fail the exchange or the step of the rank.

        Args:
            knows_votes: whether the rank still applies the decision of votes that it received.
        """
        rank = self.ranks[index]
        votes, rank.vote, rank.votes = rank.votes, None, None
        if votes is not None and knows_votes and rank.waves.decide(votes).commit:
            self._move_to_target(index)
            return
        rank.waves = None
        rank.broken, rank.repeats = True, False
        if rank.committed:
            self._move_to_target(index)

    def take_urgent(self, index: int, generation: int) -> None:
        """Move the rank to an urgent generation, which interrupts its exchange or step."""
        rank = self.ranks[index]
        rank.received = True
        rank.vote = rank.votes = None
        rank.target, rank.kept = generation, NONE
        rank.committed = True
        self._move_to_target(index)

    # For tests of a single order

    def deliver(self, generation: int, wave: int) -> None:
        for index in range(len(self.ranks)):
            if self.ranks[index].settled:
                self.take_start(index, generation, wave)

    def run(self) -> None:
        """Run all ranks until no rank has work. All repeated StartWaves are delivered."""
        for _ in range(1000):
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
    """Create `num_ranks` ranks. The members of generation 0 serve in generation 0."""
    ranks = Ranks(generations, [rank_class() for _ in range(num_ranks)])
    for member in generations[0]:
        ranks.ranks[member].join(0)
    return ranks
