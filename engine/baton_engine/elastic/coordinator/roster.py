"""Who is there: the last Status of every rank's process, and which of them live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from baton_protocol.topology import Generation, RankPhase, Status

FORGET_AFTER_S = 300.0
"""An instance that is silent for so long is not shown any more."""

GenerationKey = tuple[int, str]
"""Number and nonce: what a generation is told apart by."""


def key_of(generation: Generation) -> GenerationKey:
    return generation.number, generation.nonce


def nonce_of(number: int, drawn: str) -> str:
    """Controllers write the number into the nonce: a rank that reports no generation still gives the number back."""
    return f"{number}.{drawn}"


MAX_DIGITS = 15
"""Of a generation's number."""


def number_of(nonce: str) -> int:
    """0: it does not say."""
    number, dot, _ = nonce.partition(".")
    known = dot and number.isascii() and number.isdecimal() and len(number) <= MAX_DIGITS
    return int(number) if known else 0


def serves_in(status: Status) -> Generation | None:
    """The generation whose requests the rank has, also if it is broken."""
    return status.generation if status.phase in (RankPhase.SERVING, RankPhase.BROKEN) else None


@dataclass(slots=True)
class Rank:
    """One instance, as it was last heard of."""

    status: Status
    order: int
    """Counts registrations."""
    seen: float
    moved: float
    """When its loop was last seen to have done something."""


class Roster:
    """All instances that have reported. What lives is decided by `update`, once for all questions that follow."""

    def __init__(self, dead_after_s: float, suspect_dead_after_s: float) -> None:
        self._dead_after_s = dead_after_s
        self._suspect_dead_after_s = suspect_dead_after_s
        self._registrations = 0
        self.ranks: dict[str, Rank] = {}
        """By instance id."""
        self.living: dict[str, Status] = {}
        """By instance id; as of the last `update`."""
        self.replaced: set[str] = set()
        """Instances that report, though a later one of their name does, too. They count as dead."""
        self.stalled: set[str] = set()
        """Instances that report, though their loops stand still. They count as dead until they move."""
        self.highest_number = 0
        """Of all generations that ranks were ever in, or were told of, as far as they say."""

    def on_status(self, status: Status, now: float) -> None:
        rank = self.ranks.get(status.member.instance_id)
        if rank is None:
            self._registrations += 1
            self.ranks[status.member.instance_id] = Rank(status, self._registrations, now, now)
        else:
            if _position(status) != _position(rank.status):
                rank.moved = now
                self.stalled.discard(status.member.instance_id)
            rank.status, rank.seen = status, now
        number = 0 if status.generation is None else status.generation.number
        nonces = (status.prepared, status.commit_seen, status.failed)
        self.highest_number = max(self.highest_number, number, *map(number_of, nonces))

    def forgive(self, gap_s: float, now: float) -> None:
        """Nobody could be heard for so long."""
        for rank in self.ranks.values():
            rank.seen, rank.moved = min(rank.seen + gap_s, now), min(rank.moved + gap_s, now)

    def update(self, now: float) -> None:
        """Decides who lives: who was heard of lately, with a shorter deadline for whom others miss; one instance per name."""
        for instance_id in [
            each for each, rank in self.ranks.items() if now - rank.seen > FORGET_AFTER_S
        ]:
            del self.ranks[instance_id]
        self.stalled &= self.ranks.keys()
        heard = {
            each: rank
            for each, rank in self.ranks.items()
            if now - rank.seen <= self._dead_after_s and each not in self.stalled
        }
        suspects = {suspect for rank in heard.values() for suspect in rank.status.suspects}
        answering = {
            each: rank
            for each, rank in heard.items()
            if each not in suspects or now - rank.seen <= self._suspect_dead_after_s
        }
        latest: dict[str, str] = {}
        for instance_id in sorted(answering, key=lambda each: answering[each].order):
            latest[answering[instance_id].status.member.name] = instance_id
        self.living = {each: answering[each].status for each in latest.values()}
        self.replaced = answering.keys() - self.living.keys()

    def of_name(self, name: str) -> Rank | None:
        """The living instance of this name, else the last one that lived."""
        ranks = [rank for rank in self.ranks.values() if rank.status.member.name == name]
        return max(
            ranks,
            key=lambda rank: (rank.status.member.instance_id in self.living, rank.order),
            default=None,
        )

    def is_left_behind(self, instance_id: str, present: Generation | None) -> bool:
        """The group has gone on without this one, and it does not know."""
        rank = self.ranks.get(instance_id)
        generation = None if rank is None else serves_in(rank.status)
        if generation is None:
            return False
        if instance_id in self.replaced:
            return True
        return (
            present is not None
            and key_of(generation) != key_of(present)
            and generation.number <= present.number
        )

    def serving(self) -> Iterator[tuple[Status, Generation]]:
        """Living ranks that have a generation, with it."""
        for status in self.living.values():
            generation = serves_in(status)
            if generation is not None:
                yield status, generation

    def present(self) -> Generation | None:
        """The highest generation that a living rank reports; of two with one number the one that more of them report."""
        known: dict[GenerationKey, Generation] = {}
        reporters: Counter[GenerationKey] = Counter()
        for _, generation in self.serving():
            known[key_of(generation)] = generation
            reporters[key_of(generation)] += 1
        if not known:
            return None
        return known[max(known, key=lambda key: (key[0], reporters[key], key[1]))]


def _position(status: Status) -> tuple[object, ...]:
    """What a loop that goes on changes, sooner or later."""
    nonce = "" if status.generation is None else status.generation.nonce
    return (
        *(status.phase, nonce, status.prepared, status.commit_seen, status.failed, status.leaving),
        *(status.step, status.activity),
    )
