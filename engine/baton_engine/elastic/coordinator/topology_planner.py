"""Decides the next generation of a group: its members, and the placement of the experts on them.

`TopologyPlanner.need` decides which change is needed, and which ranks are the members.
`TopologyPlanner.next_generation` returns the generation with these members. The controller chooses
the time, and applies the decision.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from baton_engine.elastic.coordinator.operation import Rebalancing
from baton_engine.elastic.coordinator.placement.balance import Balance
from baton_engine.elastic.coordinator.roster import Roster, key_of, nonce_of, serves_in
from baton_protocol.topology import Generation, RankPhase, Status, TopologyMember


@dataclass(frozen=True, slots=True)
class Need:
    """The change of the topology that is needed now."""

    #: form, scale, recover or rebalance.
    kind: str
    #: Names of the desired members.
    wanted: frozenset[str]
    #: Members of the generation that is possible now, in rank order.
    members: tuple[TopologyMember, ...]
    #: Names of desired members that cannot be members yet.
    missing: tuple[str, ...] = ()
    #: Whether the present generation is broken, so that members commit the next one without a vote.
    urgent: bool = False
    reason: str = ""
    #: The automatic rebalance that is due, if `kind` is rebalance and it was not requested.
    rebalancing: Rebalancing | None = None


@dataclass(frozen=True, slots=True)
class TopologyPlanner:
    """Decides the next generation from the state of a group at one time."""

    roster: Roster
    #: Places experts on ranks, and measures whether their load is balanced.
    balance: Balance
    #: Current generation of the group.
    present: Generation | None
    #: Names of the requested members.
    desired: frozenset[str]
    #: Instance ids that new generations exclude for a time if other ranks exist.
    excluded: Set[str]

    def need(self, defect: str, *, rebalance: bool, now: float) -> Need | None:
        """Return the change that leads to the desired topology, or None if no change is needed.

        Args:
            defect: why the present generation must be replaced although all its members serve.
                Empty: no replacement is needed.
            rebalance: whether a rebalance was requested.
            now: the time. If a measuring window of `balance` has ended, the next window starts.
        """
        if self.present is None:
            return self._form() if self.desired else None
        if broken := defect or self.breakage():
            return self._recover(self.present, broken)
        scaling = self._scale(self.present)
        if scaling is not None and scaling.members != self.present.members:
            return scaling
        if rebalance:
            return Need(
                "rebalance",
                self.wanted(),
                self.present.members,
                reason="a rebalance was requested",
            )
        due = self.balance.due(self.present, now)  # measures even if ranks are missing
        if due is None or scaling is not None:
            return scaling
        return Need(
            "rebalance",
            self.wanted(),
            self.present.members,
            reason=f"the busiest rank has {due.before:.2f} times the mean load, and "
            f"{due.after:.2f} times after the moves",
            rebalancing=due,
        )

    def next_generation(
        self, need: Need, *, number: int, drawn: str, operation_id: str, store: TopologyMember
    ) -> Generation:
        """Return the generation with the members of `need`, and a placement of the experts on them.

        Args:
            need: the needed change, with at least one member.
            number: number of the generation.
            drawn: random text for the generation's nonce.
            operation_id: id of the request that caused the change. Empty if no request did.
            store: the member whose rendezvous store the generation uses.

        Raises:
            ValueError: no placement of the experts on these members exists.
        """
        return Generation(
            number=number,
            nonce=nonce_of(number, drawn),
            members=need.members,
            placement=(
                self.balance.place(need.members, self.present, keep=need.urgent)
                if need.rebalancing is None
                else need.rebalancing.placement
            ),
            store_host=store.host,
            store_port=store.store_port,
            operation_id=operation_id,
            urgent=need.urgent,
        )

    def wanted(self) -> frozenset[str]:
        """Return the names of the desired members, without members that are shutting down."""
        return frozenset(name for name in self.desired if not self._leaves(name))

    def unfit(self, status: Status) -> str:
        """Return why a living rank cannot be a new member now. Empty: the rank can be a member."""
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
            return "serves a model without experts"
        if shape != expected:
            return (
                f"has {shape[0]} sparse layers of {shape[1]} experts, the group has {expected[0]} "
                f"of {expected[1]}"
            )
        return ""

    def newcomer(self, name: str) -> TopologyMember | None:
        for status in self.roster.living.values():
            if status.member.name == name and not self.unfit(status):
                return status.member
        return None

    def newcomers(self, names: Set[str]) -> tuple[TopologyMember, ...]:
        """Return the ranks with these names that can be new members now, sorted by name."""
        members = (self.newcomer(name) for name in sorted(names))
        return tuple(member for member in members if member is not None)

    def breakage(self) -> str:
        """Return why the present generation cannot continue, or an empty string if it can."""
        if self.present is None:
            return ""
        for member in self.present.members:
            status = self.roster.living.get(member.instance_id)
            if status is None:
                return f"{member.name} sends no status"
            generation = serves_in(status)
            if generation is None or key_of(generation) != key_of(self.present):
                return f"{member.name} is not in generation {self.present.number}"
            if status.phase is RankPhase.BROKEN:
                return f"{member.name} reports a broken generation: {status.failure}"
        return ""

    def ends(self) -> bool:
        """Return whether the whole group has finished, so that its ranks can be dismissed.

        The group has finished when all serving ranks are shutting down without running or waiting
        requests, and no desired member can join. Until then, the ranks need each other's experts to
        complete requests.
        """
        serving = [status for status, _ in self.roster.serving()]
        all_idle = all(
            status.leaving and not status.num_running and not status.num_waiting
            for status in serving
        )
        return bool(serving) and all_idle and not self.newcomers(self.wanted())

    def _form(self) -> Need:
        wanted = self.wanted()
        members = self.newcomers(wanted)
        return Need(
            "form", wanted, members, tuple(sorted(wanted - {member.name for member in members}))
        )

    def _recover(self, present: Generation, reason: str) -> Need:
        """Return the change to a generation of surviving members and new members.

        Survivors are members of `present` that still serve. They keep their order and get the
        lowest ranks. Unwanted and excluded survivors leave. If the generation would otherwise be
        empty, all survivors stay.
        """
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
        rank = self.roster.find_by_name(name)
        return rank is not None and rank.status.leaving

    def _shape(self) -> tuple[int, int]:
        """Return the group's number of sparse layers and of experts per layer.

        Without a generation, return the numbers that most ranks report.
        """
        living = self.roster.living
        if self.present is not None:
            for member in self.present.members:
                if member.instance_id in living:
                    return _shape(living[member.instance_id])
        shapes = [_shape(status) for status in living.values() if 0 not in _shape(status)]
        return max(shapes, key=lambda shape: (shapes.count(shape), shape), default=(0, 0))


def _shape(status: Status) -> tuple[int, int]:
    return status.num_sparse_layers, status.num_experts
