"""Reconcile one service: observe, plan, apply, report. Level-triggered and idempotent.

`Reconciler._run_steps` and `Reconciler._converge` list the steps, in order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from baton_kube.client import KubeError, Object
from baton_operator import names
from baton_operator.autoscale.autoscaler import Autoscaler
from baton_operator.builders import service_key_secret
from baton_operator.builders.restrictions import Restrictions
from baton_operator.kube.events import emit
from baton_operator.kube.objects import Kube
from baton_operator.observe.freshness import MOVING_KINDS, Freshness, StaleReadError
from baton_operator.observe.observation import observe
from baton_operator.observe.pod_clients import CoordinatorClient, Drainer
from baton_operator.reconcile.apply import (
    apply_objects,
    delete_unused_config_maps,
    ensure_service_key,
    missing_prerequisites,
)
from baton_operator.reconcile.controller import Outcome
from baton_operator.reconcile.desired import Desired, compute_desired, resolve
from baton_operator.reconcile.drain import drain_members
from baton_operator.reconcile.member_reconciler import MemberReconciler
from baton_operator.reconcile.reconcile_state import ReconcileState
from baton_operator.reconcile_errors import (
    GatewayAPIMissing,
    InvalidSpec,
    Paused,
    drop_tracebacks,
    problem_of,
)
from baton_operator.revision_history import record_spec, recorded_name, recorded_spec
from baton_operator.status.report import report, report_defect
from baton_operator.status.report_events import new_events
from baton_operator.status.report_group import ReportedGroup, gateway_group, member_group
from baton_operator.status.status_probes import StatusProbes
from baton_operator.status.status_writer import write_status

logger = logging.getLogger(__name__)


class Reconciler:
    """Takes one step towards the desired state of a service in each call of `reconcile`.

    Args:
        operator_namespace: namespace of the operator's pod, for network policies. None: the
            operator does not run in the cluster.
        autoscaler: decides the sizes of groups with `autoscaling`. None: the sizes never change.
        probes: status probes of pods. None: no HTTP requests are sent to pods.
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
        self._members = MemberReconciler(kube, coordinators)
        #: By service: `ReconcileState.objects_hash` of the last reconcile. Only services whose last
        #: reconcile left all objects as desired have an entry.
        self._verified: dict[names.Key, str] = {}

    async def reconcile(self, key: names.Key, freshness: Freshness) -> Outcome:
        """Take one step for the service `key`. The caller must retry after an error.

        Raises:
            KubeError, OSError: the API server refused a request or did not respond.
            Exception: the operator has a defect, which the status reports.
        """
        try:
            state = await self._run_until_fresh(key, freshness)
        except (KubeError, OSError):
            raise
        except Exception as error:
            await self._report_defect(key, error)
            raise
        return state.outcome() if state is not None else Outcome(is_gone=True)

    async def _run_until_fresh(self, key: names.Key, freshness: Freshness) -> ReconcileState | None:
        """Run the steps. If one of their reads may be stale, repeat them with consistent reads."""
        try:
            return await self._run_steps(key, freshness)
        except StaleReadError as error:
            drop_tracebacks(error)  # frees the objects that the first run has read
        return await self._run_steps(key, Freshness(versions=freshness.versions))

    async def _run_steps(self, key: names.Key, freshness: Freshness) -> ReconcileState | None:
        """Run one reconcile. Return its state, or None if the service is deleted."""
        # 1. Observe what exists.
        observed = await observe(self._kube, self._coordinators, key, freshness)
        if observed is None:
            self._forget(key)
            return None
        state = ReconcileState(observed, self._clock(), recorded_name(observed.service))
        try:
            # 2 to 7. Move the service one step towards its desired state.
            await self._converge(state)
        except StaleReadError:
            raise
        except Exception as error:  # after any error the status must not stay Ready
            state.add_problem(error)
        # 8. Send the status probes, and pass the groups to the autoscaler, even if a step failed.
        groups = {} if state.desired is None else await self._probe_groups(state, state.desired)
        # 9. Report.
        state.is_ready = await self._report(state, groups)
        return state

    async def _converge(self, state: ReconcileState) -> None:
        """Take the steps that change the service, and set `state.desired`.

        Raises:
            StaleReadError: a step needs consistent reads.
            Exception: a step failed, and the steps after it were not taken.
        """
        # 2. Drain marked members, and count their unfinished requests. Step 1 has read the topology
        # before. A member with phase STANDBY there gets no new requests, so its number of
        # unfinished requests can only fall.
        state.observed = await drain_members(self._drainer, state.observed)
        # 3. Find members that are paused or asleep. They do not stall a rollout.
        state.observed = await self._probes.find_suspended(state.observed, state.now)
        # 4. Create the service's key if there is none, and compute what should exist. Record the
        # spec, unless the service is paused or its spec cannot be used. In these two cases, the
        # spec that was recorded last is used.
        state.desired = desired = await self._build_desired(state)
        if not desired.resolved.spec.paused and not state.problems:
            state.spec_revision = await record_spec(
                self._kube, desired.resolved, state.observed.service
            )
        # 5. Write the objects other than member pods.
        can_create_members = await self._write_objects(state, desired)
        # 6. Take the next step of each group of members, if the objects that they need exist.
        if can_create_members and await self._members.reconcile(state, desired):
            # 7. Delete ConfigMaps that no pod needs. If all objects match, store their hash.
            needed = desired.config_maps | state.restored_config_maps
            await delete_unused_config_maps(self._kube, needed, state.observed)
            if state.objects_match:
                self._verified[state.observed.key] = state.objects_hash

    def _forget(self, key: names.Key) -> None:
        """Drop the cached state of a deleted service."""
        self._verified.pop(key, None)
        self._autoscaler.forget(key)
        self._members.refused_pods.forget(key)
        self._probes.forget(key)

    async def _build_desired(self, state: ReconcileState) -> Desired:
        """Build the desired state from the spec of the service.

        If that spec cannot be used, use the spec that was rolled out last.

        Raises:
            Problem: neither spec can be used.
        """
        observed = state.observed
        if observed.has_no_recorded_spec:
            raise Paused("spec.paused is true, and nothing was rolled out before; set it to false")
        try:
            return await self._build_from(observed.service["spec"], state)
        except Exception as error:
            state.add_problem(error)
            return await self._build_from_recorded(state)

    async def _build_from_recorded(self, state: ReconcileState) -> Desired:
        """Build the desired state from the spec that was rolled out last.

        Raises:
            Problem: the first problem of this reconcile. It is raised if no recorded spec can be
                used, or if the spec of the service did not cause the problem.
        """
        problem = state.problems[0]
        recorded = (
            await recorded_spec(self._kube, state.observed.service) if problem.is_of_spec else None
        )
        if recorded is not None:
            try:
                return await self._build_from(recorded, state)
            except Exception as error:
                logger.warning(
                    "no object is written, because the spec that was rolled out last cannot be "
                    "used either: %s; correct the spec",
                    error,
                )
        raise problem

    async def _build_from(self, spec: Object, state: ReconcileState) -> Desired:
        """Build the desired state from `spec`, for the optional APIs that the API server has.

        If the service has no key yet, create it.

        Raises:
            Problem: the spec or the service's key cannot be used.
            KubeError: the API server refused a request.
        """
        resolved = resolve(state.observed, spec, self._restrictions)
        resolved = self._autoscaler.apply_sizes(resolved, state.observed.service)
        state.resolved = resolved  # set first: the status needs it if a later step fails
        key = await ensure_service_key(self._kube, resolved, state.observed.key_secret)
        state.observed = msgspec.structs.replace(state.observed, service_key=key)
        resolved = msgspec.structs.replace(resolved, key_name=service_key_secret.name_of(key))
        has_http_routes = self._kube.http_routes
        if resolved.spec.gateway.http_route is not None:
            has_http_routes = await self._kube.discover_http_routes()
        try:
            return compute_desired(
                resolved,
                self._kube.policy_api,
                keep_coordinator=state.observed.has_ranks,
                operator_namespace=self._operator_namespace,
                http_routes=has_http_routes,
            )
        except ValueError as error:
            raise InvalidSpec(error) from error

    async def _write_objects(self, state: ReconcileState, desired: Desired) -> bool:
        """Write all objects except member pods. Add refused objects to the problems.

        Returns:
            Whether the objects that members need exist.
        """
        observed = state.observed
        kinds = self._kinds_to_compare(state, desired)
        if "status" in observed.service:
            await observed.read_objects(self._kube, kinds)
        else:  # a new service: `apply_objects` reads each object by name before it is created
            observed.kinds.update(kinds)
        refused = await apply_objects(self._kube, desired, observed)
        for each in refused:
            state.add_problem(each.problem)
        state.objects_match = all(isinstance(each.problem, GatewayAPIMissing) for each in refused)
        missing = missing_prerequisites(desired, observed)
        if missing and not refused:
            raise RuntimeError(
                f"no object was refused, but members need missing objects: {sorted(missing)}"
            )
        return not missing

    def _kinds_to_compare(self, state: ReconcileState, desired: Desired) -> set[str]:
        """Set `state.objects_hash`. Return the kinds of objects to read, compare and write.

        Only MOVING_KINDS are returned if no object of another kind can differ from the desired
        state. For this, all objects must have matched the same desired state after the last
        reconcile, and no other client may have changed them since. A reconcile with consistent
        reads returns all kinds.
        """
        observed, freshness = state.observed, state.observed.freshness
        state.objects_hash = names.content_hash(
            [
                desired.objects,
                desired.absent,
                # Previous ConfigMaps. After a pod has stopped mounting one, all kinds are read, so
                # that `delete_unused_config_maps` finds it.
                sorted(observed.mounted_config_maps - desired.config_maps),
            ]
        )
        is_verified = self._verified.pop(observed.key, "") == state.objects_hash
        kinds = {obj["kind"] for obj in desired.objects}
        if is_verified and not freshness.is_consistent and not freshness.objects_changed:
            return kinds & MOVING_KINDS
        return kinds | {kind for kind, _ in desired.absent}

    async def _report(self, state: ReconcileState, groups: dict[names.Role, ReportedGroup]) -> bool:
        """Write the status and its Events. Return whether the service is Ready."""
        observed, service, resolved = state.observed, state.observed.service, state.resolved
        problem = state.problems[0] if state.problems else None
        status = report(
            observed,
            resolved,
            groups,
            problem=problem,
            now=state.now,
            spec_revision=state.spec_revision,
        )
        written = await write_status(self._kube, service, status)
        if written is not None:
            observed.freshness.record("LLMService", written["metadata"]["resourceVersion"])
        scaled = self._autoscaler.take_events(resolved) if resolved is not None else []
        for event in [*scaled, *new_events(service, status, problem)]:
            await emit(self._kube, service, event)
        return any(c.type == "Ready" and c.status == "True" for c in status.conditions or [])

    async def _probe_groups(
        self, state: ReconcileState, desired: Desired
    ) -> dict[names.Role, ReportedGroup]:
        """Send the status probes, and pass the groups of pods to the autoscaler.

        Returns:
            The observed groups by role, as input of the status.
        """
        resolved = desired.resolved
        observed = state.observed = await self._probes.probe(self._kube, state.observed, resolved)
        groups: dict[names.Role, ReportedGroup] = {}
        for role, template in desired.members.items():
            refusal = self._members.refused_pods.get(observed.key, role)
            groups[role] = member_group(
                resolved, role, template, observed, self._autoscaler.status(resolved, role), refusal
            )
        groups["gateway"] = gateway_group(
            resolved, desired.gateway_revision, observed, has_route=desired.has_http_route
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
                await write_status(self._kube, service, status)
                for event in new_events(service, status, problem):
                    await emit(self._kube, service, event)
        except Exception:
            logger.exception("%s: the status could not be written after an internal error", key)
