"""From what was observed to the status of the service. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from baton_engine.protocol.kv_compatibility import KVCompatibility
from baton_engine.protocol.progress import Health
from baton_operator import names
from baton_operator.api import Condition, DecodeStatus, GroupStatus, PrefillStatus, Status
from baton_operator.api_groups import AutoscalingStatus
from baton_operator.builders import access
from baton_operator.builders.owner import Owner
from baton_operator.diagnose import PROGRESS_REASONS, diagnose, leaving
from baton_operator.observe import is_ready
from baton_operator.problems import Problem
from baton_operator.references import Reference
from baton_operator.refusals import Refusal
from baton_operator.report_model import (
    MODEL_AVAILABLE,
    had_model,
    model_status,
    model_verdict,
    still_loading,
    tries_again,
)
from baton_operator.report_peers import INCOMPATIBLE, prefill_verdict
from baton_operator.report_route import RouteProblem
from baton_operator.report_topology import AT_REST, SCALE_FAILED, UNREACHABLE, GroupTopology, Verdict, scaling_verdict
from baton_operator.report_update import PAUSED, STALLED, UP_TO_DATE, rollout, updating_verdict

Object = dict[str, Any]

MAX_MESSAGE = 32768
"""Of a condition; the API server takes none that is longer, nor the status around it."""
ON_TARGET = "OnTarget"
BLIND_REASONS = ("MetricsMissing", "MetricsStale")
"""Of the autoscaler, when it cannot judge."""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One group of pods, as `report` judges it."""

    role: names.Role
    desired: int
    pods: list[Object]
    revision: str | None = None
    """Of members that are up to date. None: a Deployment's pods, judged by `updated`."""
    updated: bool = True
    """Whether the Deployment has no pod of an old revision left."""
    template_revision: str | None = None
    """Of the Deployment's newest pods."""
    topology: GroupTopology | None = None
    """Of an expert-parallel group: its ranks serve, not its pods."""
    autoscaling: AutoscalingStatus | None = None
    """Of a group that the autoscaler sizes."""
    loading: Mapping[str, Health] = {}
    """What pods say that fetch or load the model, by name."""
    refusal: Refusal | None = None
    """Why the API server takes no further pod."""
    missing: frozenset[Reference] = frozenset()
    """Secrets and ConfigMaps that pods wait for and that do not exist."""
    coordinators: list[Object] = []
    """Pods of the coordinator of an expert-parallel group: without it no rank serves."""
    route: RouteProblem | None = None
    """Of a gateway: why nothing comes in through its HTTPRoute."""

    @property
    def current(self) -> list[Object]:
        """Pods that are to stay."""
        ended = ("Failed", "Succeeded")  # evicted, say: its replacement counts
        return [pod for pod in self.pods if not leaving(pod) and pod.get("status", {}).get("phase") not in ended]

    @property
    def ready(self) -> int:
        """Pods that serve, of any revision."""
        if self.topology is not None and self.topology.reachable:
            return sum(pod["metadata"]["name"] in self.topology.serving for pod in self.current)
        return sum(map(is_ready, self.current))

    @property
    def newest_revision(self) -> str | None:
        return self.revision or self.template_revision

    @property
    def newest(self) -> list[Object]:
        """Pods of the newest revision; all, if that is not known."""
        return [pod for pod in self.pods if self.newest_revision in (None, revision_of(pod))]

    @property
    def num_updated(self) -> int:
        return sum(pod in self.newest for pod in self.current)

    @property
    def outdated(self) -> int:
        if self.revision is None:
            return 0 if self.updated or self.ready < self.desired else 1  # while it starts, that is what to say
        return sum(revision_of(pod) != self.revision for pod in self.current)


def revision_of(pod: Object) -> str | None:
    return pod["metadata"]["labels"].get(names.LABEL_REVISION)


def group_verdict(group: Group) -> Verdict:
    """Whether a group serves with all its pods, all of the newest revision."""
    if group.desired == 0:
        if group.role == "prefill":
            return "True", "NotRequested", "no prefill pods are wanted: decode pods prefill for themselves"
        if group.autoscaling is not None:
            return "True", "ScaledToZero", f"no {group.role} pods are wanted: the next request starts one"
        return "False", "ScaledToZero", f"no {group.role} pods are wanted; scale up to serve"
    what = "ranks serve" if group.topology is not None else "pods are ready"
    counts = f"{group.ready} of {group.desired} {group.role} {what}"
    if group.ready >= group.desired and not group.outdated and len(group.current) == group.desired:
        if group.route is not None:
            return "False", group.route.reason, f"{group.route.message}; {counts}"
        return "True", "PodsReady", counts
    # A member that failed tells why its successor may fail, too. A Deployment leaves its failed pods behind: old news.
    told = group.current if group.revision is None else [pod for pod in group.pods if not leaving(pod)]
    if diagnosis := diagnose([*told, *group.coordinators], group.missing):
        return "False", diagnosis.reason, f"{diagnosis.message}{tries_again(group.current, group.loading)}; {counts}"
    if group.refusal is not None:
        return "False", group.refusal.reason, f"{group.refusal.message}; {counts}"
    if group.topology is not None:
        status, reason, message = scaling_verdict(group.topology, group.desired)
        lost = reason == UNREACHABLE and group.topology.has_ranks  # not one that only starts
        if status == "True" or reason == SCALE_FAILED or lost:
            return "False", reason, f"{counts}; {message}"
    going = len(group.pods) - len(group.current)
    if going:
        return "False", "Draining", f"{counts}; {going} on the way out"
    if group.outdated:
        return "False", "Progressing", f"{counts}; pods of an earlier revision are being replaced"
    if under_way := still_loading(group.current, group.loading):
        return "False", under_way[0], f"{under_way[1]}; {counts}"
    return "False", "Starting", counts


def autoscaling_verdict(sized: list[Group], of_topology: Verdict | None) -> Verdict | None:
    """Scaling: what the topology says while it changes or cannot tell, else what the autoscaler does. None: neither exists."""
    if not sized or (of_topology is not None and of_topology[:2] != ("False", AT_REST)):
        return of_topology
    told = [group.autoscaling for group in sized if group.autoscaling is not None]
    messages = " ".join(status.message for status in told)
    for group in sized:
        if len(group.pods) != group.desired or group.ready != group.desired:
            reason = "ScalingUp" if group.ready < group.desired else "ScalingDown"
            return "True", reason, f"{group.ready} of {group.desired} {group.role} pods serve. {messages}"
    reasons = [status.reason for status in told]
    blind = next((reason for reason in reasons if reason in BLIND_REASONS), None)
    if blind is not None:
        return "Unknown", blind, messages
    return "False", next((reason for reason in reasons if reason != ON_TARGET), ON_TARGET), messages


def report(
    service: Object,
    owner: Owner | None,
    groups: dict[names.Role, Group],
    *,
    cluster_ip: str | None,
    problem: Problem | None,
    now: datetime,
    spec_revision: str | None = None,
    kv: Mapping[str, KVCompatibility] = {},
    held_back: tuple[str, ...] = (),
) -> Status:
    """The status to write.

    Args:
        owner: None if the spec could not be read.
        groups: those that are known; a missing one has an Unknown condition.
        problem: of this reconcile; decides `Ready` before anything else does.
        kv: with whom engines can exchange KV blocks, by pod name, as they say.
        held_back: fields whose edits wait for the end of a pause.
    """
    verdicts: dict[str, Verdict] = {}
    for role in ("prefill", "decode", "gateway"):
        group = groups.get(role)
        verdicts[f"{role.capitalize()}Ready"] = (
            group_verdict(group) if group else ("Unknown", "NotObserved", f"{role} pods were not observed yet")
        )
    updating = _updating(owner, groups, now, held_back)
    if "prefill" in groups and "decode" in groups:
        serving = {role: [pod["metadata"]["name"] for pod in groups[role].current] for role in names.MEMBER_ROLES}
        prefill = verdicts["PrefillReady"]
        verdicts["PrefillReady"] = prefill_verdict(prefill, updating, serving["prefill"], serving["decode"], kv)
    conditions = {"Ready": _summary(verdicts, problem, updating), **verdicts, "Updating": updating}
    decode = groups.get("decode")
    topology = decode.topology if decode else None
    of_topology = scaling_verdict(topology, decode.desired) if decode and topology else None
    if scaling := autoscaling_verdict([group for group in groups.values() if group.autoscaling], of_topology):
        conditions["Scaling"] = scaling
    members = [group for group in groups.values() if group.role in names.MEMBER_ROLES]
    newest = [pod for group in members for pod in group.current if pod in group.newest]
    loading = {pod: health for group in groups.values() for pod, health in group.loading.items()}
    model = None
    before = service.get("status") or {}
    if owner is not None:
        refused = next((group.refusal.message for group in groups.values() if group.refusal), None)
        refusal_text = refused or (str(problem) if problem else None)
        conditions[MODEL_AVAILABLE] = model_verdict(
            owner.spec.model,
            newest,
            loading,
            refusal_text,
            had_before=had_model(owner.spec.model, before),
            replaces=any(group.num_updated < len(group.current) for group in members),
        )
        model = model_status(owner.spec.model, newest, before.get("model"))
    else:
        conditions[MODEL_AVAILABLE] = ("Unknown", "NotObserved", "the spec names no model that could be looked for")
    ingress = owner.spec.gateway.ingress if owner else None
    return Status(
        observed_generation=service["metadata"]["generation"],
        spec_revision=spec_revision,
        served_revision=spec_revision if conditions["Ready"][0] == "True" else before.get("servedRevision"),
        endpoint=_url(access.scheme_in_use(owner), cluster_ip) if owner and cluster_ip else None,
        ingress_endpoint=_url("https" if ingress.tls else "http", ingress.host) if ingress else None,
        conditions=[condition_of(service, type_, verdict, now) for type_, verdict in conditions.items()],
        model=model,
        prefill=_prefill_status(groups["prefill"]) if "prefill" in groups else None,
        decode=DecodeStatus(
            desired=decode.desired,
            ready=decode.ready,
            updated=decode.num_updated,
            revision=decode.newest_revision,
            replicas=len(decode.pods),
            selector=names.serialized(names.selector(service["metadata"]["name"], "decode")),
            topology=topology.status if topology else None,
            autoscaling=decode.autoscaling,
        )
        if decode
        else None,
        gateway=_counts(groups["gateway"]) if "gateway" in groups else None,
    )


def _updating(
    owner: Owner | None, groups: dict[names.Role, Group], now: datetime, held_back: tuple[str, ...]
) -> Verdict:
    if owner is None or not groups:
        return "Unknown", "NotObserved", "pods were not observed yet"
    rollouts = [
        rollout(group.role, group.desired, group.pods, group.newest, now, group.refusal, group.missing)
        for group in groups.values()
    ]
    spec = owner.spec
    return updating_verdict(
        rollouts,
        progress_deadline_s=float(spec.progress_deadline_seconds),
        paused=spec.paused,
        held_back=held_back,
        now=now,
    )


def _summary(verdicts: dict[str, Verdict], problem: Problem | None, updating: Verdict) -> Verdict:
    """Ready: the problem, else the first failure, else the first station, else all is well."""
    if problem:
        return "False", problem.reason, str(problem)
    bad = [verdict for verdict in verdicts.values() if verdict[0] != "True"]
    if not bad:
        return "True", "AllGroupsReady", "; ".join(message for _, _, message in verdicts.values())
    # What keeps pods from serving tells more than what keeps them from serving together.
    first = min(
        bad, key=lambda verdict: (verdict[0] == "Unknown", verdict[1] in PROGRESS_REASONS, verdict[1] == INCOMPATIBLE)
    )
    return updating if updating[1] == STALLED and first[1] in PROGRESS_REASONS else first


def condition_of(service: Object, type_: str, verdict: Verdict, now: datetime) -> Condition:
    """A condition as it is now; it keeps its time while its status stays."""
    status, reason, message = verdict
    before = next((c for c in previous_conditions(service) if c["type"] == type_), None)
    flipped = before is None or before["status"] != status
    return Condition(
        type=type_,
        status=status,  # type: ignore[arg-type]
        reason=reason,
        message=message[:MAX_MESSAGE],
        last_transition_time=now.strftime("%Y-%m-%dT%H:%M:%SZ")
        if flipped or not before
        else before["lastTransitionTime"],
        observed_generation=service["metadata"]["generation"],
    )


def report_defect(service: Object, problem: Problem, now: datetime) -> Status:
    """The status of a service that could not be judged."""
    verdicts: dict[str, Verdict] = {
        condition["type"]: ("Unknown", problem.reason, "the operator could not look at it")
        for condition in previous_conditions(service)
    }
    verdicts["Ready"] = "False", problem.reason, str(problem)
    return Status(
        observed_generation=service["metadata"]["generation"],
        conditions=[condition_of(service, type_, verdict, now) for type_, verdict in verdicts.items()],
    )


def previous_reason(service: Object, type_: str) -> str | None:
    """Reason of a condition as it was written last."""
    return next((c["reason"] for c in previous_conditions(service) if c["type"] == type_), None)


def previous_conditions(service: Object) -> list[Object]:
    return list((service.get("status") or {}).get("conditions") or [])


def new_failures(service: Object, status: Status) -> list[Condition]:
    """Conditions that became False for a failure's reason, or for another one than before: worth an Event each."""
    before = {c["type"]: (c["status"], c["reason"]) for c in previous_conditions(service)}
    return [
        condition
        for condition in status.conditions or []
        if condition.type not in ("Ready", "Scaling", MODEL_AVAILABLE)  # sums of others; of scaling, operations tell
        and condition.reason != SCALE_FAILED
        and condition.status == "False"
        and condition.reason not in {*PROGRESS_REASONS, UP_TO_DATE, PAUSED}
        and before.get(condition.type) != ("False", condition.reason)
    ]


def _counts(group: Group) -> GroupStatus:
    return GroupStatus(
        desired=group.desired,
        ready=group.ready,
        updated=group.num_updated,
        revision=group.newest_revision,
    )


def _prefill_status(group: Group) -> PrefillStatus:
    return PrefillStatus(**msgspec.structs.asdict(_counts(group)), autoscaling=group.autoscaling)


def _url(scheme: str, host: str) -> str:
    return f"{scheme}://[{host}]" if ":" in host else f"{scheme}://{host}"
