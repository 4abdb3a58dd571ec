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
from baton_operator.api import Status
from baton_operator.api_update import surge_and_unavailable
from baton_operator.apply import apply_members, apply_objects, collect_config_maps, ensure_service_key
from baton_operator.autoscale.autoscaler import Autoscaler
from baton_operator.builders import service_key
from baton_operator.builders.member import MemberTemplate
from baton_operator.builders.owner import Owner
from baton_operator.coordinator import CoordinatorClient
from baton_operator.desired import Desired
from baton_operator.drain import Drainer
from baton_operator.events import Events
from baton_operator.former import find_former
from baton_operator.gateway_group import gateway_group
from baton_operator.history import kept_spec, recorded_name
from baton_operator.history import record as record_spec
from baton_operator.kube import Kube, KubeError
from baton_operator.loading import LoadingPods, will_tell
from baton_operator.observe import Observation, controlled_by, observe
from baton_operator.peers import KVPeers
from baton_operator.plan import GroupPlan, Update, plan_group
from baton_operator.plan_expert_group import ExpertGroup, plan_expert_group
from baton_operator.problems import CONFLICTS, Paused, is_failure, is_news, is_of_the_spec, problem_of, status_of_defect
from baton_operator.questions import Questions
from baton_operator.refusals import Refusal, Refusals, refusal_of_deployment
from baton_operator.report import Group, Problem, new_failures, report
from baton_operator.report_topology import GroupTopology, operation_events
from baton_operator.topology import asleep, of_the_key, record, recorded_for
from baton_operator.wanted import desired_of, owner_of
from baton_operator.workqueue import Key

log = logging.getLogger(__name__)
Object = dict[str, Any]

CONFLICT_REVISIT_S = 5.0
UNSETTLED_REVISIT_S = 20.0
"""A service that is not Ready may get on, or get worse, by the passing of time alone."""
LOADING_REVISIT_S = 3.0
"""While pods tell how far they are, or are about to, which no event does."""


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
        peers: KVPeers | None = None,
    ) -> None:
        """`operator_namespace`: of this process's pod, for network policies; None if it is no pod. `autoscaler`: with a task that
        runs it; None: sizes stay."""
        self._autoscaler = autoscaler or Autoscaler()
        self._clock = clock
        self._questions = Questions(kube, loading, peers)
        self._operator_namespace = operator_namespace
        self._kube = kube
        self._drainer = drainer
        self._coordinators = coordinators
        self._events = Events(kube)
        self._refusals = Refusals()

    async def reconcile(self, key: Key) -> float | None:
        """One step for the service `key`.

        Returns:
            Seconds after which to look again even without an event; None: an event or the resync will do.

        Raises:
            Exception: the step failed; the status says so as far as it could be written. Retry. KubeError and OSError are of the
                API server, any other is a defect.
        """
        try:
            revisit_s, failure = await self._step(key)
        except (KubeError, OSError):
            raise
        except Exception as error:
            await self._tell_of_defect(key, error)
            raise
        if failure is not None:
            raise failure
        return revisit_s

    async def _step(self, key: Key) -> tuple[float | None, Exception | None]:
        """What `reconcile` returns, and what it raises although the status was written."""
        # 1. What exists?
        observed = await observe(self._kube, self._drainer, self._coordinators, key.namespace, key.name)
        if observed is None:
            self._autoscaler.forget(key)
            self._refusals.forget(key)
            self._questions.forget(key)
            return None, None
        now = self._clock()
        owner: Owner | None = None
        wanted: Desired | None = None
        unusable: Exception | None = None
        failure: Exception | None = None
        revisit_s: float | None = None
        existing: dict[tuple[str, str], Object] = {}
        spec_revision = recorded_name(observed.service)
        try:
            # 2. What should exist? While nothing can be made of the spec: what was rolled out before it.
            if observed.nothing_to_keep:
                raise Paused("spec.paused is true, and nothing was rolled out before")
            owner, wanted, unusable = await self._wanted(observed)
            if (
                unusable is not None
                and is_of_the_spec(unusable)
                and (kept := await kept_spec(self._kube, observed.service))
            ):
                observed.service = {**observed.service, "spec": kept}
                owner, wanted, _ = await self._wanted(observed)
            if owner is None or wanted is None:
                assert unusable is not None, "nothing is missing without a reason"
                raise unusable
            if not owner.spec.paused and unusable is None:  # a pause keeps to what is recorded here
                spec_revision = await record_spec(self._kube, owner, observed.service)
            former = await find_former(self._kube, owner, observed.service, spec_revision, wanted.members)
            # 3. The objects beside the members.
            existing, refused = await apply_objects(self._kube, owner, wanted)
            errors: list[Exception] = [*refused]
            if any(obj["kind"] == "ConfigMap" and _key(obj) not in existing for obj in wanted.objects):
                raise errors[0]  # pods would start with a configuration that is missing, or someone else's
            # 4. The next step of each group of members; what was refused beside them, or to another group, does not hold it up.
            for role, template in wanted.members.items():
                try:
                    plan = await self._plan(owner, role, template, observed, now, has_former=role in former)
                    plan = self._refusals.hold_back(key, role, template.revision, plan, now)
                    revisit_s = min(filter(None, (revisit_s, plan.revisit_s)), default=None)
                    refusal = await apply_members(
                        self._kube, self._events, owner, template, former.get(role), plan, observed, now
                    )
                except OSError:
                    raise
                except Exception as error:  # a defect, too, is of this group only
                    errors.append(error)
                    continue
                if plan.restore:
                    wanted.objects.append(former[role].config_map)
                if plan.create or plan.restore:
                    pause_s = self._refusals.note(key, role, template.revision, refusal, now)
                    revisit_s = min(filter(None, (revisit_s, pause_s)), default=None)
            if errors:
                raise errors[0]
            # 5. Configuration that no pod needs any more.
            await collect_config_maps(self._kube, owner, wanted, observed)
        except Exception as error:  # whatever it is, a status that says Ready is not left behind
            failure = error
        if isinstance(failure, CONFLICTS):
            revisit_s = revisit_s or CONFLICT_REVISIT_S
        # 6. Say so, even when a step failed.
        told = unusable or failure
        problem = problem_of(told) if told else None
        is_ready = await self._report(observed, owner, wanted, existing, problem, now, spec_revision)
        for each in (failure, unusable):
            if each is not None and is_failure(each):
                return None, each
        if is_ready:
            return revisit_s, None
        unsettled_s = LOADING_REVISIT_S if will_tell(observed.pods, observed.loading) else UNSETTLED_REVISIT_S
        return min(revisit_s or unsettled_s, unsettled_s), None

    async def _wanted(self, observed: Observation) -> tuple[Owner | None, Desired | None, Exception | None]:
        """What should exist by the spec; None as far as it cannot be said, and why."""
        owner: Owner | None = None
        try:
            owner = self._autoscaler.sized(owner_of(observed), observed.service)
            observed.key = await ensure_service_key(self._kube, owner, observed.key_secret)
            owner = msgspec.structs.replace(owner, key_name=service_key.name_of(observed.key))
            if owner.spec.gateway.http_route is not None:
                await self._kube.serves_http_routes()
            return owner, desired_of(owner, observed, self._kube, self._operator_namespace), None
        except Exception as error:
            return owner, None, error

    async def _tell_of_defect(self, key: Key, error: Exception) -> None:
        """The last resort, where not even a status could be made: with none of what may have gone wrong."""
        try:
            service = await self._kube.get("LLMService", key.namespace, key.name)
            if service is not None:
                await self._write_status(service, status_of_defect(service, error, self._clock()))
                await self._tell(service, problem_of(error))
        except Exception:
            log.exception("%s: not even that could be told", key)

    async def _plan(
        self,
        owner: Owner,
        role: names.MemberRole,
        template: MemberTemplate,
        observed: Observation,
        now: datetime,
        *,
        has_former: bool,
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
                has_former=has_former,
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
            key = Key(owner.namespace, owner.name)
            await self._questions.ask(observed, owner)
            for role, template in wanted.members.items():
                groups[role] = Group(
                    role=role,
                    desired=owner.replicas(role),
                    pods=observed.role_pods(role),
                    revision=template.revision,
                    topology=_topology(observed, owner) if template.expert_group else None,
                    autoscaling=self._autoscaler.status(owner, role),
                    loading=observed.loading,
                    refusal=self._refusals.of(key, role)
                    or (_of_coordinator(existing, owner) if template.expert_group else None),
                    missing=observed.missing,
                    coordinators=observed.role_pods("coordinator") if template.expert_group else [],
                )
            deployment = await self._owned(existing, "Deployment", owner)
            route = await self._owned(existing, "HTTPRoute", owner) if self._has_route(owner) else None
            groups["gateway"] = gateway_group(owner, wanted, observed, deployment, route)
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
            kv=observed.kv,
            held_back=observed.held_back,
        )
        await self._write_status(observed.service, status)
        for news in self._autoscaler.take_news(owner) if owner is not None else ():
            emit = self._events.warning if news.warning else self._events.normal
            await emit(observed.service, news.reason, news.message)
        if problem is not None:
            await self._tell(observed.service, problem)
        for condition in new_failures(observed.service, status):
            await self._events.warning(observed.service, condition.reason, condition.message)
        if owner is not None and owner.coordinator is not None and status.decode is not None:
            before = recorded_for(observed.service, owner.coordinator)
            for warning, reason, message in operation_events(before, status.decode.topology):
                emit = self._events.warning if warning else self._events.normal
                await emit(observed.service, reason, message)
        return any(c.type == "Ready" and c.status == "True" for c in status.conditions or [])

    async def _tell(self, service: Object, problem: Problem) -> None:
        """An event, once."""
        if is_news(service, problem):
            await self._events.warning(service, problem.reason, problem.message)

    def _has_route(self, owner: Owner) -> bool:
        return owner.spec.gateway.http_route is not None and self._kube.http_routes

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
        progress_deadline_s=float(owner.spec.progress_deadline_seconds),
        paused=owner.spec.paused,
    )


def _key(obj: Object) -> tuple[str, str]:
    return obj["kind"], obj["metadata"]["name"]


def _says(old: Any, new: Any) -> bool:
    """Whether the merge patch `new` would change nothing: what it sets to null is not there."""
    if isinstance(new, dict) and isinstance(old, dict | None):
        return all(_says((old or {}).get(field), value) for field, value in new.items())
    return bool(old == new)


def _of_coordinator(existing: dict[tuple[str, str], Object], owner: Owner) -> Refusal | None:
    """Why its pod is not taken."""
    deployment = existing.get(("Deployment", names.coordinator_name(owner.name)))
    return refusal_of_deployment(deployment) if deployment else None


def _topology(observed: Observation, owner: Owner) -> GroupTopology:
    """What the status says of the topology, after this step."""
    assert owner.coordinator is not None, "a template of ranks needs it"
    pods = {pod["metadata"]["name"] for pod in observed.pods}
    topology, recorded = observed.topology, recorded_for(observed.service, owner.coordinator)
    status = record(topology, recorded, pods, owner.coordinator)
    return GroupTopology(
        status=status if owner.replicas("decode") else asleep(status),
        reachable=topology is not None,
        asked_for=frozenset(topology.desired) if topology else frozenset(),
    )
