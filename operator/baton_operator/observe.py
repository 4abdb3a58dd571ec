"""What exists for a service, read from the API server and, for members that drain, from the members themselves."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from baton_engine.protocol.kv_compatibility import KVCompatibility
from baton_engine.protocol.progress import Health
from baton_engine.protocol.service_key import ServiceKey
from baton_engine.protocol.topology import TopologyStatus
from baton_operator import names
from baton_operator.builders import service_key
from baton_operator.builders.member import CONTAINER
from baton_operator.builders.owner import controlled_by as controlled_by
from baton_operator.coordinator import CoordinatorClient
from baton_operator.drain import Drainer
from baton_operator.history import held_back, kept_spec
from baton_operator.kube import Kube
from baton_operator.plan import Member
from baton_operator.references import Reference

Object = dict[str, Any]

_TAKEN = re.compile(r"Insufficient|Too many pods|free ports|anti-affinity|max volume count")
"""What the scheduler says of nodes on which others have what the pod needs; a selector that no node matches is another matter."""


class Observation(msgspec.Struct, kw_only=True):
    """One service and what belongs to it at one moment."""

    service: Object
    pods: list[Object]
    """All pods with the service's label that this service, or a Deployment for it, controls."""
    strays: list[Object]
    """Pods that the service controls and did not make: copies of members under names of their own, say. Nobody touches them."""
    config_maps: list[Object]
    key_secret: Object | None
    """Whatever has the name of the Secret with the service's key."""
    key: ServiceKey | None
    """None: there is none yet, or none that is the service's own."""
    members: dict[names.MemberRole, list[Member]]
    coordinator: str | None = None
    """Address of the coordinator's Service. None: there is none, it has no address yet, or it was not looked for."""
    topology: TopologyStatus | None = None
    """As the coordinator says. None: it did not answer, or was not asked."""
    loading: dict[str, Health] = {}
    """What members say that fetch or load the model, by pod name."""
    kv: Mapping[str, KVCompatibility] = {}
    """With whom engines can exchange KV blocks, by pod name, as they say."""
    missing: frozenset[Reference] = frozenset()
    """Secrets and ConfigMaps that pods wait for and that do not exist."""
    nothing_to_keep: bool = False
    """It is paused, and nothing is known to have been rolled out before. (Else a paused service has the spec of before.)"""
    held_back: tuple[str, ...] = ()
    """Fields whose edits wait for the end of the pause."""

    @property
    def uid(self) -> str:
        return str(self.service["metadata"]["uid"])

    @property
    def has_ranks(self) -> bool:
        """Whether pods exist that report to a coordinator."""
        return any(member.expert_group for member in self.members["decode"])

    def role_pods(self, role: names.Role) -> list[Object]:
        return [pod for pod in self.pods if pod["metadata"]["labels"].get(names.LABEL_ROLE) == role]


async def observe(
    kube: Kube, drainer: Drainer, coordinators: CoordinatorClient, namespace: str, name: str
) -> Observation | None:
    """None if the service is gone or going: the API server's garbage collection removes what it owned."""
    service = await kube.get("LLMService", namespace, name)
    if service is None or service["metadata"].get("deletionTimestamp"):
        return None
    kept = await kept_spec(kube, service) if _is_paused(service) else service["spec"]
    waiting = held_back(kept, service["spec"]) if _is_paused(service) and kept is not None else ()
    service = {**service, "spec": kept or service["spec"]}
    mine = {names.LABEL_SERVICE: name}
    found, config_maps, key_secret = await asyncio.gather(
        kube.list_all("Pod", namespace, mine),
        kube.list_all("ConfigMap", namespace, mine),
        kube.get("Secret", namespace, names.service_key_name(name)),
    )
    uid = service["metadata"]["uid"]
    key = _key(key_secret, uid)
    pods: list[Object] = []
    strays: list[Object] = []
    for pod in found:
        role = pod["metadata"]["labels"].get(names.LABEL_ROLE)
        if role in ("gateway", "coordinator"):
            pods.append(pod)
        elif controlled_by(pod, uid):
            is_ours = names.is_member_name(pod["metadata"]["name"], name, role)
            (pods if is_ours else strays).append(pod)
    # Topology first: what stands by according to it was no member when it is asked how much is unfinished.
    coordinator = await _coordinator(kube, service) if _is_expert_parallel(service) else None
    topology = await coordinators.topology(coordinator, key) if coordinator else None
    return Observation(
        service=service,
        pods=pods,
        strays=strays,
        config_maps=[item for item in config_maps if controlled_by(item, uid)],
        key_secret=key_secret,
        key=key,
        members={role: await _members(pods, role, drainer, key) for role in names.MEMBER_ROLES},
        coordinator=coordinator,
        topology=topology,
        nothing_to_keep=kept is None,
        held_back=waiting,
    )


def _key(secret: Object | None, uid: str) -> ServiceKey | None:
    if secret is None or not controlled_by(secret, uid):
        return None
    try:
        return service_key.read(secret)
    except ValueError:  # `apply.ensure_service_key` says so
        return None


def _is_paused(service: Object) -> bool:
    """As the spec says, which need not be valid."""
    spec = service.get("spec")
    return isinstance(spec, dict) and spec.get("paused") is True


def _is_expert_parallel(service: Object) -> bool:
    """As the spec says, which need not be valid."""
    node: Any = service.get("spec")
    for field in ("decode", "parallelism", "expert"):
        node = node.get(field) if isinstance(node, dict) else None
    return node is True


async def _coordinator(kube: Kube, service: Object) -> str | None:
    """Where ranks find their coordinator: the address that its Service was given. Raises KubeError."""
    metadata = service["metadata"]
    found = await kube.get("Service", metadata["namespace"], names.coordinator_name(metadata["name"]))
    if found is None or not controlled_by(found, metadata["uid"]):
        return None
    return found["spec"].get("clusterIP") or None


async def _members(
    pods: list[Object], role: names.MemberRole, drainer: Drainer, key: ServiceKey | None
) -> list[Member]:
    members = [member(pod) for pod in pods if pod["metadata"]["labels"].get(names.LABEL_ROLE) == role]
    addresses = {pod["metadata"]["name"]: pod.get("status", {}).get("podIP") for pod in pods}

    async def asked(observed: Member) -> Member:
        if not (observed.draining and observed.serving and observed.deletion is None):
            return observed
        unfinished = await drainer.drain(addresses[observed.name], key)
        return msgspec.structs.replace(observed, unfinished=unfinished)

    return list(await asyncio.gather(*map(asked, members)))


def member(pod: Object) -> Member:
    """A member pod as the planner sees it."""
    metadata, status = pod["metadata"], pod.get("status", {})
    annotations = metadata.get("annotations") or {}
    phase = status.get("phase", "Pending")
    return Member(
        name=metadata["name"],
        ordinal=names.ordinal_of(metadata["name"]),
        revision=metadata["labels"].get(names.LABEL_REVISION, ""),
        ready=is_ready(pod),
        failed=phase in ("Failed", "Succeeded"),
        serving=bool(status.get("podIP")) and any(map(_started, status.get("containerStatuses") or [])),
        draining=annotations.get(names.ANNOTATION_DRAINING) == "true",
        drain_started=parse_time(annotations.get(names.ANNOTATION_DRAIN_STARTED)),
        deletion=parse_time(metadata.get("deletionTimestamp")),
        created=parse_time(metadata.get("creationTimestamp")),
        unready_since=None if is_ready(pod) else unready_since(pod),
        expert_group=annotations.get(names.ANNOTATION_EXPERT_GROUP, ""),
        no_room_since=no_room_since(pod),
    )


def unready_since(pod: Object) -> datetime | None:
    """When it was made, or was ready last."""
    conditions = pod.get("status", {}).get("conditions") or []
    flips = [parse_time(each.get("lastTransitionTime")) for each in conditions if each["type"] == "Ready"]
    times = [parse_time(pod["metadata"].get("creationTimestamp")), *flips]
    return max((time for time in times if time is not None), default=None)


def no_room_since(pod: Object) -> datetime | None:
    """Since when the scheduler finds no room for it that a pod that leaves could make."""
    for condition in pod.get("status", {}).get("conditions") or []:
        unscheduled = condition["type"] == "PodScheduled" and condition["status"] == "False"
        if unscheduled and _TAKEN.search(condition.get("message") or ""):
            return parse_time(condition.get("lastTransitionTime")) or parse_time(
                pod["metadata"].get("creationTimestamp")
            )
    return None


def _started(container: Object) -> bool:
    """Whether this is the engine and has passed its startup probe; runs, where the kubelet does not say."""
    running = bool((container.get("state") or {}).get("running"))
    return container["name"] == CONTAINER and bool(container.get("started", running))


def is_ready(pod: Object) -> bool:
    """Whether the kubelet says Ready, and nobody deleted it."""
    conditions = pod.get("status", {}).get("conditions") or []
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and not pod["metadata"].get("deletionTimestamp")


def parse_time(text: str | None) -> datetime | None:
    """A Kubernetes timestamp; None for none or one that someone garbled."""
    if not text:
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None
