"""A simulated rank that follows directives as `protocol.topology` describes.

For the tests of the topology controller and the coordinator process.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton_protocol.topology import (
    Activity,
    Directive,
    ExpertLoads,
    Generation,
    RankPhase,
    Status,
    TopologyMember,
)

NUM_LAYERS, NUM_EXPERTS = 2, 4


@dataclass
class SimulatedRank:
    """One process of a rank."""

    member: TopologyMember
    phase: RankPhase = RankPhase.STANDBY
    generation: Generation | None = None
    #: The generation that it prepares or has prepared. Another target replaces it.
    target: Generation | None = None
    prepared: bool = False
    votes_for: Generation | None = None
    commit_seen: str = ""
    failed: str = ""
    failure: str = ""
    suspects: tuple[str, ...] = ()
    leaving: bool = False
    num_requests: int = 0
    step: int = 0
    activity: Activity = Activity.RESTS
    #: The activity in which its loop is stalled. Its link still works.
    stalled_in: Activity | None = None
    alive: bool = True
    frozen: bool = False
    cannot_prepare: bool = False
    #: Its rendezvous store does not respond.
    store_is_dead: bool = False
    never_finishes_preparing: bool = False
    never_commits: bool = False
    steps_to_prepare: int = 2
    #: Steps since another member of its generation was lost.
    steps_alone: int = 0
    committed: list[Generation] = field(default_factory=list)
    loads: ExpertLoads | None = None
    num_experts: int = NUM_EXPERTS
    expert_bytes: int = 100
    inbox: list[Directive] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.member.instance_id

    @property
    def runs(self) -> bool:
        return self.alive and not self.frozen

    @property
    def obeys(self) -> bool:
        return self.runs and self.stalled_in is None

    def status(self) -> Status:
        return Status(
            self.member,
            self.phase,
            self.num_experts,
            NUM_LAYERS,
            generation=self.generation,
            prepared=self.target.nonce if self.target is not None and self.prepared else "",
            commit_seen=self.commit_seen,
            failed=self.failed,
            failure=self.failure,
            suspects=self.suspects,
            loads=self.loads,
            leaving=self.leaving,
            num_running=self.num_requests,
            committed=self.votes_for,
            step=self.step,
            activity=self.activity,
            expert_bytes=self.expert_bytes,
        )

    def obey(self, directive: Directive) -> None:
        target = directive.target
        if directive.dismissed:
            if self.generation is not None:
                self.leave()
        elif target is None:
            if self.target is not None and self.target.nonce != self.commit_seen:
                self._drop()
        elif self.phase is not RankPhase.LOADING and not self._refuses(target):
            self._follow(target, directive.commit)

    def _refuses(self, target: Generation) -> bool:
        return self.generation is not None and target.number <= self.generation.number

    def _follow(self, target: Generation, commit: bool) -> None:
        if self.target is not None and self.target.nonce != target.nonce:
            self._drop()
        if self.votes_for is not None and self.votes_for.nonce != target.nonce:
            self.votes_for = None
        if target.urgent and self.phase is RankPhase.SERVING:
            self.phase = RankPhase.BROKEN
        if (
            target.rank_of(self.id) is not None
            and self.target is None
            and self.failed != target.nonce
        ):
            self.target, self.prepared = target, False
        if commit:
            self.commit_seen = target.nonce
            self.votes_for = target
            if target.urgent and target.rank_of(self.id) is None and self.generation is not None:
                self.leave()

    def advance(self, others: dict[str, SimulatedRank]) -> None:
        """Advance the preparation. Commit at once if the target is urgent or the rank is new."""
        target = self.target
        if target is None:
            return
        if not self.prepared:
            store = target.store_host, target.store_port
            meets = not any(
                each.store_is_dead and store == (each.member.host, each.member.store_port)
                for each in others.values()
            )
            if self.cannot_prepare or not meets:
                self._drop()
                self.failed, self.failure = (
                    target.nonce,
                    "the disk is full" if meets else "no store answers",
                )
                return
            met = all(
                (other := others.get(member.instance_id)) is not None
                and (other.target is target or other.target == target or other.generation == target)
                for member in target.members
            )
            if met and not self.never_finishes_preparing:
                self.steps_to_prepare -= 1
                self.prepared = self.steps_to_prepare <= 0
        if (
            self.prepared
            and self.votes_for == target
            and (target.urgent or self.generation is None)
        ):
            self.commit()

    def commit(self) -> None:
        if self.never_commits:
            return
        assert self.prepared
        assert all(self.target.number > before.number for before in self.committed), (
            "a generation's number decreased"
        )
        self.generation, self.target, self.prepared, self.votes_for = self.target, None, False, None
        self.committed.append(self.generation)
        self.loads = None
        self.phase, self.suspects, self.failure, self.steps_alone = RankPhase.SERVING, (), "", 0
        self.steps_to_prepare = 2

    def leave(self) -> None:
        self.generation, self.phase, self.suspects, self.votes_for = (
            None,
            RankPhase.STANDBY,
            (),
            None,
        )
        self._drop()

    def _drop(self) -> None:
        self.target, self.prepared, self.steps_to_prepare = None, False, 2
