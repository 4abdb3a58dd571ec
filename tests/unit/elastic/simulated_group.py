"""A controller with simulated ranks: they do with directives what `protocol.topology` says, over a network that may lose messages.

Time goes in steps of STEP_S. A rank dies, freezes, wakes up or fails when it is told to; everything else follows from the messages.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from baton_engine.elastic.controller import Controller
from baton_engine.elastic.controller_config import ControllerConfig
from baton_engine.elastic.operation import Ended
from baton_engine.protocol.topology import (
    Directive,
    ExpertLoads,
    Generation,
    Member,
    OperationPhase,
    RankPhase,
    Status,
    TopologyRequest,
    TopologyStatus,
)

STEP_S = 0.1
STATUS_STEPS = 2
NUM_LAYERS, NUM_EXPERTS = 2, 4
CONFIG = ControllerConfig(
    form_after_s=3.0, wait_s=4.0, prepare_timeout_s=3.0, commit_timeout_s=2.0, retry_s=0.5, retry_max_s=4.0
)


@dataclass
class SimulatedRank:
    """One process."""

    member: Member
    phase: RankPhase = RankPhase.STANDBY
    generation: Generation | None = None
    target: Generation | None = None
    """That it prepares or has prepared; of another one it is told it drops this one."""
    prepared: bool = False
    votes_for: Generation | None = None
    commit_seen: str = ""
    failed: str = ""
    failure: str = ""
    suspects: tuple[str, ...] = ()
    leaving: bool = False
    alive: bool = True
    frozen: bool = False
    cannot_prepare: bool = False
    never_finishes_preparing: bool = False
    never_adopts: bool = False
    steps_to_prepare: int = 2
    steps_alone: int = 0
    """Since another member of its generation was gone."""
    adopted: list[Generation] = field(default_factory=list)
    loads: ExpertLoads | None = None
    num_experts: int = NUM_EXPERTS
    inbox: list[Directive] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.member.instance_id

    @property
    def runs(self) -> bool:
        return self.alive and not self.frozen

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
        if target.rank_of(self.id) is not None and self.target is None and self.failed != target.nonce:
            self.target, self.prepared = target, False
        if commit:
            self.commit_seen = target.nonce
            self.votes_for = target
            if target.urgent and target.rank_of(self.id) is None and self.generation is not None:
                self.leave()

    def advance(self, others: dict[str, SimulatedRank]) -> None:
        """Goes on with the preparation; adopts at once where that is allowed."""
        target = self.target
        if target is None:
            return
        if not self.prepared:
            if self.cannot_prepare:
                self._drop()
                self.failed, self.failure = target.nonce, "the disk is full"
                return
            met = all(
                (other := others.get(member.instance_id)) is not None
                and (other.target is target or other.target == target or other.generation == target)
                for member in target.members
            )
            if met and not self.never_finishes_preparing:
                self.steps_to_prepare -= 1
                self.prepared = self.steps_to_prepare <= 0
        if self.prepared and self.votes_for == target and (target.urgent or self.generation is None):
            self.adopt()

    def adopt(self) -> None:
        if self.never_adopts:
            return
        assert self.target is not None
        assert self.prepared
        assert all(self.target.number > before.number for before in self.adopted), "numbers only grow"
        self.generation, self.target, self.prepared, self.votes_for = self.target, None, False, None
        self.adopted.append(self.generation)
        self.phase, self.suspects, self.failure, self.steps_alone = RankPhase.SERVING, (), "", 0
        self.steps_to_prepare = 2

    def leave(self) -> None:
        self.generation, self.phase, self.suspects, self.votes_for = None, RankPhase.STANDBY, (), None
        self._drop()

    def _drop(self) -> None:
        self.target, self.prepared, self.steps_to_prepare = None, False, 2


class SimulatedRanks:
    """Ranks, and what they do together. How they talk to a coordinator is for subclasses."""

    def __init__(self) -> None:
        self.steps = 0
        self.ranks: dict[str, SimulatedRank] = {}

    def report(self, rank: SimulatedRank) -> None:
        """Sends its status."""
        raise NotImplementedError

    def add(self, name: str, **state: object) -> SimulatedRank:
        """A process starts. One of the same name that is there stays as it is."""
        number = len(self.ranks)
        member = Member(name, f"{name}#{number}", f"10.0.0.{number}", 5555, 5561, 29500)
        rank = self.ranks[member.instance_id] = replace(SimulatedRank(member), **state)  # type: ignore[arg-type]
        return rank

    def alive(self) -> dict[str, SimulatedRank]:
        return {rank.id: rank for rank in self.ranks.values() if rank.alive}

    def step_ranks(self) -> None:
        """All go on by STEP_S with what is in their inboxes."""
        self.steps += 1
        alive = self.alive()
        running = {each: rank for each, rank in alive.items() if rank.runs}
        for rank in running.values():
            inbox, rank.inbox = rank.inbox, []
            for directive in inbox:
                rank.obey(directive)
        for rank in running.values():
            rank.advance(running)
        for generation in {
            r.generation.nonce: r.generation for r in alive.values() if r.generation is not None
        }.values():
            self._vote(generation)
        for index, rank in enumerate(running.values()):
            self._notice_the_missing(rank)
            if (self.steps + index) % STATUS_STEPS == 0:
                self.report(rank)

    def _vote(self, generation: Generation) -> None:
        """Adopts the next generation in one step, if all members of this one vote for it."""
        voters = [self.ranks.get(member.instance_id) for member in generation.members]
        if any(each is None or not each.runs or each.generation != generation for each in voters):
            return
        ranks = [each for each in voters if each is not None]
        following = ranks[0].votes_for
        if following is None or any(
            each.votes_for != following or each.phase is not RankPhase.SERVING for each in ranks
        ):
            return
        if any(not each.prepared or each.never_adopts for each in ranks if following.rank_of(each.id) is not None):
            return
        for each in ranks:
            if following.rank_of(each.id) is None:
                each.leave()
            else:
                each.adopt()

    def _notice_the_missing(self, rank: SimulatedRank) -> None:
        generation = rank.generation
        if generation is None or rank.phase is not RankPhase.SERVING:
            return
        missing = []
        for member in generation.members:
            other = self.ranks[member.instance_id]
            there = other.runs and generation in (other.generation, other.target)
            if not there:
                missing.append(other)
        rank.steps_alone = rank.steps_alone + 1 if missing else 0
        frozen = any(each.frozen for each in missing)
        if missing and rank.steps_alone > (5 if frozen else 1):
            rank.phase = RankPhase.BROKEN
            rank.failure = "the exchange broke"
            rank.suspects = tuple(each.id for each in missing if not each.runs)


class SimulatedGroup(SimulatedRanks):
    """The world: ranks, network, one controller at a time."""

    def __init__(self, config: ControllerConfig = CONFIG, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.random = random.Random(seed)
        self.now = 100.0
        self.loss = self.duplicates = 0.0
        self.most_delay_steps = 0
        self._to_controller: list[tuple[int, Status]] = []
        self._to_ranks: list[tuple[int, str, Directive]] = []
        self._nonces = 0
        self._controllers = 0
        self._told: dict[str, Directive] = {}
        self.committed: set[str] = set()
        self.open_commit: Generation | None = None
        """That was shown, of an operation that is not done."""
        self.highest_target = 0
        self.targets: dict[str, Generation] = {}
        """All that were ever shown, by nonce."""
        self.ended: list[Ended] = []
        self.start_controller()

    # Disturbances

    def start_controller(self) -> None:
        """Another one, which knows nothing."""
        self._controllers += 1
        self.controller = Controller(f"coordinator-{self._controllers}", self._draw_nonce, self.config)
        self._told.clear()
        self.highest_target = 0
        self.open_commit = None

    def ask(self, operation_id: str, *names: str) -> None:
        request = TopologyRequest(operation_id=operation_id, members=list(names))
        assert self.controller.on_request(request, self.now) is None

    # Time

    def step(self) -> None:
        self.now += STEP_S
        for _, instance_id, directive in self._due(self._to_ranks):
            self.ranks[instance_id].inbox.append(directive)
        self.step_ranks()
        self._run_controller()

    def report(self, rank: SimulatedRank) -> None:
        self._send(self._to_controller, (rank.status(),))

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.step()

    def until(self, condition: Callable[[], bool], seconds: float = 20.0, what: str = "it") -> float:
        """Seconds it took."""
        start = self.now
        while not condition():
            if self.now - start > seconds:
                raise AssertionError(f"{what} did not come within {seconds} s\n{self.picture()}")
            self.step()
        return self.now - start

    # Questions

    def status(self) -> TopologyStatus:
        return self.controller.status(self.now)

    def serving_together(self, *names: str) -> bool:
        """Exactly these serve, in one generation with nobody else, and the operation is over."""
        serving = [rank for rank in self.alive().values() if rank.generation is not None]
        operation = self.status().operation
        return (
            sorted(rank.member.name for rank in serving) == sorted(names)
            and len({rank.generation.nonce for rank in serving if rank.generation is not None}) == 1
            and all(rank.phase is RankPhase.SERVING for rank in serving)
            and all(rank.generation is not None and rank.generation.size == len(names) for rank in serving)
            and operation is not None
            and operation.phase in (OperationPhase.DONE, OperationPhase.WAITING)
        )

    def form(self, *names: str) -> dict[str, SimulatedRank]:
        """A group of new ranks that serves."""
        ranks = {name: self.add(name) for name in names}
        self.ask("first", *names)
        self.until(lambda: self.serving_together(*names), what="the first generation")
        return ranks

    def picture(self) -> str:
        lines = [f"{self.now:.1f}: {self.status()}"]
        lines += [
            f"  {rank.id} {rank.phase} alive={rank.alive} frozen={rank.frozen} leaving={rank.leaving} "
            f"in={_short(rank.generation)} target={_short(rank.target)} prepared={rank.prepared} seen={rank.commit_seen} "
            f"told={self._told.get(rank.id) and _told(self._told[rank.id])}"
            for rank in self.ranks.values()
        ]
        return "\n".join(lines)

    # How it goes on

    def _draw_nonce(self) -> str:
        self._nonces += 1
        return f"n{self._nonces}"

    def _run_controller(self) -> None:
        reported = set()
        for _, status in self._due(self._to_controller):
            self.controller.on_status(status, self.now)
            reported.add(status.member.instance_id)
        ended = self.controller.tick(self.now)
        self.ended += ended
        if any(each.outcome is OperationPhase.DONE for each in ended):
            self.open_commit = None
        for instance_id in self.ranks:
            if not self.controller.knows(instance_id):
                continue
            directive = self.controller.directive_for(instance_id)
            if directive is None:
                continue
            self._check(directive)
            if instance_id in reported or self._told.get(instance_id) != directive:
                self._told[instance_id] = directive
                self._send(self._to_ranks, (instance_id, directive))

    def _check(self, directive: Directive) -> None:
        target = directive.target
        assert target is not None or not directive.commit
        if target is None:
            return
        self.targets[target.nonce] = target
        assert target.number >= self.highest_target, "numbers only grow"
        self.highest_target = target.number
        assert directive.commit or target.nonce not in self.committed, "a commit was taken back"
        if self.open_commit is not None and target.nonce != self.open_commit.nonce and self.status().generation:
            assert target.urgent, "what follows a commit that was not completed is urgent"
        if directive.commit:
            self.committed.add(target.nonce)
            self.open_commit = target

    def _send(self, queue: list, message: tuple) -> None:  # type: ignore[type-arg]
        copies = 2 if self.random.random() < self.duplicates else 1
        delivered = sum(self.random.random() >= self.loss for _ in range(copies))
        queue += [(self.steps + self.random.randint(0, self.most_delay_steps), *message) for _ in range(delivered)]

    def _due(self, queue: list) -> list:  # type: ignore[type-arg]
        due = [each for each in queue if each[0] <= self.steps]
        queue[:] = [each for each in queue if each[0] > self.steps]
        return sorted(due, key=lambda each: each[0])


def _short(generation: Generation | None) -> str:
    if generation is None:
        return "-"
    names = ",".join(member.instance_id for member in generation.members)
    return f"{generation.number}/{generation.nonce}({names}){'!' if generation.urgent else ''}"


def _told(directive: Directive) -> str:
    if directive.dismissed:
        return "dismissed"
    return f"{'commit ' if directive.commit else ''}{_short(directive.target)}"
