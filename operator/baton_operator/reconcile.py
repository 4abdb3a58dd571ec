"""`reconcile(key)`: observe, plan, apply, report. Level-triggered and idempotent.

The work queue calls it, never twice at the same time for one key.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from baton_operator import logs, names
from baton_operator.api import Status, decode_spec
from baton_operator.api_update import surge_and_unavailable
from baton_operator.apply import (
    GatewayAPIMissing,
    NameConflict,
    ServiceKeyUnusable,
    apply_members,
    apply_objects,
    collect_config_maps,
    ensure_service_key,
)
from baton_operator.autoscale.autoscaler import Autoscaler
from baton_operator.builders import service_key
from baton_operator.builders.member import MemberTemplate
from baton_operator.builders.owner import Owner
from baton_operator.coordinator import CoordinatorClient
from baton_operator.desired import Desired, desired
from baton_operator.drain import Drainer
from baton_operator.events import Events
from baton_operator.history import record as record_spec
from baton_operator.history import recorded_name
from baton_operator.kube import Kube, KubeError
from baton_operator.loading import LoadingPods
from baton_operator.observe import Observation, controlled_by, observe
from baton_operator.plan import GroupPlan, Update, plan_group
from baton_operator.plan_expert_group import ExpertGroup, plan_expert_group
from baton_operator.report import Group, Problem, new_failures, report
from baton_operator.report_topology import GroupTopology, operation_events
from baton_operator.rules import violations
from baton_operator.topology import of_the_key, record, recorded_for
from baton_operator.workqueue import Key

log = logging.getLogger(__name__)
Object = dict[str, Any]

CONFLICT_REVISIT_S = 5.0
UNSETTLED_REVISIT_S = 20.0
"""A service that is not Ready may get on, or get worse, by the passing of time alone."""
LOADING_REVISIT_S = 3.0
"""While pods tell how far they are, which no event does."""


class InvalidSpec(Exception):  # noqa: N818 - the reason of the condition
    """The spec passed the schema of the CRD that is installed, but this operator cannot use it."""


class Paused(Exception):  # noqa: N818 - the reason of the condition
    """Nothing is to be done."""


class Reconciler:
    """Brings services to their desired state, one step per call."""

    def __init__(
        self,
        kube: Kube,
        drainer: Drainer,
        coordinators: CoordinatorClient,
        operator_namespace: str | None = None,
        autoscaler: Autoscaler | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        loading: LoadingPods | None = None,
    ) -> None:
        """`operator_namespace`: of this process's pod, for network policies; None if it is no pod. `autoscaler`: with a task that
        runs it; None: sizes stay."""
        self._autoscaler = autoscaler or Autoscaler()
        self._clock = clock
        self._loading = loading
        self._operator_namespace = operator_namespace
        self._kube = kube
        self._drainer = drainer
        self._coordinators = coordinators
        self._events = Events(kube)

    async def reconcile(self, key: Key) -> float | None:
        """One step for the service `key`.

        Returns:
            Seconds after which to look again even without an event; None: an event or the resync will do.

        Raises:
            KubeError, OSError, TimeoutError: the step failed; the status says so as far as it could be written. Retry.
        """
        # 1. What exists?
        observed = await observe(self._kube, self._drainer, self._coordinators, key.namespace, key.name)
        if observed is None:
            self._autoscaler.forget(key)
            return None
        now = self._clock()
        owner: Owner | None = None
        wanted: Desired | None = None
        problem: Problem | None = None
        failure: Exception | None = None
        revisit_s: float | None = None
        existing: dict[tuple[str, str], Object] = {}
        spec_revision = recorded_name(observed.service)
        try:
            # 2. What should exist?
            if observed.nothing_to_keep:
                raise Paused("spec.paused is true, and nothing was rolled out before")
            owner = self._autoscaler.sized(_owner(observed), observed.service)
            observed.key = await ensure_service_key(self._kube, owner, observed.key_secret)
            owner = msgspec.structs.replace(owner, key_name=service_key.name_of(observed.key))
            if owner.spec.gateway.http_route is not None:
                await self._kube.serves_http_routes()
            wanted = _wanted(owner, observed, self._kube, self._operator_namespace)
            if not owner.spec.paused:  # a pause keeps to what is recorded here
                spec_revision = await record_spec(self._kube, owner, observed.service)
            # 3. The objects beside the members.
            existing, errors = await apply_objects(self._kube, owner, wanted)
            if any(obj["kind"] == "ConfigMap" and _key(obj) not in existing for obj in wanted.objects):
                raise errors[0]  # pods would start with a configuration that is missing, or someone else's
            # 4. The next step of each group of members; what was refused beside them, or to another group, does not hold it up.
            for role, template in wanted.members.items():
                plan = await self._plan(owner, role, template, observed, now)
                revisit_s = min(filter(None, (revisit_s, plan.revisit_s)), default=None)
                try:
                    await apply_members(self._kube, self._events, owner, template, plan, observed, now)
                except (NameConflict, KubeError) as error:
                    errors.append(error)
            if errors:
                raise errors[0]
            # 5. Configuration that no pod needs any more.
            await collect_config_maps(self._kube, owner, wanted, observed)
        except InvalidSpec as error:
            problem = Problem("InvalidSpec", f"spec: {error}")
        except Paused as error:
            problem = Problem("Paused", str(error))
        except (NameConflict, GatewayAPIMissing, ServiceKeyUnusable) as error:
            problem, revisit_s = Problem(type(error).__name__, str(error)), revisit_s or CONFLICT_REVISIT_S
        except KubeError as error:
            problem, failure = Problem("ReconcileError", str(error)), error
        except OSError as error:
            problem, failure = (
                Problem("ReconcileError", f"the API server did not answer: {error or type(error).__name__}"),
                error,
            )
        # 6. Say so, even when a step failed.
        is_ready = await self._report(observed, owner, wanted, existing, problem, now, spec_revision)
        if failure is not None:
            raise failure
        if is_ready:
            return revisit_s
        unsettled_s = LOADING_REVISIT_S if observed.loading else UNSETTLED_REVISIT_S
        return min(revisit_s or unsettled_s, unsettled_s)

    async def _plan(
        self, owner: Owner, role: names.MemberRole, template: MemberTemplate, observed: Observation, now: datetime
    ) -> GroupPlan:
        """The next step of one group. What it wants of the coordinator is asked for here, before any pod is touched."""
        members, desired = observed.members[role], owner.replicas(role)
        drain_timeout_s = float(owner.spec.drain_timeout_seconds)
        if not template.expert_group:
            return plan_group(
                members,
                desired=desired,
                revision=template.revision,
                update=_update(owner, role),
                drain_timeout_s=drain_timeout_s,
                now=now,
            )
        assert owner.coordinator is not None, "a template of ranks needs it"
        group = ExpertGroup(
            service_uid=owner.uid,
            name=template.expert_group,
            desired=desired,
            revision=template.revision,
            topology=observed.topology,
            recorded=of_the_key(recorded_for(observed.service, owner.coordinator), observed.pods, owner.key_name),
            drain_timeout_s=drain_timeout_s,
            update=_update(owner, role),
        )
        plan = plan_expert_group(members, group, now)
        if plan.request is not None:
            logs.operation.set(plan.request.operation_id)
            observed.topology = await self._coordinators.ask_for(owner.coordinator, plan.request, observed.key)
            if observed.topology is not None:
                words = (
                    f"operation {plan.request.operation_id}: the topology shall be {', '.join(plan.request.members)}"
                )
                await self._events.normal(observed.service, "TopologyRequested", words)
        return plan

    async def _report(
        self,
        observed: Observation,
        owner: Owner | None,
        wanted: Desired | None,
        existing: dict[tuple[str, str], Object],
        problem: Problem | None,
        now: datetime,
        spec_revision: str | None,
    ) -> bool:
        """Writes the status and what there is to tell. Whether the service is Ready."""
        groups: dict[names.Role, Group] = {}
        cluster_ip = None
        if owner is not None and wanted is not None:
            observed.loading = await self._loading.ask(observed.pods) if self._loading else {}
            for role, template in wanted.members.items():
                groups[role] = Group(
                    role=role,
                    desired=owner.replicas(role),
                    pods=observed.role_pods(role),
                    revision=template.revision,
                    topology=_topology(observed, owner) if template.expert_group else None,
                    autoscaling=self._autoscaler.status(owner, role),
                    loading=observed.loading,
                )
            deployment = await self._owned(existing, "Deployment", owner)
            groups["gateway"] = Group(
                role="gateway",
                desired=owner.spec.gateway.replicas,
                pods=observed.role_pods("gateway"),
                updated=deployment is not None and _rolled_out(deployment),
                template_revision=_gateway_revision(wanted),
            )
            service = await self._owned(existing, "Service", owner)
            cluster_ip = service["spec"].get("clusterIP") if service else None
            self._autoscaler.observe(owner, groups, observed.pods)
        status = report(
            observed.service,
            owner,
            groups,
            cluster_ip=cluster_ip,
            problem=problem,
            now=now,
            spec_revision=spec_revision,
        )
        await self._write_status(observed.service, status)
        for news in self._autoscaler.take_news(owner) if owner is not None else ():
            emit = self._events.warning if news.warning else self._events.normal
            await emit(observed.service, news.reason, news.message)
        for condition in new_failures(observed.service, status):
            await self._events.warning(observed.service, condition.reason, condition.message)
        if owner is not None and owner.coordinator is not None and status.decode is not None:
            before = recorded_for(observed.service, owner.coordinator)
            for warning, reason, message in operation_events(before, status.decode.topology):
                emit = self._events.warning if warning else self._events.normal
                await emit(observed.service, reason, message)
        return any(c.type == "Ready" and c.status == "True" for c in status.conditions or [])

    async def _owned(self, existing: dict[tuple[str, str], Object], kind: str, owner: Owner) -> Object | None:
        """The gateway's object of this kind, also when a failed step left `existing` empty."""
        name = names.gateway_name(owner.name)
        found = existing.get((kind, name)) or await self._kube.get(kind, owner.namespace, name)
        return found if found and controlled_by(found, owner.uid) else None

    async def _write_status(self, service: Object, status: Status) -> None:
        new = msgspec.to_builtins(status)
        if status.decode is None:  # nothing could be judged: what was known of the groups stays
            new = {field: value for field, value in new.items() if value is not None}
        old = service.get("status") or {}
        if _says(old, new):
            return
        metadata = service["metadata"]
        # A merge patch: null removes what no longer applies. The uid keeps it from a successor of the same name.
        patch = {"metadata": {"uid": metadata["uid"]}, "status": new}
        try:
            await self._kube.merge("LLMService", metadata["namespace"], metadata["name"], patch, "status")
        except KubeError as error:
            if error.status != 404:  # deleted meanwhile
                raise


def _update(owner: Owner, role: names.MemberRole) -> Update:
    """How the spec wants the members of `role` to be replaced."""
    strategy = owner.spec.update_strategy.decode if role == "decode" else owner.spec.update_strategy.prefill
    max_surge, max_unavailable = surge_and_unavailable(strategy, owner.replicas(role))
    return Update(
        max_surge=max_surge,
        max_unavailable=max_unavailable,
        surge_timeout_s=float(strategy.surge_timeout_seconds),
        paused=owner.spec.paused,
    )


def _key(obj: Object) -> tuple[str, str]:
    return obj["kind"], obj["metadata"]["name"]


def _says(old: Any, new: Any) -> bool:
    """Whether the merge patch `new` would change nothing: what it sets to null is not there."""
    if isinstance(new, dict) and isinstance(old, dict | None):
        return all(_says((old or {}).get(field), value) for field, value in new.items())
    return bool(old == new)


def _topology(observed: Observation, owner: Owner) -> GroupTopology:
    """What the status says of the topology, after this step."""
    assert owner.coordinator is not None, "a template of ranks needs it"
    pods = {pod["metadata"]["name"] for pod in observed.pods}
    topology, recorded = observed.topology, recorded_for(observed.service, owner.coordinator)
    return GroupTopology(
        status=record(topology, recorded, pods, owner.coordinator),
        reachable=topology is not None,
        asked_for=frozenset(topology.desired) if topology else frozenset(),
    )


def _owner(observed: Observation) -> Owner:
    """Raises InvalidSpec naming the field."""
    metadata = observed.service["metadata"]
    try:
        spec = decode_spec(observed.service["spec"])
    except ValueError as error:  # msgspec.ValidationError is one
        raise InvalidSpec(str(error)) from error
    if broken := violations(spec):
        raise InvalidSpec("; ".join(broken))
    return Owner(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        spec=spec,
        coordinator=observed.coordinator,
    )


def _wanted(owner: Owner, observed: Observation, kube: Kube, operator_namespace: str | None) -> Desired:
    """Raises InvalidSpec naming the field."""
    try:
        return desired(
            owner,
            kube.policy_api,
            keep_coordinator=observed.has_ranks,
            operator_namespace=operator_namespace,
            http_routes=kube.http_routes,
        )
    except ValueError as error:
        raise InvalidSpec(str(error)) from error


def _gateway_revision(wanted: Desired) -> str | None:
    for obj in wanted.objects:
        labels = obj["metadata"]["labels"]
        if obj["kind"] == "Deployment" and labels[names.LABEL_ROLE] == "gateway":
            return str(obj["spec"]["template"]["metadata"]["labels"][names.LABEL_REVISION])
    return None


def _rolled_out(deployment: Object) -> bool:
    """Whether the Deployment's controller has seen the newest template and replaced every pod."""
    status = deployment.get("status") or {}
    seen = status.get("observedGeneration", 0) >= deployment["metadata"]["generation"]
    return seen and status.get("updatedReplicas", 0) == status.get("replicas", 0) == deployment["spec"]["replicas"]
