"""What should be done now: a function of who is there, which generation they are in, and which names are asked for."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from baton_engine.elastic.coordinator.operation import Need
from baton_engine.elastic.coordinator.roster import Roster, key_of, serves_in
from baton_protocol.topology import Generation, Member, RankPhase, Status


@dataclass(frozen=True, slots=True)
class Observation:
    roster: Roster
    present: Generation | None
    """The generation that the group is in."""
    desired: frozenset[str]
    """Names asked for."""
    excluded: Set[str]
    """Instance ids that are left out for now, if anybody else is there."""

    def wanted(self) -> frozenset[str]:
        """Desired names, without those whose process was told to shut down; its successor is wanted again."""
        return frozenset(name for name in self.desired if not self._leaves(name))

    def unfit(self, status: Status) -> str:
        """Why a living rank cannot be a newcomer now; empty if it can."""
        if status.phase is not RankPhase.STANDBY:
            return f"is {status.phase}"
        if status.leaving:
            return "is leaving"
        if status.member.instance_id in self.excluded:
            return (
                f"could not be prepared: {status.failure}"
                if status.failure
                else "could not be prepared"
            )
        shape, expected = _shape(status), self._shape()
        if 0 in shape:
            return "has no experts"
        if shape != expected:
            return f"has {shape[0]} sparse layers of {shape[1]} experts, the group {expected[0]} of {expected[1]}"
        return ""

    def newcomer(self, name: str) -> Member | None:
        for status in self.roster.living.values():
            if status.member.name == name and not self.unfit(status):
                return status.member
        return None

    def newcomers(self, names: Set[str]) -> tuple[Member, ...]:
        """In order of names."""
        members = (self.newcomer(name) for name in sorted(names))
        return tuple(member for member in members if member is not None)

    def breakage(self) -> str:
        """Why the present generation cannot go on; empty if it can."""
        if self.present is None:
            return ""
        for member in self.present.members:
            status = self.roster.living.get(member.instance_id)
            if status is None:
                return f"{member.name} does not answer"
            generation = serves_in(status)
            if generation is None or key_of(generation) != key_of(self.present):
                return f"{member.name} is not in generation {self.present.number}"
            if status.phase is RankPhase.BROKEN:
                return f"{member.name} lost the others: {status.failure}"
        return ""

    def ends(self) -> bool:
        """All that serve were told to shut down, their requests have ended, and nobody is there to follow.

        Until then they need each other's experts; requests have their time to end, and go nowhere else.
        """
        serving = [status for status, _ in self.roster.serving()]
        rested = all(
            status.leaving and not status.num_running and not status.num_waiting
            for status in serving
        )
        return bool(serving) and rested and not self.newcomers(self.wanted())

    def need(self, forced: str = "") -> Need | None:
        """What is to be done so that what is becomes what should be; None: nothing.

        Args:
            forced: why the present generation has to be replaced even if it looks whole.
        """
        if self.present is None:
            return self._form() if self.desired else None
        broken = forced or self.breakage()
        if broken:
            return self._recover(self.present, broken)
        return self._scale(self.present)

    def _form(self) -> Need:
        wanted = self.wanted()
        members = self.newcomers(wanted)
        return Need(
            "form", wanted, members, tuple(sorted(wanted - {member.name for member in members}))
        )

    def _recover(self, present: Generation, reason: str) -> Need:
        """Survivors keep their order. Those that should leave anyway do so now, unless nobody would be left."""
        wanted = self.wanted()
        serving = {status.member.instance_id for status, _ in self.roster.serving()}
        survivors = [member for member in present.members if member.instance_id in serving]
        staying = [
            each
            for each in survivors
            if each.name in wanted and each.instance_id not in self.excluded
        ]
        names = wanted - {member.name for member in staying}
        members = (*staying, *self.newcomers(names)) or tuple(survivors)
        return Need("recover", wanted, members, urgent=True, reason=reason)

    def _scale(self, present: Generation) -> Need | None:
        wanted = self.wanted()
        if not wanted or wanted == {member.name for member in present.members}:
            return None
        staying = tuple(member for member in present.members if member.name in wanted)
        members = staying + self.newcomers(wanted - {member.name for member in staying})
        missing = tuple(sorted(wanted - {member.name for member in members}))
        return Need("scale", wanted, members, missing)

    def _leaves(self, name: str) -> bool:
        rank = self.roster.of_name(name)
        return rank is not None and rank.status.leaving

    def _shape(self) -> tuple[int, int]:
        """Of the group: as its members say, else as most ranks do."""
        living = self.roster.living
        if self.present is not None:
            for member in self.present.members:
                if member.instance_id in living:
                    return _shape(living[member.instance_id])
        shapes = [_shape(status) for status in living.values() if 0 not in _shape(status)]
        return max(shapes, key=lambda shape: (shapes.count(shape), shape), default=(0, 0))


def _shape(status: Status) -> tuple[int, int]:
    return status.num_sparse_layers, status.num_experts
