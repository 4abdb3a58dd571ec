"""A model checker for waves: it explores all interleavings of a few ranks, breadth first.

For the exhaustive test of waves.

Each state is explored once. A fault is reported with the moves that lead to it.
"""

from __future__ import annotations

import gc
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from support.elastic.wave_ranks import NONE, Key, Rank, Ranks, new_ranks


class State(NamedTuple):
    ranks: tuple[Key, ...]
    begun: frozenset[tuple[int, int]]
    unassigned: int
    #: The coordinator's decision about generation 1: "", commit, abort, forgotten (it committed and
    #: was replaced by one that does not know it) or urgent (a generation without the dead rank).
    decision: str
    #: The generation of the decision `urgent`.
    urgent: int
    #: Pauses of ranks that may still happen.
    pauses: int
    #: Replacements of the coordinator that may still happen.
    restarts: int = 0


class Move(NamedTuple):
    name: str
    index: int = NONE
    generation: int = NONE
    wave: int = NONE
    #: Whether the move must happen eventually. Moves of users and of the coordinator need not
    #: happen, nor the arrival of a StartWave that is not repeated.
    sure: bool = True
    from_outside: bool = False


class FaultError(AssertionError):
    pass


@dataclass
class Model:
    #: One generation, or two. With two, the first changes to the second unless it is aborted.
    generations: list[tuple[int, ...]]
    #: Number of requests of one token each. They arrive at any rank at any time.
    num_tokens: int
    num_pauses: int = 0
    #: Restarts of the coordinator during a commit.
    num_restarts: int = 0
    #: Whether a new coordinator finds commits that ranks received but have not completed.
    finds_commits: bool = True
    rank_class: type[Rank] = Rank
    #: One of these ranks dies at any time. Then there is an urgent generation of the others.
    mortals: tuple[int, ...] = ()
    #: A rank dies only after the commit of a generation without it. None is urgent.
    waits_for_commit: bool = False
    #: Ranks begin empty waves until all have voted for the commit, not only once.
    may_repeat_votes: bool = False
    parents: dict[State, tuple[State, Move] | None] = field(default_factory=dict)
    edges: dict[State, list[tuple[Move, State]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._num_planned = len(self.generations)
        for members, dead in itertools.product(self.generations[:], self.mortals):
            self.generations.append(tuple(member for member in members if member != dead))

    def explore(self) -> int:
        """Explore all states, and return their number.

        Raises:
            FaultError: a state breaks an invariant.
        """
        # None of the many tuples is garbage, but collection would take a third of the time.
        gc.disable()
        try:
            return self._explore()
        finally:
            gc.enable()

    def _explore(self) -> int:
        todo = deque([self._first()])
        self.parents[todo[0]] = None
        while todo:
            state = todo.popleft()
            self._check(state)
            edges = self.edges[state] = []
            for move in self._moves(state):
                after = self._after(state, move)
                if after == state:
                    continue
                edges.append((move, after))
                if after not in self.parents:
                    self.parents[after] = (state, move)
                    todo.append(after)
            if not any(move.sure for move, _ in edges):
                self._check_rest(state)
        if not self.may_repeat_votes:
            self._check_every_run_ends()
        self._check_all_requests_are_served()
        return len(self.parents)

    # States and moves

    def _first(self) -> State:
        num_ranks = 1 + max(itertools.chain(*self.generations))
        ranks = new_ranks(self.generations, num_ranks, self.rank_class)
        ranks.unassigned = self.num_tokens
        if self._num_planned > 1:
            for index in range(num_ranks):
                ranks.take_target(index, 1)
        return self._state(ranks, "", NONE, self.num_pauses, self.num_restarts)

    def _ranks(self, state: State) -> Ranks:
        ranks = Ranks(self.generations, [self.rank_class.from_key(key) for key in state.ranks])
        ranks.begun = set(state.begun)
        ranks.unassigned = state.unassigned
        return ranks

    def _state(self, ranks: Ranks, decision: str, urgent: int, pauses: int, restarts: int) -> State:
        """Return the state with reduced wave numbers, because only their differences matter.

        Numbers of waves that have ended on all ranks become 0.
        """
        keys = [rank.key() for rank in ranks.ranks]
        begun = ranks.begun
        for generation in range(len(self.generations)):
            shift = min((key.wave for key in keys if key.current == generation), default=0) - 1
            if shift > 0:
                for index, key in enumerate(keys):
                    if key.current == generation:
                        keys[index] = key._replace(
                            wave=key.wave - shift, awaited=max(key.awaited - shift, 0)
                        )
                begun = {
                    (g, max(wave - shift, 0) if g == generation else wave) for g, wave in begun
                }
        return State(
            tuple(keys), frozenset(begun), ranks.unassigned, decision, urgent, pauses, restarts
        )

    def _moves(self, state: State) -> Iterator[Move]:
        repeated = {(key.current, key.wave) for key in state.ranks if key.repeats}
        ranks = self._ranks(state)
        for index, key in enumerate(state.ranks):
            if key.dead:
                continue
            lives = key.current != NONE and not key.broken
            if key.vote is None and key.votes is None:
                if self._may_enter(ranks.ranks[index]):
                    yield Move("enter", index)
                if state.decision in ("commit", "abort") and not key.received:
                    yield Move(state.decision, index)
                if state.decision == "forgotten" and not key.received:
                    yield Move("commit", index, sure=False)  # in flight from the old coordinator
                for generation, wave in state.begun:
                    if generation not in (key.current, key.target):
                        continue
                    sure = (generation, wave) in repeated and index in self.generations[generation]
                    yield Move("start", index, generation, wave, sure=sure)
            elif key.votes is not None:
                yield Move("finish", index)
            if not (key.vote is None and key.votes is None) and ranks.has_lost(index):
                # The loss of a frozen member is not detected.
                yield Move("break", index, sure=self.waits_for_commit)
                yield Move("lose votes", index, sure=False)
            if state.decision == "urgent" and not key.received:
                yield Move("urgent", index)
            if state.unassigned and lives:
                yield Move("request", index, sure=False, from_outside=True)
            if state.pauses and not key.paused and lives:
                yield Move("pause", index, sure=False, from_outside=True)
            if key.paused:
                yield Move("resume", index, sure=False, from_outside=True)
        yield from self._moves_of_the_coordinator(state)

    def _moves_of_the_coordinator(self, state: State) -> Iterator[Move]:
        if self._num_planned > 1 and not state.decision:
            yield Move("decide commit", sure=False, from_outside=True)
            yield Move("decide abort", sure=False, from_outside=True)
        if state.decision == "commit" and state.restarts:
            yield Move("decide forgotten", sure=False, from_outside=True)
        if state.decision == "forgotten":
            known = any(
                not key.dead and (key.current == 1 or (key.committed and self.finds_commits))
                for key in state.ranks
            )
            yield Move("decide commit" if known else "decide abort")
        if any(key.dead for key in state.ranks):
            if state.decision != "urgent" and not self.waits_for_commit:
                yield Move("decide urgent")
        elif not self.waits_for_commit or state.decision == "commit":
            for index in self.mortals:
                yield Move("die", index, sure=False, from_outside=True)

    def _may_enter(self, rank: Rank) -> bool:
        return rank.may_enter() or (
            self.may_repeat_votes and rank.waves is not None and rank.committed
        )

    def _after(self, state: State, move: Move) -> State:
        ranks = self._ranks(state)
        decision, urgent, pauses, restarts = (
            state.decision,
            state.urgent,
            state.pauses,
            state.restarts,
        )
        try:
            match move.name:
                case "enter":
                    ranks.enter(move.index)
                case "finish":
                    ranks.finish(move.index)
                case "start":
                    ranks.take_start(move.index, move.generation, move.wave)
                case "commit":
                    ranks.take_commit(move.index)
                case "abort":
                    ranks.take_abort(move.index)
                case "request":
                    ranks.ranks[move.index].tokens += 1
                    ranks.unassigned -= 1
                case "pause":
                    ranks.ranks[move.index].paused = True
                    pauses -= 1
                case "resume":
                    ranks.ranks[move.index].paused = False
                case "die":
                    ranks.unassigned += ranks.ranks[move.index].tokens
                    ranks.die(move.index)
                case "break":
                    ranks.break_(move.index)
                case "lose votes":
                    ranks.break_(move.index, knows_votes=False)
                case "urgent":
                    ranks.take_urgent(move.index, state.urgent)
                case "decide urgent":
                    urgent = self._urgent_generation(ranks, decision)
                    decision = "urgent"
                    for rank in ranks.ranks:
                        rank.received = False
                case _:
                    decision = move.name.removeprefix("decide ")
                    restarts -= decision == "forgotten"
                    if state.decision == "forgotten":
                        for rank in ranks.ranks:
                            rank.received = False
        except AssertionError as error:
            self._fail(f"{move}: {error}", state)
        return self._state(ranks, decision, urgent, pauses, restarts)

    def _urgent_generation(self, ranks: Ranks, decision: str) -> int:
        members = self.generations[1 if decision in ("commit", "forgotten") else 0]
        living = tuple(member for member in members if not ranks.ranks[member].dead)
        return self.generations.index(living, self._num_planned)

    # Invariants

    def _check(self, state: State) -> None:
        for key in state.ranks:
            if key.running and (key.current, key.wave) not in state.begun:
                self._fail("a wave runs that no rank has begun", state)
        if self._num_planned == 1 or any(key.dead for key in state.ranks):
            return
        old, new = (set(members) for members in self.generations[:2])
        moved = {index for index in old if state.ranks[index].current != 0}
        for index in old - moved if moved else ():
            votes = state.ranks[index].votes
            if votes is None or not all(vote.commit for vote in votes):
                self._fail("a rank is left behind in the old generation", state)
        if state.decision not in ("commit", "forgotten") and (
            moved or any(state.ranks[index].current == 1 for index in new)
        ):
            self._fail("a rank is in a generation that was not committed", state)

    def _check_rest(self, state: State) -> None:
        """Check that all work is done in a state in which only external moves are possible."""
        for index, key in enumerate(state.ranks):
            if key.vote is not None:
                self._fail(f"rank {index} waits in an exchange that never completes", state)
            if key.running:
                self._fail(f"rank {index} is in a wave that does not continue", state)
            if key.tokens and not key.paused:
                self._fail(f"rank {index} does not run its tokens", state)
            if key.dead:
                continue
            home = {"commit": 1, "urgent": state.urgent}.get(state.decision, 0)
            if key.broken or key.current != (home if index in self.generations[home] else NONE):
                self._fail(f"rank {index} is not in the generation that was decided", state)

    def _check_every_run_ends(self) -> None:
        """Check that no cycle of internal moves exists, so that ranks always come to rest."""
        #: False: on the stack; True: known to end.
        colors: dict[State, bool] = {}
        for root in self.edges:
            if root in colors:
                continue
            colors[root] = False
            stack = [(root, self._inner(root))]
            while stack:
                state, following = stack[-1]
                after = next(following, None)
                if after is None:
                    colors[state] = True
                    stack.pop()
                elif after not in colors:
                    colors[after] = False
                    stack.append((after, self._inner(after)))
                elif not colors[after]:
                    self._fail("the ranks never stop stepping without work", after)

    def _inner(self, state: State) -> Iterator[State]:
        return iter([after for move, after in self.edges[state] if not move.from_outside])

    def _check_all_requests_are_served(self) -> None:
        before: dict[State, list[State]] = {}
        for state, edges in self.edges.items():
            for move, after in edges:
                if move.sure or move.from_outside:
                    before.setdefault(after, []).append(state)
        good = {state for state in self.edges if self._is_served(state)}
        todo = list(good)
        while todo:
            for state in before.get(todo.pop(), ()):
                if state not in good:
                    good.add(state)
                    todo.append(state)
        for state in self.edges:
            if state not in good:
                self._fail("a request is never served from this state on", state)

    def _is_served(self, state: State) -> bool:
        return not state.unassigned and all(
            not key.tokens and key.vote is None and key.votes is None and not key.running
            for key in state.ranks
        )

    def _fail(self, what: str, state: State) -> None:
        moves: list[Move] = []
        step = self.parents[state]
        last = state
        while step is not None:
            state, move = step
            moves.append(move)
            step = self.parents[state]
        way = "\n".join(
            "  " + " ".join(str(part) for part in move[:4] if part != NONE)
            for move in reversed(moves)
        )
        ranks = "\n".join(f"  {index}: {key}" for index, key in enumerate(last.ranks))
        raise FaultError(f"{what}, after\n{way}\nranks\n{ranks}\n  {last[1:]}")
