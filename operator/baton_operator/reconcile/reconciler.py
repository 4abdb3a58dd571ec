"""Reconcile one service: observe, plan, apply, report. Level-triggered and idempotent.

`Reconciler._run_steps` lists the steps, in order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from baton_kube.client import KubeError, Object
from baton_operator import logs, names
from baton_operator.autoscale.autoscaler import Autoscaler
from baton_operator.builders import service_key_secret
from baton_operator.builders.resolved_service import ResolvedService
from baton_operator.builders.restrictions import Restrictions
from baton_operator.kube.events import Events
from baton_operator.kube.objects import Kube
from baton_operator.observe.freshness import MOVING_KINDS, Freshness, StaleReadError
from baton_operator.observe.observation import Observation, observe
from baton_operator.observe.pod_clients import CoordinatorClient, Drainer
from baton_operator.plan.plan_expert_group import ExpertGroupPlan
from baton_operator.plan.plan_members import plan_members
from baton_operator.plan.refused_pods import RefusedPods
from baton_operator.plan.topology_view import TopologyView, filter_by_service_key, recorded_for
from baton_operator.reconcile.apply import (
    apply_members,
    apply_objects,
    collect_config_maps,
    ensure_service_key,
)
from baton_operator.reconcile.controller import Outcome
from baton_operator.reconcile.desired import Desired, compute_desired, resolve
from baton_operator.reconcile.drain import drain_members
from baton_operator.reconcile_errors import (
    GatewayAPIMissing,
    InvalidSpec,
    Paused,
    Problem,
    problem_of,
)
from baton_operator.revision_history import (
    PreviousRevision,
    find_previous_revisions,
    recorded_name,
    recorded_spec,
)
from baton_operator.revision_history import record as record_spec
from baton_operator.status.report import report, report_defect
from baton_operator.status.report_events import new_events
from baton_operator.status.report_group import ReportedGroup, gateway_group, member_group
from baton_operator.status.status_probes import StatusProbes, is_progress_expected
from baton_operator.status.status_writer import StatusWriter
from baton_protocol.service_key import ServiceKey
from baton_protocol.topology import TopologyRequest

logger = logging.getLogger(__name__)

#: Interval while another owner's object or a missing API blocks the service (`is_conflict`).
CONFLICT_REVISIT_S = 5.0
#: Interval while a service is not Ready, because its deadlines pass without an event.
UNSETTLED_REVISIT_S = 20.0
#: Interval while pods report loading progress, which no watch event carries.
LOADING_REVISIT_S = 3.0


class Target(NamedTuple):
    """The state towards which a reconcile takes its steps."""

    resolved: ResolvedService
    desired: Desired
    service_key: ServiceKey


@dataclass(eq=False)
class _ReconcileState:
    """One reconcile: the observed state, and the results of its steps."""

    observed: Observation
    now: datetime
    #: Name of the ControllerRevision with the spec that is rolled out.
    spec_revision: str | None
    #: The resolved service for the status. None: no spec could be resolved.
    resolved: ResolvedService | None = None
    #: Hash of all desired objects except member pods.
    content: str = ""
    #: Whether all these objects are as desired. An HTTPRoute is ignored if the cluster has no
    #: Gateway API.
    objects_match: bool = False
    #: Problems in the order of their occurrence. The first one decides `Ready`.
    problems: list[Problem] = field(default_factory=list)
    is_ready: bool = False
    #: Names of the ConfigMaps that members of the previous revision need.
    restored_config_maps: set[str] = field(default_factory=set)
    #: Intervals after which to reconcile again, in seconds.
    revisits: list[float] = field(default_factory=list)

    def fail(self, error: Exception) -> None:
        """Add the error to `problems`."""
        problem = problem_of(error)
        if problem not in self.problems:
            self.problems.append(problem)

    def outcome(self) -> Outcome:
        """Return the outcome of the reconcile, with the seconds until the next one.

        Raises:
            Exception: the cause of the last problem that must be retried, if there is one.
        """
        for problem in reversed(self.problems):
            if problem.is_retried:
                raise problem.__cause__ or problem
        revisits = self.revisits
        if any(problem.is_conflict for problem in self.problems):
            revisits = revisits or [CONFLICT_REVISIT_S]
        if not self.is_ready:
            is_loading = is_progress_expected(self.observed.pods, self.observed.loading)
            revisits = [*revisits, LOADING_REVISIT_S if is_loading else UNSETTLED_REVISIT_S]
        return Outcome(min(revisits, default=None))


class Reconciler:
    """Takes one step towards the desired state of a service in each call of `reconcile`.

    Args:
        operator_namespace: namespace of the operator's pod, for network policies. None: the
            operator does not run in the cluster.
        autoscaler: decides the sizes of groups with `autoscaling`. None: the sizes never change.
        probes: status probes of pods. None: no probes are sent.
        restrictions: what LLMServices may request. None: everything.
    """

    def __init__(
        self,
        kube: Kube,
        drainer: Drainer,
        coordinators: CoordinatorClient,
        operator_namespace: str | None = None,
        autoscaler: Autoscaler | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        probes: StatusProbes | None = None,
        restrictions: Restrictions | None = None,
    ) -> None:
        self._kube = kube
        self._drainer = drainer
        self._coordinators = coordinators
        self._operator_namespace = operator_namespace
        self._autoscaler = autoscaler or Autoscaler()
        self._clock = clock
        self._probes = probes or StatusProbes(None)
        self._restrictions = restrictions
        self._events = Events(kube)
        self._status = StatusWriter(kube, self._events)
        self._refused_pods = RefusedPods()
        #: By service: `_ReconcileState.content` of the last reconcile in which all objects were as
        #: desired.
        self._verified: dict[names.Key, str] = {}

    async def reconcile(self, key: names.Key, freshness: Freshness) -> Outcome:
        """Take one step for the service `key`.

        Raises:
            KubeError, OSError: the API server refused a request or did not respond. Retry.
            Exception: the operator has a defect, which the status reports. Retry.
        """
        try:
            try:
                state = await self._run_steps(key, freshness)
            except StaleReadError:
                state = await self._run_steps(key, Freshness(versions=freshness.versions))
        except (KubeError, OSError):
            raise
        except Exception as error:
            await self._report_defect(key, error)
            raise
        return state.outcome() if state is not None else Outcome(is_gone=True)

    async def _run_steps(self, key: names.Key, freshness: Freshness) -> _ReconcileState | None:
        """Run one reconcile. Return its state, or None if the service is deleted."""
        # 1. Observe what exists.
        observed = await observe(self._kube, self._coordinators, key, freshness)
        if observed is None:
            self._forget(key)
            return None
        state = _ReconcileState(observed, self._clock(), recorded_name(observed.service))
        target: Target | None = None
        try:
            # 2. Drain marked members. The topology was read before. So if it shows that a member
            # stands by, the requests are counted after the member has left the topology.
            state.observed = await drain_members(self._drainer, state.observed)
            # 3. Find members that are paused or asleep. They do not stall a rollout.
            state.observed = await self._probes.find_suspended(state.observed, state.now)
            # 4. Compute what should exist.
            target = await self._decide(state)
            # While paused or if the spec cannot be used, the recorded spec applies.
            if not target.resolved.spec.paused and not state.problems:
                state.spec_revision = await record_spec(
                    self._kube, target.resolved, observed.service
                )
            # 5. Write the objects other than member pods.
            await self._write_objects(state, target)
            # 6. Take the next step of each group of members, even if an object was refused.
            if await self._move_members(state, target):
                # 7. Delete ConfigMaps that no pod needs.
                await self._collect(state, target)
        except StaleReadError:
            raise
        except Exception as error:  # after any error the status must not stay Ready
            state.fail(error)
        # 8. Send the status probes, and pass the groups to the autoscaler, even if a step failed.
        groups = await self._probe_groups(state, target) if target else {}
        # 9. Report.
        state.is_ready = await self._report(state, groups)
        return state

    def _forget(self, key: names.Key) -> None:
        """Drop the cached state of a deleted service."""
        self._verified.pop(key, None)
        self._autoscaler.forget(key)
        self._refused_pods.forget(key)
        self._probes.forget(key)

    async def _decide(self, state: _ReconcileState) -> Target:
        """Compute the target from the spec of the service.

        If that spec cannot be used, use the spec that was rolled out last.

        Raises:
            Problem: neither spec can be used.
        """
        observed = state.observed
        if observed.has_no_recorded_spec:
            raise Paused("spec.paused is true, and nothing was rolled out before; set it to false")
        try:
            return await self._build(state, observed.service["spec"])
        except Exception as error:
            state.fail(error)
            return await self._build_recorded(state)

    async def _build_recorded(self, state: _ReconcileState) -> Target:
        """Compute the target from the spec that was rolled out last.

        Raises:
            Problem: the first problem. No such spec can be used, or the spec of the service did not
                cause the problem.
        """
        problem = state.problems[0]
        recorded = (
            await recorded_spec(self._kube, state.observed.service) if problem.is_of_spec else None
        )
        if recorded is not None:
            try:
                return await self._build(state, recorded)
            except Exception as error:
                logger.warning(
                    "no object is written, because the spec that was rolled out last cannot be "
                    "used either: %s; correct the spec",
                    error,
                )
        raise problem

    async def _build(self, state: _ReconcileState, spec: Object) -> Target:
        """Compute the target from `spec`, and create the service's key if necessary.

        Raises:
            Problem: the spec or the service's key cannot be used.
            KubeError: the API server refused a request.
        """
        observed = state.observed
        resolved = resolve(observed, spec, self._restrictions)
        resolved = self._autoscaler.apply_sizes(resolved, observed.service)
        state.resolved = resolved
        key = await ensure_service_key(self._kube, resolved, observed.key_secret)
        resolved = msgspec.structs.replace(resolved, key_name=service_key_secret.name_of(key))
        if resolved.spec.gateway.http_route is not None:
            await self._kube.serves_http_routes()
        try:
            desired = compute_desired(
                resolved,
                self._kube.policy_api,
                keep_coordinator=observed.has_ranks,
                operator_namespace=self._operator_namespace,
                http_routes=self._kube.http_routes,
            )
        except ValueError as error:
            raise InvalidSpec(error) from error
        return Target(resolved, desired, key)

    async def _write_objects(self, state: _ReconcileState, target: Target) -> None:
        """Write all objects except member pods. Add refused objects to the problems.

        If the last reconcile left all objects as desired, and nothing may have changed since then,
        only the objects of MOVING_KINDS are compared.

        Raises:
            Problem: a ConfigMap or the ServiceAccount of members could not be written.
        """
        desired, observed, freshness = target.desired, state.observed, state.observed.freshness
        kinds = {
            "ConfigMap",
            *(obj["kind"] for obj in desired.objects),
            *(kind for kind, _ in desired.absent),
        }
        outdated = sorted(observed.mounted_config_maps - desired.config_maps)
        state.content = names.content_hash([desired.objects, desired.absent, outdated])
        may_have_changed = freshness.is_consistent or freshness.objects_changed
        if self._verified.pop(observed.key, "") == state.content and not may_have_changed:
            kinds = {obj["kind"] for obj in desired.objects} & MOVING_KINDS
        if "status" in observed.service:
            await observed.read_objects(self._kube, kinds)
        else:  # a new service: `apply_objects` reads each object by name before it is created
            observed.kinds.update(kinds)
        refused = await apply_objects(self._kube, target.resolved, desired, observed)
        # Objects without which members cannot be created come first, because the first problem
        # decides `Ready`. Another owner's account may have rights that members must not get.
        refused.sort(key=lambda each: each[0] not in ("ConfigMap", "ServiceAccount"))
        for _, problem in refused:
            state.fail(problem)
        account = names.engine_account_name(target.resolved.name)
        needed = {("ConfigMap", name) for name in desired.config_maps}
        if any(
            kind in observed.kinds and not observed.owned(kind, name)
            for kind, name in {*needed, ("ServiceAccount", account)}
        ):
            raise refused[0][1]
        state.objects_match = all(isinstance(problem, GatewayAPIMissing) for _, problem in refused)

    async def _move_members(self, state: _ReconcileState, target: Target) -> bool:
        """Take the next step of each group of members. Return True if no step failed.

        A pod that the API server refuses does not count as a failure. The condition of its group
        reports the refusal.
        """
        members = target.desired.members
        previous = await find_previous_revisions(
            self._kube, target.resolved, state.observed.service, state.spec_revision, members
        )
        all_went_well = True
        for role in members:
            try:
                await self._move_group(state, target, role, previous.get(role))
            except (OSError, StaleReadError):
                raise
            except Exception as error:  # a defect in one group does not stop the other
                state.fail(error)
                all_went_well = False
        return all_went_well

    async def _move_group(
        self,
        state: _ReconcileState,
        target: Target,
        role: names.MemberRole,
        previous: PreviousRevision | None,
    ) -> None:
        resolved, template = target.resolved, target.desired.members[role]
        observed, now = state.observed, state.now
        key = observed.key, role, template.revision
        view = None
        if observed.coordinator is not None and observed.topology is not None:
            recorded = recorded_for(observed.service, observed.coordinator)
            recorded = filter_by_service_key(recorded, observed.pods, resolved.key_name)
            view = TopologyView(observed.topology, recorded)
        plan = plan_members(
            resolved,
            role,
            template,
            observed.members[role],
            now,
            view=view,
            has_coordinator=observed.coordinator is not None,
            has_previous_revision=previous is not None,
        )
        plan = self._refused_pods.hold_back(*key, plan, now)
        if plan.revisit_s is not None:
            state.revisits.append(plan.revisit_s)
        if plan.acts:
            observed.freshness.require_consistent()
        if isinstance(plan, ExpertGroupPlan) and plan.request is not None:
            await self._request_topology(state, target, plan.request)
        refusal = await apply_members(
            self._kube, self._events, resolved, template, previous, plan, observed, now
        )
        if plan.restore and previous is not None:
            state.restored_config_maps.add(previous.config_map["metadata"]["name"])
        if plan.create or plan.restore:
            delay_s = self._refused_pods.record(*key, refusal, now)
            if delay_s is not None:
                state.revisits.append(delay_s)

    async def _request_topology(
        self, state: _ReconcileState, target: Target, request: TopologyRequest
    ) -> None:
        """Send the topology request to the coordinator, and store the reply for the status."""
        observed = state.observed
        assert observed.coordinator is not None, "the plan has a request"
        logs.operation.set(request.operation_id)
        topology = await self._coordinators.request_topology(
            observed.coordinator, request, target.service_key
        )
        state.observed = msgspec.structs.replace(observed, topology=topology)
        if topology is not None:
            members = ", ".join(request.members)
            message = f"operation {request.operation_id}: requested a topology of {members}"
            await self._events.emit(observed.service, "TopologyRequested", message)

    async def _collect(self, state: _ReconcileState, target: Target) -> None:
        """Delete ConfigMaps that no pod needs. If all objects are as desired, record their hash."""
        needed = target.desired.config_maps | state.restored_config_maps
        await collect_config_maps(self._kube, target.resolved, needed, state.observed)
        if state.objects_match:
            self._verified[state.observed.key] = state.content

    async def _report(
        self, state: _ReconcileState, groups: dict[names.Role, ReportedGroup]
    ) -> bool:
        """Write the status and its Events. Return whether the service is Ready."""
        observed, service, resolved = state.observed, state.observed.service, state.resolved
        gateway = observed.owned("Service", names.gateway_name(observed.key.name))
        problem = state.problems[0] if state.problems else None
        status = report(
            service,
            resolved,
            groups,
            cluster_ip=gateway["spec"].get("clusterIP") if gateway else None,
            problem=problem,
            now=state.now,
            spec_revision=state.spec_revision,
            kv=observed.kv,
            held_back=observed.held_back,
        )
        written = await self._status.write(service, status)
        if written is not None:
            observed.freshness.record("LLMService", written["metadata"]["resourceVersion"])
        scaled = self._autoscaler.take_events(resolved) if resolved is not None else []
        await self._status.emit(service, [*scaled, *new_events(service, status, problem)])
        return any(c.type == "Ready" and c.status == "True" for c in status.conditions or [])

    async def _probe_groups(
        self, state: _ReconcileState, target: Target
    ) -> dict[names.Role, ReportedGroup]:
        """Send the status probes, and pass the groups of pods to the autoscaler."""
        resolved, desired = target.resolved, target.desired
        observed = state.observed = await self._probes.fill_in(self._kube, state.observed, resolved)
        groups: dict[names.Role, ReportedGroup] = {}
        for role, template in desired.members.items():
            refusal = self._refused_pods.get(observed.key, role)
            groups[role] = member_group(
                resolved, role, template, observed, self._autoscaler.status(resolved, role), refusal
            )
        has_route = resolved.spec.gateway.http_route is not None and self._kube.http_routes
        groups["gateway"] = gateway_group(
            resolved, desired.gateway_revision, observed, has_route=has_route
        )
        self._autoscaler.observe(resolved, groups, observed.pods)
        return groups

    async def _report_defect(self, key: names.Key, error: Exception) -> None:
        """Report an unexpected error in a minimal status and in an Event."""
        try:
            service = await self._kube.read("LLMService", key.namespace, key.name)
            if service is not None:
                problem = problem_of(error)
                status = report_defect(service, problem, self._clock())
                await self._status.write(service, status)
                await self._status.emit(service, new_events(service, status, problem))
        except Exception:
            logger.exception("%s: the status could not be written after an internal error", key)
