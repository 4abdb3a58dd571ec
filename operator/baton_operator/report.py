"""From what was observed to the status of the service. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from baton_operator import names
from baton_operator.api import Condition, DecodeStatus, GroupStatus, Status
from baton_operator.builders.owner import Owner
from baton_operator.diagnose import PROGRESS_REASONS, diagnose, leaving
from baton_operator.observe import is_ready
from baton_operator.report_topology import SCALE_FAILED, UNREACHABLE, GroupTopology, Verdict, scaling_verdict

Object = dict[str, Any]


class Problem(msgspec.Struct, frozen=True):
    """What kept this reconcile from doing its work."""

    reason: str
    message: str


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One group of pods, as `report` judges it."""

    role: names.Role
    desired: int
    pods: list[Object]
    revision: str | None = None
    """Of members that are up to date. None: a Deployment's pods, judged by `updated`."""
    updated: bool = True
    """Whether the Deployment has no pod of an old revision left."""
    topology: GroupTopology | None = None
    """Of an expert-parallel group: its ranks serve, not its pods."""

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
    def outdated(self) -> int:
        if self.revision is None:
            return 0 if self.updated or self.ready < self.desired else 1  # while it starts, that is what to say
        return sum(pod["metadata"]["labels"].get(names.LABEL_REVISION) != self.revision for pod in self.current)


def group_verdict(group: Group, now: datetime) -> Verdict:
    """Whether a group serves with all its pods, all of the newest revision."""
    if group.desired == 0:
        if group.role == "prefill":
            return "True", "NotRequested", "no prefill pods are wanted: decode pods prefill for themselves"
        return "False", "ScaledToZero", f"no {group.role} pods are wanted; scale up to serve"
    what = "ranks serve" if group.topology is not None else "pods are ready"
    counts = f"{group.ready} of {group.desired} {group.role} {what}"
    if group.ready >= group.desired and not group.outdated and len(group.current) == group.desired:
        return "True", "PodsReady", counts
    # A member that failed tells why its successor may fail, too. A Deployment leaves its failed pods behind: old news.
    told = group.current if group.revision is None else [pod for pod in group.pods if not leaving(pod)]
    if diagnosis := diagnose(told, now):
        return "False", diagnosis.reason, f"{diagnosis.message}; {counts}"
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
    return "False", "Starting", counts


def report(
    service: Object,
    owner: Owner | None,
    groups: dict[names.Role, Group],
    *,
    cluster_ip: str | None,
    problem: Problem | None,
    now: datetime,
) -> Status:
    """The status to write.

    Args:
        owner: None if the spec could not be read.
        groups: those that are known; a missing one has an Unknown condition.
        problem: of this reconcile; decides `Ready` before anything else does.
    """
    verdicts: dict[str, Verdict] = {}
    for role in ("prefill", "decode", "gateway"):
        group = groups.get(role)
        verdicts[f"{role.capitalize()}Ready"] = (
            group_verdict(group, now) if group else ("Unknown", "NotObserved", f"{role} pods were not observed yet")
        )
    conditions = {"Ready": _summary(verdicts, problem), **verdicts}
    decode = groups.get("decode")
    topology = decode.topology if decode else None
    if decode and topology:
        conditions["Scaling"] = scaling_verdict(topology, decode.desired)
    ingress = owner.spec.gateway.ingress if owner else None
    return Status(
        observed_generation=service["metadata"]["generation"],
        endpoint=_url(cluster_ip) if cluster_ip else None,
        ingress_endpoint=_url(ingress.host) if ingress else None,
        conditions=[_condition(service, type_, verdict, now) for type_, verdict in conditions.items()],
        prefill=_counts(groups.get("prefill")),
        decode=DecodeStatus(
            desired=decode.desired,
            ready=decode.ready,
            replicas=len(decode.pods),
            selector=names.serialized(names.selector(service["metadata"]["name"], "decode")),
            topology=topology.status if topology else None,
        )
        if decode
        else None,
        gateway=_counts(groups.get("gateway")),
    )


def _summary(verdicts: dict[str, Verdict], problem: Problem | None) -> Verdict:
    """Ready: the problem, else the first failure, else the first station, else all is well."""
    if problem:
        return "False", problem.reason, problem.message
    bad = [verdict for verdict in verdicts.values() if verdict[0] != "True"]
    if not bad:
        return "True", "AllGroupsReady", "; ".join(message for _, _, message in verdicts.values())
    return min(bad, key=lambda verdict: (verdict[0] == "Unknown", verdict[1] in PROGRESS_REASONS))


def _condition(service: Object, type_: str, verdict: Verdict, now: datetime) -> Condition:
    status, reason, message = verdict
    before = next((c for c in previous_conditions(service) if c["type"] == type_), None)
    flipped = before is None or before["status"] != status
    return Condition(
        type=type_,
        status=status,  # type: ignore[arg-type]
        reason=reason,
        message=message,
        last_transition_time=now.strftime("%Y-%m-%dT%H:%M:%SZ")
        if flipped or not before
        else before["lastTransitionTime"],
        observed_generation=service["metadata"]["generation"],
    )


def previous_conditions(service: Object) -> list[Object]:
    return list((service.get("status") or {}).get("conditions") or [])


def new_failures(service: Object, status: Status) -> list[Condition]:
    """Conditions that became False for a failure's reason, or for another one than before: worth an Event each."""
    before = {c["type"]: (c["status"], c["reason"]) for c in previous_conditions(service)}
    return [
        condition
        for condition in status.conditions or []
        if condition.type not in ("Ready", "Scaling")  # the one sums up, of the other operations tell
        and condition.reason != SCALE_FAILED
        and condition.status == "False"
        and condition.reason not in PROGRESS_REASONS
        and before.get(condition.type) != ("False", condition.reason)
    ]


def _counts(group: Group | None) -> GroupStatus | None:
    return GroupStatus(desired=group.desired, ready=group.ready) if group else None


def _url(host: str) -> str:
    return f"http://[{host}]" if ":" in host else f"http://{host}"
