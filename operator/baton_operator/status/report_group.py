"""Compute the condition of one group: PrefillReady, DecodeReady or GatewayReady. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime

import msgspec

from baton_kube.client import Object
from baton_operator import names
from baton_operator.api.spec_groups import AutoscalingStatus
from baton_operator.builders.member_pods import MemberTemplate
from baton_operator.builders.resolved_service import ResolvedService
from baton_operator.observe.observation import (
    Observation,
    Reference,
    condition,
    has_ended,
    is_ready,
)
from baton_operator.plan.refused_pods import POD_REFUSED, PodRefusal, refusal_reason
from baton_operator.plan.topology_view import (
    recorded_topology,
    topology_for_status,
    without_waiting_operation,
)
from baton_operator.status.diagnose import (
    Diagnosis,
    Verdict,
    diagnose,
    diagnose_loading,
    is_leaving,
    pods_text,
    retry_text,
)
from baton_operator.status.reasons import Failure, Progress, Settled, is_progress
from baton_operator.status.report_route import diagnose_route
from baton_operator.status.report_topology import GroupTopology, topology_verdict
from baton_operator.status.suspended_engines import diagnose_suspended
from baton_protocol.kv_compatibility import KVCompatibility, differences
from baton_protocol.process.health import Health


class ReportedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The observed state of one group of pods, as input of the status."""

    role: names.Role
    desired: int
    pods: list[Object]
    #: Newest revision of the pods. None: it is not known, and every pod counts as newest.
    revision: str | None = None
    #: Whether the gateway's Deployment has all desired pods, and none of an earlier template. True
    #: for other groups.
    updated: bool = True
    #: Topology of an expert-parallel group. For such a group, `ready` counts ranks if the
    #: coordinator replies.
    topology: GroupTopology | None = None
    #: Autoscaling status of a group with `autoscaling`.
    autoscaling: AutoscalingStatus | None = None
    #: Replies to `GET /health` of pods that fetch or load the model, by pod name.
    loading: Mapping[str, Health] = {}
    #: Replies to `GET /ready` of engines that are paused or asleep, by pod name.
    suspended: Mapping[str, Health] = {}
    #: When unready pods were last found paused or asleep, by pod name.
    suspended_at: Mapping[str, datetime] = {}
    #: Why the API server refuses further pods. None: it does not.
    refusal: PodRefusal | None = None
    #: Secrets and ConfigMaps that pods wait for and that do not exist.
    missing: frozenset[Reference] = frozenset()
    #: Pods of the coordinator of an expert-parallel group. No group forms without a coordinator.
    coordinators: list[Object] = []
    #: Why no Gateway accepts the HTTPRoute. None: a Gateway accepts it, or there is no
    #: HTTPRoute.
    route: Diagnosis | None = None

    @property
    def current(self) -> list[Object]:
        """The group's pods, except those that are draining, are being deleted or have ended."""
        return [pod for pod in self.pods if not is_leaving(pod) and not has_ended(pod)]

    @property
    def current_names(self) -> set[str]:
        return {pod["metadata"]["name"] for pod in self.current}

    @property
    def ready(self) -> int:
        """Number of pods in `current` that serve, of any revision."""
        if self.topology is not None and self.topology.reachable:
            return len((self.current_names & self.topology.serving) - self.suspended.keys())
        return sum(map(is_ready, self.current))

    @property
    def newest(self) -> list[Object]:
        """The pods in `current` that have the newest revision."""
        return [pod for pod in self.current if self.is_newest(pod)]

    @property
    def is_rolled_out(self) -> bool:
        """Whether all pods in `current` have the newest revision.

        For the gateway: whether its Deployment has all desired pods, and none of an earlier
        template.
        """
        return self.updated if self.role == "gateway" else len(self.newest) == len(self.current)

    def is_newest(self, pod: Object) -> bool:
        return self.revision in (None, pod["metadata"]["labels"].get(names.LABEL_REVISION))


def member_group(
    resolved: ResolvedService,
    role: names.MemberRole,
    template: MemberTemplate,
    observed: Observation,
    autoscaling: AutoscalingStatus | None,
    refusal: PodRefusal | None,
) -> ReportedGroup:
    """Return the observed state of the prefill or decode group.

    Args:
        refusal: why the API server refuses further pods of the group; None if it does not.
    """
    coordinators: list[Object] = []
    if template.expert_group:
        coordinators = observed.role_pods("coordinator")
        deployment = observed.owned("Deployment", names.coordinator_name(resolved.name))
        refusal = refusal or (refusal_of_deployment(deployment) if deployment else None)
    return ReportedGroup(
        role=role,
        desired=resolved.replicas(role),
        pods=observed.role_pods(role),
        revision=template.revision,
        topology=_topology(observed, resolved) if template.expert_group else None,
        autoscaling=autoscaling,
        loading=observed.loading,
        suspended=observed.suspended,
        suspended_at=observed.suspended_at,
        refusal=refusal,
        missing=observed.missing,
        coordinators=coordinators,
    )


def gateway_group(
    resolved: ResolvedService, revision: str, observed: Observation, *, has_route: bool
) -> ReportedGroup:
    """Return the observed state of the group of gateway pods.

    Args:
        revision: newest revision of the pods.
        has_route: whether the spec has an HTTPRoute and the API server supports the kind.
    """
    name = names.gateway_name(resolved.name)
    deployment = observed.owned("Deployment", name)
    route = observed.owned("HTTPRoute", name) if has_route else None
    return ReportedGroup(
        role="gateway",
        desired=resolved.spec.gateway.replicas,
        pods=observed.role_pods("gateway"),
        revision=revision,
        updated=deployment is not None and _is_deployment_rolled_out(deployment),
        refusal=refusal_of_deployment(deployment) if deployment else None,
        route=diagnose_route(route) if route else None,
        missing=observed.missing,
    )


def refusal_of_deployment(deployment: Object) -> PodRefusal | None:
    """Return why the API server refuses new pods of the Deployment; None if it does not."""
    failure = condition(deployment, "ReplicaFailure")
    if failure.get("status") != "True":
        return None
    text = failure.get("message") or failure.get("reason") or "no reason was given"
    what = f"the API server refuses pods of Deployment {deployment['metadata']['name']}"
    return PodRefusal(refusal_reason(text) or POD_REFUSED, f"{what}: {text}")


def _topology(observed: Observation, resolved: ResolvedService) -> GroupTopology:
    """Return the topology of the expert-parallel group, from the last reply of the coordinator."""
    assert resolved.coordinator is not None, "a group has ranks only with a coordinator"
    pods = {pod["metadata"]["name"] for pod in observed.pods}
    topology = observed.topology
    recorded = recorded_topology(observed.service, resolved.coordinator)
    status = topology_for_status(topology, recorded, pods, resolved.coordinator)
    return GroupTopology(
        status=status if resolved.replicas("decode") else without_waiting_operation(status),
        reachable=topology is not None,
        requested=frozenset(topology.desired) if topology else frozenset(),
    )


def _is_deployment_rolled_out(deployment: Object) -> bool:
    """Return whether the Deployment has all desired pods and no pod of an earlier template."""
    status = deployment.get("status") or {}
    seen = status.get("observedGeneration", 0) >= deployment["metadata"]["generation"]
    return (
        seen
        and status.get("updatedReplicas", 0)
        == status.get("replicas", 0)
        == deployment["spec"]["replicas"]
    )


def group_verdict(group: ReportedGroup) -> Verdict:
    """Return the verdict on the condition of a group.

    The condition is True if the desired number of pods serve, and all of them have the newest
    revision. For the gateway, the HTTPRoute must also be accepted. With 0 desired pods, the
    condition is True only for the prefill group and for a group with `autoscaling`.
    """
    if group.desired == 0:
        return _verdict_without_pods(group)
    counts = _counts(group)
    if group.ready >= group.desired and group.is_rolled_out and len(group.current) == group.desired:
        if group.route is not None:
            return Verdict("False", group.route.reason, f"{group.route.message}; {counts}")
        return Verdict("True", Settled.PODS_READY, counts)
    obstacle = next((found for policy in _POLICIES if (found := policy(group))), None)
    if obstacle is None:
        return Verdict("False", Progress.STARTING, counts)
    return Verdict("False", obstacle.reason, f"{obstacle.message}; {counts}")


def _counts(group: ReportedGroup) -> str:
    """Return a text with the numbers of serving pods and of desired pods."""
    if group.topology is not None:
        return f"{group.ready} of {group.desired} {group.role} ranks serve"
    newest = sum(map(is_ready, group.newest))
    text = f"{newest} of {group.desired} {group.role} pods"
    if older := group.ready - newest:
        return f"{text} of the newest revision are ready, and {older} of earlier revisions"
    return f"{text} are ready"


def _verdict_without_pods(group: ReportedGroup) -> Verdict:
    if group.role == "prefill":
        return Verdict(
            "True",
            Settled.NOT_REQUESTED,
            "no prefill pods are desired: decode pods compute the prompts",
        )
    if group.autoscaling is not None:
        return Verdict(
            "True",
            Progress.SCALED_TO_ZERO,
            f"{group.role} is scaled to zero: the next request starts a pod",
        )
    hint = f"set spec.{group.role}.replicas to 1 or more"
    return Verdict("False", Progress.SCALED_TO_ZERO, f"{group.role} is scaled to zero; {hint}")


def _failing(group: ReportedGroup) -> Diagnosis | None:
    # A failed member is included, because it may show why its replacement fails. Failed gateway
    # pods are left out, because they remain after their replacement is ready.
    judged = (
        group.current
        if group.role == "gateway"
        else [pod for pod in group.pods if not is_leaving(pod)]
    )
    found = diagnose([*judged, *group.coordinators], group.missing)
    if found is None:
        return None
    return Diagnosis(found.reason, f"{found.message}{retry_text(group.current, group.loading)}")


def _refused(group: ReportedGroup) -> Diagnosis | None:
    return None if group.refusal is None else Diagnosis(group.refusal.reason, group.refusal.message)


def _changing_topology(group: ReportedGroup) -> Diagnosis | None:
    if group.topology is None:
        return None
    scaling = topology_verdict(group.topology, group.desired)
    # Without ranks the coordinator is still starting.
    is_lost = scaling.reason == Failure.COORDINATOR_UNREACHABLE and group.topology.has_ranks
    if scaling.status == "True" or scaling.reason == Failure.SCALE_FAILED or is_lost:
        return Diagnosis(scaling.reason, scaling.message)
    return None


def _suspended(group: ReportedGroup) -> Diagnosis | None:
    return diagnose_suspended(group.current, group.suspended)


def _draining(group: ReportedGroup) -> Diagnosis | None:
    current = group.current
    if leaving := [pod for pod in group.pods if pod not in current]:
        return Diagnosis(Progress.DRAINING, f"waiting for {pods_text(leaving)} to end")
    return None


def _rolling_out(group: ReportedGroup) -> Diagnosis | None:
    # A Deployment whose first pods are starting is not rolled out either.
    if group.is_rolled_out or (group.role == "gateway" and group.ready < group.desired):
        return None
    return Diagnosis(Progress.PROGRESSING, "pods of an earlier revision are being replaced")


def _loading(group: ReportedGroup) -> Diagnosis | None:
    return diagnose_loading(group.current, group.loading)


#: What may keep a group from serving, the most specific first. The condition reports the first.
_POLICIES: tuple[Callable[[ReportedGroup], Diagnosis | None], ...] = (
    _failing,
    _refused,
    _changing_topology,
    _suspended,
    _draining,
    _rolling_out,
    _loading,
)


def prefill_verdict(
    verdict: Verdict,
    updating: Verdict,
    prefill: ReportedGroup,
    decode: ReportedGroup,
    kv: Mapping[str, KVCompatibility],
) -> Verdict:
    """Return the verdict on the condition PrefillReady.

    PrefillReady is False if prefill and decode pods cannot exchange KV blocks. Requests then still
    succeed, but decode pods compute the prompts and prefill pods are idle. While a rollout makes
    progress, incompatible pods are ignored.

    Args:
        verdict: the condition of the prefill pods alone.
        updating: the condition Updating of the service.
        kv: KV compatibility by pod name, for the pods that have reported it.
    """
    has_failed = verdict.status != "True" and not is_progress(verdict.reason)
    if has_failed or updating.status == "True":
        return verdict
    problem = _incompatibility(prefill, decode, kv)
    if not problem:
        return verdict
    return Verdict("False", Failure.INCOMPATIBLE_PEERS, f"{problem}; {verdict.message}")


def _incompatibility(
    prefill: ReportedGroup, decode: ReportedGroup, kv: Mapping[str, KVCompatibility]
) -> str:
    """Return a message about pods that have no compatible peer.

    Empty if every pod has a compatible peer, or if no prefill or no decode pod has reported its
    compatibility.
    """
    producers, consumers = (
        [name for name in sorted(group.current_names) if name in kv] for group in (prefill, decode)
    )
    if not producers or not consumers:
        return ""
    for ours, theirs, problem in (
        (producers, consumers, "prefill pods cannot send KV blocks to any decode pod"),
        (consumers, producers, "decode pods cannot receive KV blocks from any prefill pod"),
    ):
        alone = [
            name
            for name in ours
            if all(differences(kv[name], kv[other], "", "") for other in theirs)
        ]
        if alone:
            why = differences(kv[alone[0]], kv[theirs[0]], alone[0], theirs[0])
            counts = f"{len(alone)} of {len(ours)} {problem}"
            hint = "make these values equal"
            return f"{counts}, so decode pods compute the prompts: {why}; {hint}"
    return ""
