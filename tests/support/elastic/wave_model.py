"""All interleavings of a few ranks, breadth first: states are explored once each, a fault comes with the moves that lead to it."""

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
    decision: str
    """Of the coordinator about generation 1: "", commit or abort; forgotten: it committed, and the one that has started since does
    not know; or urgent: there is another generation without the dead rank."""
    urgent: int
    """That generation."""
    pauses: int
    """How often somebody may still be paused."""
    restarts: int = 0
    """How often the coordinator may still be replaced by another one."""


class Move(NamedTuple):
    name: str
    index: int = NONE
    generation: int = NONE
    wave: int = NONE
    sure: bool = True
    """It happens by itself if nothing else does. Not so: what users and the coordinator do, and StartWaves that nobody repeats."""
    from_outside: bool = False


class FaultError(AssertionError):
    pass


@dataclass
class Model:
    generations: list[tuple[int, ...]]
    """One, or two: the first changes to the second unless the coordinator aborts."""
    num_tokens: int
    """Requests of one token each, which arrive anywhere at any time."""
    num_pauses: int = 0
    num_restarts: int = 0
    """Of the coordinator, while a commit is under way."""
    learns: bool = True
    """Another coordinator sees what ranks were told to adopt, and not only what they have adopted, and shows it again."""
    rank_class: type[Rank] = Rank
    mortals: tuple[int, ...] = ()
    """One of these ranks dies at any time. The coordinator then makes an urgent generation of the others."""
    waits_for_commit: bool = False
    """A rank dies only once the change is committed, it is not of the new generation, and there is no urgent one."""
    may_repeat_votes: bool = False
    """Ranks begin an empty wave again and again until the commit is voted by all, and not once only."""
    parents: dict[State, tuple[State, Move] | None] = field(default_factory=dict)
    edges: dict[State, list[tuple[Move, State]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._num_planned = len(self.generations)
        for members, dead in itertools.product(self.generations[:], self.mortals):
            self.generations.append(tuple(member for member in members if member != dead))

    def explore(self) -> int:
        """Returns the number of states. Raises FaultError."""
        # Hundreds of thousands of tuples, none of them garbage: looking for it takes a third of the time.
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
        self._check_all_is_served_in_the_end()
        return len(self.parents)

    # -- states and moves

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
        """Wave numbers only matter relative to each other: those that have ended everywhere become 0, the others follow."""
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
                if state.decision in ("commit", "abort") and not key.told:
                    yield Move(state.decision, index)
                if state.decision == "forgotten" and not key.told:
                    yield Move("commit", index, sure=False)  # of the old coordinator, under way
                for generation, wave in state.begun:
                    if generation not in (key.current, key.target):
                        continue
                    sure = (generation, wave) in repeated and index in self.generations[generation]
                    yield Move("start", index, generation, wave, sure=sure)
            elif key.votes is not None:
                yield Move("finish", index)
            if not (key.vote is None and key.votes is None) and ranks.has_lost(index):
                # A frozen member is not noticed.
                yield Move("break", index, sure=self.waits_for_commit)
                yield Move("lose votes", index, sure=False)
            if state.decision == "urgent" and not key.told:
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
                not key.dead and (key.current == 1 or (key.committed and self.learns))
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
                        rank.told = False
                case _:
                    decision = move.name.removeprefix("decide ")
                    restarts -= decision == "forgotten"
                    if state.decision == "forgotten":
                        for rank in ranks.ranks:
                            rank.told = False
        except AssertionError as error:
            self._fail(f"{move}: {error}", state)
        return self._state(ranks, decision, urgent, pauses, restarts)

    def _urgent_generation(self, ranks: Ranks, decision: str) -> int:
        members = self.generations[1 if decision in ("commit", "forgotten") else 0]
        living = tuple(member for member in members if not ranks.ranks[member].dead)
        return self.generations.index(living, self._num_planned)

    # -- what must hold

    def _check(self, state: State) -> None:
        for key in state.ranks:
            if key.running and (key.current, key.wave) not in state.begun:
                self._fail("a wave runs that nobody has begun", state)
        if self._num_planned == 1 or any(key.dead for key in state.ranks):
            return
        old, new = (set(members) for members in self.generations[:2])
        adopted = {index for index in old if state.ranks[index].current != 0}
        for index in old - adopted if adopted else ():
            votes = state.ranks[index].votes
            if votes is None or not all(vote.commit for vote in votes):
                self._fail("a rank is left behind in the old generation", state)
        if state.decision not in ("commit", "forgotten") and (
            adopted or any(state.ranks[index].current == 1 for index in new)
        ):
            self._fail("a generation is adopted that was not committed", state)

    def _check_rest(self, state: State) -> None:
        """Nothing happens any more unless from outside: then nothing may be left to do."""
        for index, key in enumerate(state.ranks):
            if key.vote is not None:
                self._fail(f"rank {index} waits in an exchange that is never done", state)
            if key.running:
                self._fail(f"rank {index} is in a wave that does not go on", state)
            if key.tokens and not key.paused:
                self._fail(f"rank {index} does not run its tokens", state)
            if key.dead:
                continue
            home = {"commit": 1, "urgent": state.urgent}.get(state.decision, 0)
            if key.broken or key.current != (home if index in self.generations[home] else NONE):
                self._fail(f"rank {index} is not in the generation that was decided", state)

    def _check_every_run_ends(self) -> None:
        """Whatever the order, ranks to whom nothing comes from outside come to rest: no circle of moves."""
        colors: dict[State, bool] = {}
        """False: on the way; True: seen to end."""
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
                    self._fail("the ranks step for ever without a reason", after)

    def _inner(self, state: State) -> Iterator[State]:
        return iter([after for move, after in self.edges[state] if not move.from_outside])

    def _check_all_is_served_in_the_end(self) -> None:
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
                self._fail("from here some request is never served", state)

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
