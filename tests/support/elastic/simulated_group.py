"""A controller and simulated ranks, connected by a network that may lose messages.

For the tests of the topology controller and the coordinator process.

Time advances in steps of STEP_S. Tests let ranks die, freeze, wake up or fail. Everything else
follows from the messages, as `protocol.topology` describes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from baton_engine.elastic.coordinator.controller_config import ControllerConfig
from baton_engine.elastic.coordinator.operation import Ended
from baton_engine.elastic.coordinator.topology_controller import TopologyController
from baton_protocol.topology import (
    Activity,
    Directive,
    Generation,
    OperationPhase,
    OperationStatus,
    RankPhase,
    Status,
    TopologyMember,
    TopologyRequest,
    TopologyStatus,
)
from support.elastic.simulated_rank import SimulatedRank

STEP_S = 0.1
STATUS_STEPS = 2
CONFIG = ControllerConfig(
    stall_after_s=1.0,
    step_stall_after_s=3.0,
    form_after_s=3.0,
    wait_s=4.0,
    prepare_timeout_s=3.0,
    commit_timeout_s=2.0,
    retry_s=0.5,
    retry_max_s=4.0,
)


class SimulatedRanks:
    """Simulated ranks and their exchanges. Subclasses connect the ranks to a coordinator."""

    def __init__(self) -> None:
        self.steps = 0
        self.ranks: dict[str, SimulatedRank] = {}

    def report(self, rank: SimulatedRank) -> None:
        """Send the status of `rank` to the coordinator."""
        raise NotImplementedError

    def add(self, name: str, **state: object) -> SimulatedRank:
        """Start a new process of the rank `name`. An earlier process of the rank keeps running."""
        number = len(self.ranks)
        member = TopologyMember(name, f"{name}#{number}", f"10.0.0.{number}", 5555, 5561, 29500)
        rank = self.ranks[member.instance_id] = replace(SimulatedRank(member), **state)
        return rank

    def alive(self) -> dict[str, SimulatedRank]:
        return {rank.id: rank for rank in self.ranks.values() if rank.alive}

    def step_ranks(self) -> None:
        """Let all ranks process their messages and advance by STEP_S."""
        self.steps += 1
        alive = self.alive()
        running = {each: rank for each, rank in alive.items() if rank.runs}
        obeying = {each: rank for each, rank in running.items() if rank.obeys}
        for rank in obeying.values():
            inbox, rank.inbox = rank.inbox, []
            for directive in inbox:
                rank.obey(directive)
        for rank in obeying.values():
            rank.advance(obeying)
        for generation in {
            r.generation.nonce: r.generation for r in alive.values() if r.generation is not None
        }.values():
            self._vote(generation)
        for rank in obeying.values():
            self._detect_lost_members(rank)
            rank.activity = self._activity(rank)
        for index, rank in enumerate(running.values()):
            if (self.steps + index) % STATUS_STEPS == 0:
                self.report(rank)

    def _vote(self, generation: Generation) -> None:
        """Commit the next generation if all members of `generation` vote for it."""
        voters = [self.ranks.get(member.instance_id) for member in generation.members]
        if any(each is None or not each.obeys or each.generation != generation for each in voters):
            return
        ranks = [each for each in voters if each is not None]
        following = ranks[0].votes_for
        if following is None or any(
            each.votes_for != following or each.phase is not RankPhase.SERVING for each in ranks
        ):
            return
        if any(
            not each.prepared or each.never_commits
            for each in ranks
            if following.rank_of(each.id) is not None
        ):
            return
        for each in ranks:
            if following.rank_of(each.id) is None:
                each.leave()
            else:
                each.commit()

    def _activity(self, rank: SimulatedRank) -> Activity:
        """Return the activity of `rank`, which always has work.

        If a member of the generation is stalled, all members wait for it: in the step (RUNS) or
        before the step (WAITS).
        """
        if rank.generation is None or rank.phase is not RankPhase.SERVING:
            return Activity.RESTS
        others = [self.ranks[member.instance_id] for member in rank.generation.members]
        hung = [
            each.stalled_in
            for each in others
            if each.stalled_in is not None and each.generation == rank.generation
        ]
        if not hung:
            rank.step += 1
            return Activity.RESTS
        return Activity.RUNS if Activity.RUNS in hung else Activity.WAITS

    def _detect_lost_members(self, rank: SimulatedRank) -> None:
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
    """Ranks, a network, and one controller at a time."""

    def __init__(self, config: ControllerConfig = CONFIG, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.random = random.Random(seed)
        self.now = 100.0
        self.loss = self.duplicates = 0.0
        self.most_delay_steps = 0
        self._to_controller: list[tuple[int, Status]] = []
        self._to_ranks: list[tuple[int, str, Directive]] = []
        self._last_due: dict[tuple[int, str], int] = {}
        self._nonces = 0
        self._sent: dict[str, Directive] = {}
        self.committed: set[str] = set()
        #: Target of the last commit, until its operation is done.
        self.open_commit: Generation | None = None
        self.highest_target = 0
        #: All targets in directives, by nonce.
        self.targets: dict[str, Generation] = {}
        self.ended: list[Ended] = []
        self.start_controller()

    # Faults and requests

    def start_controller(self) -> None:
        """Replace the controller by a new controller without state."""
        self.controller = TopologyController(self._draw_nonce, self.config)
        self._sent.clear()
        self.highest_target = 0
        self.open_commit = None

    def ask(self, operation_id: str, *names: str) -> None:
        request = TopologyRequest(operation_id=operation_id, members=list(names))
        assert self.controller.on_request(request) is None

    # Time

    def step(self) -> None:
        self.now += STEP_S
        for _, instance_id, directive in self._due(self._to_ranks):
            self.ranks[instance_id].inbox.append(directive)
        self.step_ranks()
        self._run_controller()

    def report(self, rank: SimulatedRank) -> None:
        self._send(self._to_controller, (rank.status(),), rank.id)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.step()

    def until(
        self, condition: Callable[[], bool], seconds: float = 20.0, what: str = "it"
    ) -> float:
        """Step until `condition` holds. Return how many simulated seconds this took."""
        start = self.now
        while not condition():
            if self.now - start > seconds:
                raise AssertionError(f"not within {seconds} s: {what}\n{self.picture()}")
            self.step()
        return self.now - start

    # State

    def status(self) -> TopologyStatus:
        return self.controller.status(self.now)

    @property
    def operation(self) -> OperationStatus:
        return self.status().operation

    @property
    def has_recovered(self) -> bool:
        return any(
            (each.kind, each.outcome) == ("recover", OperationPhase.DONE) for each in self.ended
        )

    def directive_of(self, rank: SimulatedRank) -> Directive:
        return self.controller.directive_for(rank.id)

    def serving_together(self, *names: str) -> bool:
        """Return whether exactly the ranks `names` serve together and no operation is running."""
        serving = [rank for rank in self.alive().values() if rank.generation is not None]
        operation = self.status().operation
        return (
            sorted(rank.member.name for rank in serving) == sorted(names)
            and len({rank.generation.nonce for rank in serving if rank.generation is not None}) == 1
            and all(rank.phase is RankPhase.SERVING for rank in serving)
            and all(
                rank.generation is not None and rank.generation.size == len(names)
                for rank in serving
            )
            and operation is not None
            and operation.phase in (OperationPhase.DONE, OperationPhase.WAITING)
        )

    def form(self, *names: str) -> dict[str, SimulatedRank]:
        """Start the ranks `names`, and wait until they serve as one group. Return them by name."""
        ranks = {name: self.add(name) for name in names}
        self.ask("first", *names)
        self.until(lambda: self.serving_together(*names), what="the first generation")
        return ranks

    def picture(self) -> str:
        lines = [f"{self.now:.1f}: {self.status()}"]
        lines += [
            f"  {rank.id} {rank.phase} alive={rank.alive} frozen={rank.frozen} "
            f"leaving={rank.leaving} stalls={rank.stalled_in} {rank.activity} {rank.step} "
            f"in={_short(rank.generation)} target={_short(rank.target)} "
            f"prepared={rank.prepared} seen={rank.commit_seen} "
            f"directive={_format_directive(self._sent.get(rank.id))}"
            for rank in self.ranks.values()
        ]
        return "\n".join(lines)

    # Steps of the controller and the network

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
            if not self.controller.is_registered(instance_id):
                continue
            directive = self.controller.directive_for(instance_id)
            if directive is None:
                continue
            self._check(directive)
            if instance_id in reported or self._sent.get(instance_id) != directive:
                self._sent[instance_id] = directive
                self._send(self._to_ranks, (instance_id, directive), instance_id)

    def _check(self, directive: Directive) -> None:
        target = directive.target
        if target is None:
            assert not directive.commit
            return
        self.targets[target.nonce] = target
        assert target.number >= self.highest_target, "the number of the target decreased"
        self.highest_target = target.number
        assert directive.commit or target.nonce not in self.committed, "a commit was taken back"
        if (
            self.open_commit is not None
            and target.nonce != self.open_commit.nonce
            and self.status().generation
        ):
            assert target.urgent, "a generation after an incomplete commit is not urgent"
        if directive.commit:
            self.committed.add(target.nonce)
            self.open_commit = target

    def _send(self, queue: list, message: tuple, instance_id: str) -> None:
        """Queue a message. Messages of a rank in one direction keep their order."""
        link = (id(queue), instance_id)
        copies = 2 if self.random.random() < self.duplicates else 1
        delivered = sum(self.random.random() >= self.loss for _ in range(copies))
        for _ in range(delivered):
            due = self.steps + self.random.randint(0, self.most_delay_steps)
            self._last_due[link] = max(due, self._last_due.get(link, 0))
            queue.append((self._last_due[link], *message))

    def _due(self, queue: list) -> list:
        due = [each for each in queue if each[0] <= self.steps]
        queue[:] = [each for each in queue if each[0] > self.steps]
        return sorted(due, key=lambda each: each[0])


def names_of(generation: Generation) -> list[str]:
    return [member.name for member in generation.members]


def _short(generation: Generation | None) -> str:
    if generation is None:
        return "-"
    names = ",".join(member.instance_id for member in generation.members)
    return f"{generation.number}/{generation.nonce}({names}){'!' if generation.urgent else ''}"


def _format_directive(directive: Directive | None) -> str:
    if directive is None:
        return "-"
    if directive.dismissed:
        return "dismissed"
    return f"{'commit ' if directive.commit else ''}{_short(directive.target)}"
