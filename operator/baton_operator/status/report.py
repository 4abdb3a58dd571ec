"""Compute the whole status of a service from the observed state. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from baton_kube.client import Object
from baton_operator import names
from baton_operator.api.llmservice import (
    Condition,
    DecodeStatus,
    GroupStatus,
    PrefillStatus,
    Status,
)
from baton_operator.builders.gateway.url_schemes import scheme_in_use
from baton_operator.builders.resolved_service import ResolvedService
from baton_operator.observe.observation import Observation, conditions
from baton_operator.reconcile_errors import Problem
from baton_operator.status.diagnose import Verdict
from baton_operator.status.reasons import Failure, Settled, is_progress
from baton_operator.status.report_group import ReportedGroup, group_verdict, prefill_verdict
from baton_operator.status.report_model import MODEL_AVAILABLE, model_status, model_verdict
from baton_operator.status.report_scaling import scaling_verdict
from baton_operator.status.report_update import updating_verdict
from baton_protocol.kv_compatibility import KVCompatibility

MAX_MESSAGE = 32768  # maximum length of a condition's message in the CRD


def report(
    observed: Observation,
    resolved: ResolvedService | None,
    groups: dict[names.Role, ReportedGroup],
    *,
    problem: Problem | None,
    now: datetime,
    spec_revision: str | None = None,
) -> Status:
    """Return the status of the service for this reconcile.

    Args:
        observed: the observed state, with the previous status of the service.
        resolved: the resolved service; None if no spec could be used.
        groups: the observed groups. The condition of a group that is not in `groups` is Unknown.
        problem: the first error of this reconcile, which makes Ready False; None without an error.
        spec_revision: name of the ControllerRevision with the spec that is rolled out; None if no
            spec was rolled out.
    """
    service = observed.service
    before = service.get("status") or {}
    members = [groups[role] for role in names.MEMBER_ROLES if role in groups]
    updating = Verdict("Unknown", Settled.NOT_OBSERVED, "pods were not observed yet")
    if resolved is not None and groups:
        updating = updating_verdict(resolved.spec, groups.values(), observed.held_back, now)
    ready = _group_verdicts(groups, updating, observed.kv)
    verdicts = {
        "Ready": _ready_verdict(ready, problem, updating),
        "Available": _available_verdict(groups, ready),
        **ready,
        "Updating": updating,
    }
    if scaling := scaling_verdict(members):
        verdicts["Scaling"] = scaling
    if resolved is None:
        unknown = "no spec is rolled out, so the model is not known"
        verdicts[MODEL_AVAILABLE] = Verdict("Unknown", Settled.NOT_OBSERVED, unknown)
    else:
        refused = [group.refusal.message for group in groups.values() if group.refusal]
        why = refused[0] if refused else str(problem or "")
        verdicts[MODEL_AVAILABLE] = model_verdict(resolved.spec.model, members, why, before)
        if exposed := _kv_transfer_verdict(resolved):
            verdicts["KVTransferProtected"] = exposed
    is_ready = verdicts["Ready"].status == "True"
    prefill, gateway = groups.get("prefill"), groups.get("gateway")
    return Status(
        observed_generation=service["metadata"]["generation"],
        spec_revision=spec_revision,
        served_revision=spec_revision if is_ready else before.get("servedRevision"),
        endpoint=_endpoint(resolved, observed),
        ingress_endpoint=_ingress_endpoint(resolved),
        conditions=_conditions(service, verdicts, now),
        model=model_status(resolved.spec.model, members, before.get("model")) if resolved else None,
        prefill=PrefillStatus(**_counts(prefill), autoscaling=prefill.autoscaling)
        if prefill
        else None,
        decode=_decode_status(groups.get("decode"), service),
        gateway=GroupStatus(**_counts(gateway)) if gateway else None,
    )


def _group_verdicts(
    groups: dict[names.Role, ReportedGroup], updating: Verdict, kv: Mapping[str, KVCompatibility]
) -> dict[str, Verdict]:
    """Return the verdicts on PrefillReady, DecodeReady and GatewayReady, by condition type."""
    verdicts: dict[str, Verdict] = {}
    for role in ("prefill", "decode", "gateway"):
        unknown = Verdict("Unknown", Settled.NOT_OBSERVED, f"{role} pods were not observed yet")
        verdicts[f"{role.capitalize()}Ready"] = (
            group_verdict(groups[role]) if role in groups else unknown
        )
    if "prefill" in groups and "decode" in groups:
        prefill = verdicts["PrefillReady"]
        verdicts["PrefillReady"] = prefill_verdict(
            prefill, updating, groups["prefill"], groups["decode"], kv
        )
    return verdicts


def _ready_verdict(
    ready: dict[str, Verdict], problem: Problem | None, updating: Verdict
) -> Verdict:
    """Return the verdict on the condition Ready.

    Ready is True if all conditions in `ready` are True and there is no problem. If not, Ready
    reports the first of these that exists: the problem, a failed condition, a stalled rollout, a
    condition that shows progress, an Unknown condition.
    """
    if problem:
        return Verdict("False", problem.reason, str(problem))
    bad = [verdict for verdict in ready.values() if verdict.status != "True"]
    if not bad:
        messages = "; ".join(verdict.message for verdict in ready.values())
        return Verdict("True", Settled.ALL_GROUPS_READY, messages)
    # Other failures are more specific than incompatible peers.
    first = min(
        bad,
        key=lambda verdict: (
            verdict.status == "Unknown",
            is_progress(verdict.reason),
            verdict.reason == Failure.INCOMPATIBLE_PEERS,
        ),
    )
    is_stalled = updating.reason == Failure.ROLLOUT_STALLED and is_progress(first.reason)
    return updating if is_stalled else first


def _available_verdict(
    groups: Mapping[names.Role, ReportedGroup], ready: Mapping[str, Verdict]
) -> Verdict:
    """Return the verdict on the condition Available: whether the service answers requests.

    Available is True if a gateway pod and a decode pod of any revision are ready. Prefill pods do
    not count, because decode pods compute the prompts without them. If one of the two groups has
    no ready pod, Available repeats the condition of that group. That condition is True if
    autoscaling has scaled the group to zero.
    """
    for role in ("gateway", "decode"):
        if role not in groups or not groups[role].ready:
            return ready[f"{role.capitalize()}Ready"]
    message = f"ready pods: {groups['gateway'].ready} gateway, {groups['decode'].ready} decode"
    if "prefill" in groups and groups["prefill"].desired and not groups["prefill"].ready:
        message += "; no prefill pod is ready, so decode pods compute the prompts"
    return Verdict("True", Settled.MINIMUM_PODS_READY, message)


def _kv_transfer_verdict(resolved: ResolvedService) -> Verdict | None:
    """Return the verdict on KVTransferProtected if transfers are unprotected, else None.

    A NetworkPolicy counts as protection, although the cluster may not enforce NetworkPolicies.
    """
    transport = resolved.spec.kv_transfer.transport
    if (
        resolved.spec.security.network_policy
        or not resolved.has_prefill
        or transport in ("tcp", "shm")
    ):
        return None
    # auto starts UCX only on nodes with RDMA or a GPU, which the operator cannot check.
    listens = "may listen" if transport == "auto" else "listens"
    message = (
        f"security.networkPolicy is off, and kvTransfer.transport {transport} {listens} on TCP "
        "ports without authentication: a client that reaches them can write to the memory of "
        "engines. Set security.networkPolicy to true, or kvTransfer.transport to tcp"
    )
    return Verdict("False", Failure.NETWORK_POLICY_OFF, message)


def _conditions(service: Object, verdicts: Mapping[str, Verdict], now: datetime) -> list[Condition]:
    """Return the verdicts as conditions of the service.

    If the status of a condition has not changed, lastTransitionTime stays the same.
    """
    before = {
        (each["type"], each["status"]): each.get("lastTransitionTime")
        for each in conditions(service).values()
    }
    return [
        Condition(
            type=type_,
            status=verdict.status,
            reason=verdict.reason,
            message=verdict.message[:MAX_MESSAGE],
            last_transition_time=before.get((type_, verdict.status))
            or now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            observed_generation=service["metadata"]["generation"],
        )
        for type_, verdict in verdicts.items()
    ]


def report_defect(service: Object, problem: Problem, now: datetime) -> Status:
    """Return the status after an unexpected error of the operator.

    Ready is False, and all other conditions are Unknown.
    """
    unknown = Verdict("Unknown", problem.reason, "not determined; see condition Ready")
    verdicts = {
        **dict.fromkeys(conditions(service), unknown),
        "Ready": Verdict("False", problem.reason, str(problem)),
    }
    generation = service["metadata"]["generation"]
    return Status(observed_generation=generation, conditions=_conditions(service, verdicts, now))


def _counts(group: ReportedGroup) -> dict[str, Any]:
    """Return the fields of `GroupStatus`: numbers of pods, and the newest revision."""
    return {
        "desired": group.desired,
        "ready": group.ready,
        "updated": len(group.newest),
        "revision": group.revision,
    }


def _decode_status(group: ReportedGroup | None, service: Object) -> DecodeStatus | None:
    if group is None:
        return None
    return DecodeStatus(
        **_counts(group),
        replicas=len(group.pods),
        selector=names.serialized(names.selector(service["metadata"]["name"], "decode")),
        topology=group.topology.status if group.topology else None,
        autoscaling=group.autoscaling,
    )


def _endpoint(resolved: ResolvedService | None, observed: Observation) -> str | None:
    """Return the URL of the gateway's Service; None if the Service has no address yet."""
    gateway = observed.owned("Service", names.gateway_name(observed.key.name))
    cluster_ip = gateway["spec"].get("clusterIP") if gateway else None
    return _url(scheme_in_use(resolved), cluster_ip) if resolved and cluster_ip else None


def _ingress_endpoint(resolved: ResolvedService | None) -> str | None:
    """Return the URL of the Ingress; None if the spec does not request an Ingress."""
    ingress = resolved.spec.gateway.ingress if resolved else None
    return _url("https" if ingress.tls else "http", ingress.host) if ingress else None


def _url(scheme: str, host: str) -> str:
    return f"{scheme}://{names.url_host(host)}"
