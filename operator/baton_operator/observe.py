"""What exists for a service, read from the API server and, for members that drain, from the members themselves."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import msgspec

from baton_engine.protocol.topology import TopologyStatus
from baton_operator import names
from baton_operator.builders.member import CONTAINER
from baton_operator.coordinator import CoordinatorClient
from baton_operator.drain import Drainer
from baton_operator.kube import Kube
from baton_operator.plan import Member

Object = dict[str, Any]


class Observation(msgspec.Struct, kw_only=True):
    """One service and what belongs to it at one moment."""

    service: Object
    pods: list[Object]
    """All pods with the service's label that this service, or a Deployment for it, controls."""
    foreign_pods: list[str]
    """Names of member-like pods that the service does not control."""
    config_maps: list[Object]
    members: dict[names.MemberRole, list[Member]]
    coordinator: str | None = None
    """Address of the coordinator's Service. None: there is none, it has no address yet, or it was not looked for."""
    topology: TopologyStatus | None = None
    """As the coordinator says. None: it did not answer, or was not asked."""

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
    mine = {names.LABEL_SERVICE: name}
    found, config_maps = await asyncio.gather(
        kube.list_all("Pod", namespace, mine), kube.list_all("ConfigMap", namespace, mine)
    )
    uid = service["metadata"]["uid"]
    pods: list[Object] = []
    foreign: list[str] = []
    for pod in found:
        role = pod["metadata"]["labels"].get(names.LABEL_ROLE)
        if role in ("gateway", "coordinator") or controlled_by(pod, uid):
            pods.append(pod)
        else:
            foreign.append(pod["metadata"]["name"])
    # Topology first: what stands by according to it was no member when it is asked how much is unfinished.
    coordinator = await _coordinator(kube, service) if _is_expert_parallel(service) else None
    topology = await coordinators.topology(coordinator) if coordinator else None
    return Observation(
        service=service,
        pods=pods,
        foreign_pods=foreign,
        config_maps=[item for item in config_maps if controlled_by(item, uid)],
        members={role: await _members(pods, role, drainer) for role in names.MEMBER_ROLES},
        coordinator=coordinator,
        topology=topology,
    )


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


async def _members(pods: list[Object], role: names.MemberRole, drainer: Drainer) -> list[Member]:
    members = [member(pod) for pod in pods if pod["metadata"]["labels"].get(names.LABEL_ROLE) == role]
    addresses = {pod["metadata"]["name"]: pod.get("status", {}).get("podIP") for pod in pods}

    async def asked(observed: Member) -> Member:
        if not (observed.draining and observed.serving and observed.deletion is None):
            return observed
        unfinished = await drainer.drain(addresses[observed.name])
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
        expert_group=annotations.get(names.ANNOTATION_EXPERT_GROUP, ""),
    )


def _started(container: Object) -> bool:
    """Whether this is the engine and has passed its startup probe; runs, where the kubelet does not say."""
    running = bool((container.get("state") or {}).get("running"))
    return container["name"] == CONTAINER and bool(container.get("started", running))


def is_ready(pod: Object) -> bool:
    """Whether the kubelet says Ready, and nobody deleted it."""
    conditions = pod.get("status", {}).get("conditions") or []
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and not pod["metadata"].get("deletionTimestamp")


def controlled_by(obj: Object, uid: str) -> bool:
    references = obj["metadata"].get("ownerReferences") or []
    return any(reference.get("controller") and reference["uid"] == uid for reference in references)


def parse_time(text: str | None) -> datetime | None:
    """A Kubernetes timestamp; None for none or one that someone garbled."""
    if not text:
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None
