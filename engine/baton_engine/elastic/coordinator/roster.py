"""The roster: the latest Status of every rank's process, and which processes are living."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from baton_protocol.topology import Generation, RankPhase, Status

#: Time without a status after which an instance is removed.
FORGET_AFTER_S = 300.0

#: Number and nonce, which identify a generation.
GenerationKey = tuple[int, str]


def key_of(generation: Generation) -> GenerationKey:
    return generation.number, generation.nonce


def nonce_of(number: int, drawn: str) -> str:
    """Return a nonce made of a generation's number and the random text `drawn`.

    The coordinator reads the number from nonces that ranks report.
    """
    return f"{number}.{drawn}"


#: Maximum number of digits of a generation's number in a nonce.
MAX_DIGITS = 15


def number_of(nonce: str) -> int:
    """Return the generation number that a nonce contains, or 0 if it contains none."""
    number, dot, _ = nonce.partition(".")
    known = dot and number.isascii() and number.isdecimal() and len(number) <= MAX_DIGITS
    return int(number) if known else 0


def serves_in(status: Status) -> Generation | None:
    """Return the rank's generation in phases SERVING and BROKEN, or None in other phases."""
    return status.generation if status.phase in (RankPhase.SERVING, RankPhase.BROKEN) else None


@dataclass(slots=True)
class Rank:
    """The state of one registered instance, which is the process of a rank."""

    status: Status
    #: Position in the order of registrations.
    order: int
    #: Time of the last status, in seconds.
    seen: float
    #: Time of the last status that showed progress of the engine loop, in seconds.
    moved: float


class Roster:
    """All registered instances (processes of ranks). `update` decides which are living."""

    def __init__(self, dead_after_s: float, suspect_dead_after_s: float) -> None:
        self._dead_after_s = dead_after_s
        self._suspect_dead_after_s = suspect_dead_after_s
        self._registrations = 0
        #: Instances by id.
        self.ranks: dict[str, Rank] = {}
        #: Statuses of living instances by id, as of the last `update`.
        self.living: dict[str, Status] = {}
        #: Instances that count as dead, because a later instance of the same name sends statuses.
        self.replaced: set[str] = set()
        #: Instances that count as dead until their loop makes progress.
        self.stalled: set[str] = set()
        #: Highest number of a generation in any status.
        self.highest_number = 0

    def on_status(self, status: Status, now: float) -> None:
        """Record the status of an instance. The first status registers the instance."""
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

    def discount_gap(self, gap_s: float, now: float) -> None:
        """Extend all deadlines by `gap_s` seconds, in which this process read no statuses."""
        for rank in self.ranks.values():
            rank.seen, rank.moved = min(rank.seen + gap_s, now), min(rank.moved + gap_s, now)

    def update(self, now: float) -> None:
        """Decide which instances are living.

        A living instance has sent a status within its deadline, and is not stalled. The deadline is
        shorter for instances that other ranks cannot reach. If several instances of one name meet
        these conditions, only the one that registered last is living. Instances without a status
        for FORGET_AFTER_S are removed.
        """
        for instance_id in [
            each for each, rank in self.ranks.items() if now - rank.seen > FORGET_AFTER_S
        ]:
            del self.ranks[instance_id]
        self.stalled &= self.ranks.keys()
        recent = {
            each: rank
            for each, rank in self.ranks.items()
            if now - rank.seen <= self._dead_after_s and each not in self.stalled
        }
        suspects = {suspect for rank in recent.values() for suspect in rank.status.suspects}
        alive = {
            each: rank
            for each, rank in recent.items()
            if each not in suspects or now - rank.seen <= self._suspect_dead_after_s
        }
        latest: dict[str, str] = {}
        for instance_id in sorted(alive, key=lambda each: alive[each].order):
            latest[alive[instance_id].status.member.name] = instance_id
        self.living = {each: alive[each].status for each in latest.values()}
        self.replaced = alive.keys() - self.living.keys()

    def find_by_name(self, name: str) -> Rank | None:
        """Return the living instance of this name.

        If none is living, return the instance of this name that registered last. None: this name
        has no instance.
        """
        ranks = [rank for rank in self.ranks.values() if rank.status.member.name == name]
        return max(
            ranks,
            key=lambda rank: (rank.status.member.instance_id in self.living, rank.order),
            default=None,
        )

    def is_left_behind(self, instance_id: str, present: Generation | None) -> bool:
        """Return whether an instance still serves, but it or its generation has been replaced."""
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
        """Yield (status, generation) for each living rank that is SERVING or BROKEN."""
        for status in self.living.values():
            generation = serves_in(status)
            if generation is not None:
                yield status, generation

    def present(self) -> Generation | None:
        """Return the highest generation in which a living rank serves, or None if none serves.

        If two generations have the same number, return the generation that more ranks report.
        """
        known: dict[GenerationKey, Generation] = {}
        reporters: Counter[GenerationKey] = Counter()
        for _, generation in self.serving():
            known[key_of(generation)] = generation
            reporters[key_of(generation)] += 1
        if not known:
            return None
        return known[max(known, key=lambda key: (key[0], reporters[key], key[1]))]


def _position(status: Status) -> tuple[object, ...]:
    """Return the fields of a status that change only if the rank's engine loop makes progress."""
    nonce = "" if status.generation is None else status.generation.nonce
    return (
        status.phase,
        nonce,
        status.prepared,
        status.commit_seen,
        status.failed,
        status.leaving,
        status.step,
        status.activity,
    )
