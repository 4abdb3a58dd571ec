"""The controller: changes a group's topology by at most one operation at a time.

`topology_planner` decides the next generation from desired members and statuses. The controller
decides when to prepare and to commit this generation, and computes a directive for each rank.

The controller is level-triggered: each decision depends on the reported statuses and not on earlier
actions. After a restart, the controller therefore continues the work of the earlier coordinator
process.

The exception is a commit, which is never revoked after it was sent, because a rank may act on it at
any time. If a commit cannot be completed, the controller creates an urgent generation with a higher
number.

The controller has no sockets and no clock. Callers pass the time as `now`, in seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from baton_engine.bounded_log import one_line
from baton_engine.elastic.coordinator.backoff import FEW_FAILURES, Retries
from baton_engine.elastic.coordinator.controller_config import ControllerConfig
from baton_engine.elastic.coordinator.operation import (
    Ended,
    Operation,
    commit_obstacle,
    is_partly_committed,
    latest_commit,
    lost_members,
    not_committed,
    not_retired,
    overtaken,
    preparation_failures,
    resumed,
    unprepared,
)
from baton_engine.elastic.coordinator.placement.balance import Balance, experts_of
from baton_engine.elastic.coordinator.placement.expert_placement import count_moves
from baton_engine.elastic.coordinator.roster import Roster, key_of
from baton_engine.elastic.coordinator.stalls import Stalls
from baton_engine.elastic.coordinator.topology_planner import Need, TopologyPlanner
from baton_engine.elastic.coordinator.topology_report import topology_status
from baton_engine.elastic.coordinator.topology_validation import (
    MAX_FAILURE,
    OperationRefusal,
    check_request,
)
from baton_protocol.topology import (
    Directive,
    Generation,
    OperationPhase,
    Status,
    TopologyRequest,
    TopologyStatus,
)

logger = logging.getLogger(__name__)


class TopologyController:
    """Changes the members of an expert-parallel group, and their experts. Not thread-safe."""

    def __init__(self, draw_nonce: Callable[[], str], config: ControllerConfig) -> None:
        self._draw_nonce = draw_nonce
        self._config = config
        self._roster = Roster(config.dead_after_s, config.suspect_dead_after_s)
        self._stalls = Stalls(self._roster, config)
        self._request: TopologyRequest | None = None
        #: Highest generation that an earlier coordinator process committed. Until the first
        #: request, the members of this generation are desired.
        self._inferred: Generation | None = None
        self._first_status_at: float | None = None
        self._settled = False
        self._last_tick: float | None = None
        self._present: Generation | None = None
        self._operation: Operation | None = None
        #: A generation whose commit was sent and cannot be completed.
        self._stranded_commit: Generation | None = None
        #: Nonces of generations that this controller created or resumed, or whose commits a later
        #: commit has superseded.
        self._nonces: set[str] = set()
        self._highest_target = 0
        self._first_ready_at: float | None = None
        self._retries = Retries(config)
        self._balance = Balance(self._roster, config)
        #: Id of the last completed request.
        self._acknowledged = ""
        #: True after a rebalance request, until a rebalance has completed.
        self._rebalance = False
        #: Whether the group ends, so that all its ranks are dismissed.
        self._released = False
        self._ended: list[Ended] = []

    # Input

    def on_status(self, status: Status, now: float) -> None:
        """Record the status of a rank that was received at the time `now`."""
        self._roster.on_status(status, now)
        if self._first_status_at is None:
            self._first_status_at = now
        for generation in (status.generation, status.committed):
            highest = 0 if self._inferred is None else self._inferred.number
            if (
                generation is not None
                and generation.nonce not in self._nonces
                and generation.number > highest
            ):
                self._inferred = generation

    def on_request(self, request: TopologyRequest) -> OperationRefusal | None:
        """Set the desired members from a PUT /topology request.

        A repeated request is accepted and changes nothing.

        Returns:
            Why the request is refused, or None if it is accepted.
        """
        refusal = check_request(request, self._request)
        if refusal is None and (
            self._request is None or request.operation_id != self._request.operation_id
        ):
            logger.info(
                "operation %s is requested, with members %s",
                request.operation_id,
                ", ".join(request.members),
            )
            self._request = request
            self._retries.clear()
        return refusal

    def on_rebalance(self) -> None:
        """Request a rebalance, which starts when no other operation is active."""
        self._rebalance = True

    def tick(self, now: float) -> list[Ended]:
        """Advance or start an operation. Return the operations that ended since the last call."""
        if (
            self._last_tick is not None
            and now - self._last_tick > self._config.suspect_dead_after_s / 2
        ):
            self._roster.discount_gap(now - self._last_tick, now)
        self._last_tick = now
        self._update_roster(now)
        self._settled = self._settled or self._has_settled(now)
        if self._settled:
            committed = self._operation is not None and self._operation.committed
            self._released = not committed and self._planner(now).ends()
            if self._released:
                self._stranded_commit = None  # the members leave and need no generation
            if self._operation is not None and self._operation.committed:
                self._follow_commit(self._operation, now)
            elif self._operation is not None and self._operation.phase is OperationPhase.PREPARING:
                self._follow_preparation(self._operation, now)
            if not self._busy() and not self._released and not self._resume(now):
                self._begin(now)
        ended, self._ended = self._ended, []
        return ended

    # Output

    def directive_for(self, instance_id: str) -> Directive | None:
        """Return the directive for a rank, or None until all ranks have had time to report."""
        if not self._settled:
            return None
        if self._released and any(
            status.member.instance_id == instance_id for status, _ in self._roster.serving()
        ):
            return Directive(dismissed=True)
        directive = self._current_directive()
        if directive.target is not None and self._is_recipient(instance_id, directive.target):
            return directive
        return Directive(dismissed=self._roster.is_left_behind(instance_id, self._present))

    def _current_directive(self) -> Directive:
        """Return the directive to prepare or commit a target. Empty if there is no target."""
        operation, stranded = self._operation, self._stranded_commit
        if operation is not None and operation.active and operation.target is not None:
            return Directive(operation.target, operation.committed)
        if stranded is not None and stranded.number == self._highest_target:
            return Directive(stranded, commit=True)  # no later target exists yet
        return Directive()

    def _is_recipient(self, instance_id: str, target: Generation) -> bool:
        """Return whether an instance is a member of `target`, or votes on its commit.

        The voters serve in the present generation or in the operation's previous generation. A
        voter still receives the target after it has committed the target. The result is False for
        an instance that a later instance of the same name has replaced.
        """
        voting = {
            None if self._operation is None else self._operation.previous,
            *(key_of(each) for each in (target, self._present) if each is not None),
        }
        return instance_id not in self._roster.replaced and (
            target.rank_of(instance_id) is not None
            or any(
                status.member.instance_id == instance_id and key_of(generation) in voting
                for status, generation in self._roster.serving()
            )
        )

    def leaving(self) -> list[bool]:
        """Return for each serving rank whether it is shutting down."""
        return [status.leaving for status, _ in self._roster.serving()]

    def is_registered(self, instance_id: str) -> bool:
        return instance_id in self._roster.ranks

    @property
    def imbalance(self) -> float:
        """Imbalance of the last measuring window. 0 before the first window has ended."""
        return self._balance.imbalance

    def status(self, now: float) -> TopologyStatus:
        """Return the topology, as the response to GET /topology."""
        return topology_status(self._planner(now), self._operation, now)

    # State

    def _update_roster(self, now: float) -> None:
        self._roster.update(now)
        self._stalls.update(self._roster.present(), now)
        self._roster.update(now)  # removes the ranks that `Stalls.update` has marked
        self._present = self._roster.present()

    def _has_settled(self, now: float) -> bool:
        """Return whether all ranks have had time to report since the first status.

        The ranks have `dead_after_s` seconds if a member of the present generation has not reported
        yet, otherwise `settle_s` seconds.
        """
        if self._first_status_at is None:
            return False
        members = () if self._present is None else self._present.members
        unknown = any(member.instance_id not in self._roster.ranks for member in members)
        return now - self._first_status_at >= (
            self._config.dead_after_s if unknown else self._config.settle_s
        )

    def _desired(self) -> frozenset[str]:
        if self._request is not None:
            return frozenset(self._request.members)
        return (
            frozenset()
            if self._inferred is None
            else frozenset(each.name for each in self._inferred.members)
        )

    def _operation_id(self) -> str:
        if self._request is not None:
            return self._request.operation_id
        return "" if self._inferred is None else self._inferred.operation_id

    def _planner(self, now: float) -> TopologyPlanner:
        return TopologyPlanner(
            self._roster,
            self._balance,
            self._present,
            self._desired(),
            self._retries.excluded(now),
        )

    def _busy(self) -> bool:
        return (
            self._operation is not None
            and self._operation.active
            and self._operation.target is not None
        )

    # Start of an operation

    def _resume(self, now: float) -> bool:
        """Continue a commit that an earlier coordinator process began but did not complete.

        Returns:
            Whether there was a commit to continue.
        """
        target = latest_commit(self._roster, self._present)
        if target is None or target.nonce in self._nonces or self._stranded_commit is not None:
            return False
        if not is_partly_committed(self._roster, target):
            return False
        older = [
            generation
            for _, generation in self._roster.serving()
            if key_of(generation) != key_of(target)
        ]
        previous = max(older, key=lambda each: each.number, default=None)
        operation = self._operation = resumed(target, previous, now)
        self._nonces.add(target.nonce)
        self._highest_target = max(self._highest_target, target.number)
        logger.info(
            "%s: continuing the commit that an earlier coordinator process began", operation.label
        )
        return True

    def _begin(self, now: float) -> None:
        need = self._planner(now).need(self._defect(), rebalance=self._rebalance, now=now)
        waiting = (
            self._operation if self._operation is not None and self._operation.active else None
        )
        if waiting is not None and (
            need is None or (waiting.kind, waiting.wanted) != (need.kind, need.wanted)
        ):
            reason = (need and need.reason) or "the desired members changed"
            self._end(waiting, OperationPhase.SUPERSEDED, now, reason)
            waiting = None
        if need is None:
            self._acknowledge(now)
            return
        if not self._retries.may_begin(need.kind, now):
            return
        if waiting is None:
            # Other kinds of operation are automatic.
            operation_id = self._operation_id() if need.kind in ("form", "scale") else ""
            waiting = self._operation = Operation(need.kind, operation_id, need.wanted, now)
            logger.info(
                "%s: started, because %s",
                waiting.label,
                one_line(need.reason, MAX_FAILURE) or "members were requested",
            )
        waiting.reason = f"waiting for {', '.join(need.missing)}" if need.missing else need.reason
        if self._waits_for_members(waiting, need, now):
            return
        if need.members:
            self._prepare(waiting, need, now)

    def _defect(self) -> str:
        """Return why the present generation must be replaced although all its members serve.

        The reason is a commit that cannot be completed, or a stall. Empty: no replacement is
        needed.
        """
        if self._stranded_commit is not None:
            return f"not all members can commit generation {self._stranded_commit.number}"
        for status, generation in self._roster.serving():
            seen = status.commit_seen
            if seen and seen != generation.nonce and seen not in self._nonces:
                return (
                    f"{status.member.name} has received the commit of generation {seen}, which "
                    "other ranks cannot commit"
                )
        return self._stalls.reason

    def _waits_for_members(self, operation: Operation, need: Need, now: float) -> bool:
        """Return whether the preparation must wait, because desired members cannot join yet."""
        if not need.missing:
            return False
        if self._present is not None:
            return (
                need.members == self._present.members  # no scaling is possible yet
                or now < operation.since + self._config.wait_s
            )
        if not need.members:
            self._first_ready_at = None
            return True
        if self._first_ready_at is None:
            self._first_ready_at = now
        return now < self._first_ready_at + self._config.form_after_s

    def _acknowledge(self, now: float) -> None:
        """Mark the last request as done, because the present generation already satisfies it."""
        operation_id = self._operation_id()
        if self._present is None or self._request is None or self._acknowledged == operation_id:
            return
        self._acknowledged = operation_id
        if self._operation is None or self._operation.operation_id != operation_id:
            names = frozenset(member.name for member in self._present.members)
            self._operation = Operation("scale", operation_id, names, now)
            self._operation.target = self._present
            self._operation.enter(OperationPhase.DONE, now)

    def _prepare(self, operation: Operation, need: Need, now: float) -> None:
        """Start to prepare the generation that the planner computes for `need`."""
        try:
            target = self._planner(now).next_generation(
                need,
                number=max(self._roster.highest_number, self._highest_target) + 1,
                drawn=self._draw_nonce(),
                operation_id=operation.operation_id,
                store=self._retries.store_holder(need.members),
            )
        except ValueError as error:
            self._fail(operation, now, str(error), ())
            return
        if (
            operation.kind == "rebalance"
            and self._present is not None
            and target.placement == self._present.placement
        ):
            self._end(operation, OperationPhase.DONE, now, "the placement is already balanced")
            return
        operation.target = target
        before = experts_of(self._present) or (((),) * len(target.placement), ())
        operation.moves = count_moves(
            before, (target.placement, [member.instance_id for member in target.members])
        )
        operation.moved_bytes = operation.moves * self._balance.expert_bytes(target.members)
        operation.rebalancing = need.rebalancing
        operation.previous = None if self._present is None else key_of(self._present)
        self._highest_target = target.number
        self._nonces.add(target.nonce)
        self._stalls.on_target()
        self._first_ready_at = None
        operation.enter(OperationPhase.PREPARING, now, need.reason)
        logger.info(
            "%s: preparing generation %d with members %s",
            operation.label,
            target.number,
            ", ".join(each.name for each in target.members),
        )

    # Progress of an operation

    def _follow_preparation(self, operation: Operation, now: float) -> None:
        """Commit the operation's target, the next generation, when all members are prepared.

        If the preparation fails or the target no longer fits the group, end the operation. The
        previous generation then continues.
        """
        target = operation.target
        assert target is not None
        if reason := self._reason_to_supersede(operation, target, now):
            self._end(operation, OperationPhase.SUPERSEDED, now, reason)
        elif failures := preparation_failures(self._roster, target):
            self._fail(operation, now, "; ".join(failures.values()), failures)
        elif late := unprepared(self._roster, target):
            if now - operation.since > self._config.prepare_timeout_s:
                names = ", ".join(member.name for member in late)
                reason = (
                    f"{names} did not prepare generation {target.number} within "
                    f"{self._config.prepare_timeout_s:g} s"
                )
                self._fail(operation, now, reason, [member.instance_id for member in late])
        else:
            operation.num_pending, operation.progress_at = 0, now
            operation.enter(OperationPhase.COMMITTING, now, operation.reason)
            logger.info("%s: committing generation %d", operation.label, target.number)

    def _reason_to_supersede(self, operation: Operation, target: Generation, now: float) -> str:
        """Return why a target in preparation no longer fits the group. Empty: the target fits."""
        if self._released:
            return "all members are shutting down"
        if stalled := self._stalls.exclude_stalled(target, operation.since, now):
            self._update_roster(now)
            return f"the engine loop of {stalled} is stalled, although the process sends statuses"
        planner = self._planner(now)
        if (
            self._present is not None
            and not target.urgent
            and (broken := self._defect() or planner.breakage())
        ):
            return broken
        if lost := lost_members(self._roster, target):
            return f"{', '.join(lost)} cannot prepare generation {target.number}"
        if overtaken(self._roster, target):
            return "a rank has committed another generation"
        if not target.urgent and operation.wanted != planner.wanted():
            return "the desired members changed"
        return ""

    def _follow_commit(self, operation: Operation, now: float) -> None:
        """End the operation when its commit is complete or cannot be completed.

        A commit is never revoked.
        """
        target = operation.target
        assert target is not None
        waiting = not_committed(self._roster, target)
        retiring = not_retired(self._roster, operation, target)
        obstacle = commit_obstacle(self._roster, operation, target)
        num_pending = len(waiting) + len(retiring)
        if num_pending != operation.num_pending:
            operation.num_pending, operation.progress_at = num_pending, now
        stuck = now - operation.progress_at > self._config.commit_timeout_s
        if obstacle or (waiting and stuck):
            names = ", ".join(waiting)
            reason = (
                obstacle
                or f"{names} did not commit generation {target.number} within "
                f"{self._config.commit_timeout_s:g} s"
            )
            if target.urgent and not obstacle:
                self._retries.exclude(
                    [each.instance_id for each in target.members if each.name in waiting], now
                )
            self._stranded_commit = target
            self._end(operation, OperationPhase.FAILED, now, reason)
        elif not waiting and (not retiring or stuck):
            self._stranded_commit = None
            self._retries.clear()
            self._nonces.update(status.commit_seen for status in self._roster.living.values())
            self._end(operation, OperationPhase.DONE, now, operation.reason)

    def _fail(
        self, operation: Operation, now: float, reason: str, culprits: Collection[str]
    ) -> None:
        """End an operation that failed before its commit, and delay the retry.

        If members made a recovery fail, they may be excluded. The retry then begins at once.

        Args:
            operation: the operation to end.
            now: the time.
            reason: why the operation failed.
            culprits: instance ids of the members that caused the failure.
        """
        failures = self._retries.on_failure(operation.kind, now)
        if operation.target is not None:
            self._retries.on_store_failure(operation.target, now)
        if (
            operation.kind == "recover"
            and operation.target is not None
            and self._present is not None
        ):
            # The group serves nothing during a recovery. Exclude failing newcomers at once, and
            # failing survivors after more than FEW_FAILURES failures.
            newcomers = {each for each in culprits if self._present.rank_of(each) is None}
            left_out = newcomers or (set(culprits) if failures > FEW_FAILURES else set())
            if left_out and any(
                each.instance_id not in left_out for each in operation.target.members
            ):
                self._retries.exclude(left_out, now)
                self._retries.begin_at_once(operation.kind)
        self._end(operation, OperationPhase.FAILED, now, reason)

    def _end(self, operation: Operation, outcome: OperationPhase, now: float, reason: str) -> None:
        operation.enter(outcome, now, reason)
        done = outcome is OperationPhase.DONE
        if done and operation.operation_id:
            self._acknowledged = operation.operation_id
        self._rebalance = self._rebalance and not (done and operation.kind == "rebalance")
        self._ended.append(
            Ended(
                operation.kind,
                outcome,
                operation.seconds(now),
                operation.moves if done else 0,
                operation.moved_bytes if done else 0,
                operation.rebalancing if done else None,
            )
        )
        logger.log(
            logging.INFO if done else logging.WARNING,
            "%s: %s: %s",
            operation.label,
            outcome,
            one_line(reason, MAX_FAILURE) or "all members serve in this generation",
        )
