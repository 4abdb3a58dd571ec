"""Observe a service: read its state from the API server and the coordinator."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Coroutine, Mapping
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from baton_kube.client import Object
from baton_operator import names
from baton_operator.builders import service_key_secret
from baton_operator.builders.gateway.url_schemes import PORTS
from baton_operator.builders.member_pods import CONTAINER
from baton_operator.builders.resolved_service import Scheme, controlled_by
from baton_operator.kube.objects import Kube
from baton_operator.observe.freshness import Freshness
from baton_operator.observe.pod_clients import CoordinatorClient
from baton_operator.plan.plan_group import Member
from baton_operator.revision_history import held_back, recorded_spec
from baton_protocol.kv_compatibility import KVCompatibility
from baton_protocol.process.health import Health
from baton_protocol.service_key import ServiceKey
from baton_protocol.topology import TopologyStatus

#: Matches scheduler messages about resources that other pods use. A message about a node selector
#: without a matching node does not match.
_TAKEN = re.compile(r"Insufficient|Too many pods|free ports|anti-affinity|max volume count")


class Reference(NamedTuple):
    """A Secret or ConfigMap that a pod needs."""

    kind: str
    name: str


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """The observed state of one service.

    The members of a service are its prefill and decode pods. Later steps of the reconcile
    change two fields in place: `objects` gets each object that they read or write, and `kinds` gets
    each kind that they list. A step that changes any other field returns a copy.
    """

    key: names.Key
    freshness: Freshness
    service: Object
    #: Members that the service controls, and pods with the labels of its gateway or coordinator.
    pods: list[Object]
    #: Pods that the service controls but that do not have a member's name, such as copies of
    #: members. The operator does not change them.
    strays: list[Object]
    #: By (kind, name): the objects of the listed kinds that have the service's label, except pods.
    objects: dict[tuple[str, str], Object]
    #: Kinds that were listed.
    kinds: set[str]
    #: The Secret that has the name of the service's key. It may have another owner.
    key_secret: Object | None
    #: The service's key. None: the Secret does not exist, has another owner or holds no usable key.
    service_key: ServiceKey | None
    members: dict[names.MemberRole, list[Member]]
    #: Address of the coordinator's Service. None: the Service has no address yet, or the service
    #: neither has ranks nor needs them.
    coordinator: str | None = None
    #: Reply of the coordinator. None: the coordinator did not reply, or no request was sent.
    topology: TopologyStatus | None = None
    #: Replies to `GET /health` of members that fetch or load the model, by pod name.
    loading: dict[str, Health] = {}
    #: Replies to `GET /ready` of members that are paused or asleep, by pod name.
    suspended: dict[str, Health] = {}
    #: When unready members were last paused or asleep, by pod name.
    suspended_at: Mapping[str, datetime] = {}
    #: KV compatibility that engines reported, by pod name.
    kv: Mapping[str, KVCompatibility] = {}
    #: Secrets and ConfigMaps that pods wait for and that do not exist.
    missing: frozenset[Reference] = frozenset()
    #: Whether the service is paused before any spec was rolled out. In any other pause, `service`
    #: contains the spec that was rolled out last.
    has_no_recorded_spec: bool = False
    #: Fields of the spec whose edits wait until `spec.paused` is false.
    held_back: tuple[str, ...] = ()

    @property
    def uid(self) -> str:
        return str(self.service["metadata"]["uid"])

    @property
    def has_ranks(self) -> bool:
        """Whether any decode pod is a rank of an expert-parallel group."""
        return any(member.expert_group for member in self.members["decode"])

    @property
    def mounted_config_maps(self) -> set[str]:
        """Names of the ConfigMaps that pods of the service mount."""
        volumes = [
            volume
            for pod in [*self.pods, *self.strays]
            for volume in pod["spec"].get("volumes") or []
        ]
        return {volume["configMap"]["name"] for volume in volumes if "configMap" in volume}

    def role_pods(self, role: names.Role) -> list[Object]:
        return filter_by_role(self.pods, role)

    def owned(self, kind: str, name: str) -> Object | None:
        """Return the object of this kind and name from `objects`.

        None: there is no such object, or the service does not control it.
        """
        found = self.objects.get((kind, name))
        return found if found is not None and controlled_by(found, self.uid) else None

    async def read_objects(self, kube: Kube, kinds: Collection[str]) -> None:
        """Add the service's objects of these kinds to `objects`.

        Each kind takes one request. A kind that was read before is not read again.
        """
        kinds = [kind for kind in kinds if kind not in self.kinds]
        for listed in await read_together(
            *(list_own(kube, kind, self.key, self.freshness) for kind in kinds)
        ):
            self.objects.update({(obj["kind"], obj["metadata"]["name"]): obj for obj in listed})
        self.kinds.update(kinds)


def filter_by_role(pods: list[Object], role: names.Role) -> list[Object]:
    return [pod for pod in pods if pod["metadata"]["labels"].get(names.LABEL_ROLE) == role]


async def read_together(*reads: Coroutine[Any, Any, Any]) -> list[Any]:
    """Return the results of all reads.

    If one read fails, the other reads are cancelled, because their results would take memory. The
    error is raised when all reads have ended.
    """
    tasks = [asyncio.create_task(each) for each in reads]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def list_own(kube: Kube, kind: str, key: names.Key, freshness: Freshness) -> list[Object]:
    """Return all objects of `kind` that have the service's label, with any owner."""
    selector = {names.LABEL_SERVICE: key.name}
    with freshness.detect_lag():
        listed = await kube.list_all(kind, key.namespace, selector, freshness.of(kind))
    for obj in listed:
        freshness.record(kind, obj["metadata"]["resourceVersion"])
    return listed


async def observe(
    kube: Kube,
    coordinators: CoordinatorClient,
    key: names.Key,
    freshness: Freshness,
) -> Observation | None:
    """Read the state of a service. Return None if the service is deleted or being deleted.

    While `spec.paused` is true, the observed spec is the spec that was rolled out last, if any.
    """
    with freshness.detect_lag():
        service = await kube.read("LLMService", key.namespace, key.name, freshness.of("LLMService"))
    if service is None or service["metadata"].get("deletionTimestamp"):
        return None
    recorded: Object | None = service["spec"]
    waiting: tuple[str, ...] = ()
    if _is_set(service, "paused"):
        recorded = await recorded_spec(kube, service)
        waiting = held_back(recorded, service["spec"]) if recorded is not None else ()
    service = {**service, "spec": recorded or service["spec"]}
    found, deployments, services, key_secret = await read_together(
        list_own(kube, "Pod", key, freshness),
        list_own(kube, "Deployment", key, freshness),
        list_own(kube, "Service", key, freshness),
        kube.read("Secret", key.namespace, names.service_key_name(key.name)),
    )
    uid = service["metadata"]["uid"]
    service_key = _service_key(key_secret, uid)
    pods: list[Object] = []
    strays: list[Object] = []
    for pod in found:
        role = pod["metadata"]["labels"].get(names.LABEL_ROLE)
        if role in ("gateway", "coordinator"):
            pods.append(pod)
        elif controlled_by(pod, uid):
            is_ours = names.is_member_name(pod["metadata"]["name"], key.name, role)
            (pods if is_ours else strays).append(pod)
    observed = Observation(
        key=key,
        freshness=freshness,
        service=service,
        pods=pods,
        strays=strays,
        objects={(obj["kind"], obj["metadata"]["name"]): obj for obj in [*deployments, *services]},
        kinds={"Pod", "Deployment", "Service"},
        key_secret=key_secret,
        service_key=service_key,
        members={
            role: list(map(member, filter_by_role(pods, role))) for role in names.MEMBER_ROLES
        },
        has_no_recorded_spec=recorded is None,
        held_back=waiting,
    )
    if not (observed.has_ranks or _is_set(service, "decode", "parallelism", "expert")):
        return observed
    found_service = observed.owned("Service", names.coordinator_name(key.name))
    coordinator = found_service and found_service["spec"].get("clusterIP")
    if not coordinator:
        return observed
    topology = await coordinators.topology(coordinator, service_key)
    return msgspec.structs.replace(observed, coordinator=coordinator, topology=topology)


def _service_key(secret: Object | None, uid: str) -> ServiceKey | None:
    if secret is None or not controlled_by(secret, uid):
        return None
    try:
        return service_key_secret.read(secret)
    except ValueError:  # `apply.ensure_service_key` reports it
        return None


def _is_set(service: Object, *path: str) -> bool:
    """Return whether the field `path` of the spec is true; False if there is no such field."""
    node: Any = service.get("spec")
    for field in path:
        node = node.get(field) if isinstance(node, dict) else None
    return node is True


def member(pod: Object) -> Member:
    """Return the observed state of a prefill or decode pod, as the input of the planner."""
    metadata, status = pod["metadata"], pod.get("status", {})
    annotations = metadata.get("annotations") or {}
    return Member(
        name=metadata["name"],
        ordinal=names.ordinal_of(metadata["name"]),
        revision=metadata["labels"].get(names.LABEL_REVISION, ""),
        ready=is_ready(pod),
        failed=has_ended(pod),
        started=bool(status.get("podIP"))
        and any(map(_started, status.get("containerStatuses") or [])),
        draining=annotations.get(names.ANNOTATION_DRAINING) == "true",
        drain_started=parse_time(annotations.get(names.ANNOTATION_DRAIN_STARTED)),
        deletion=parse_time(metadata.get("deletionTimestamp")),
        created=parse_time(metadata.get("creationTimestamp")),
        unready_since=None if is_ready(pod) else unready_since(pod),
        expert_group=annotations.get(names.ANNOTATION_EXPERT_GROUP, ""),
        no_room_since=no_room_since(pod),
    )


def conditions(obj: Object) -> dict[str, Object]:
    """Return the status conditions of an object by type."""
    return {each["type"]: each for each in (obj.get("status") or {}).get("conditions") or []}


def condition(obj: Object, type_: str) -> Object:
    """Return the condition of type `type_`; an empty object if there is none."""
    return conditions(obj).get(type_, {})


def unready_since(pod: Object, suspended_at: Mapping[str, datetime] = {}) -> datetime | None:
    """Return the time from which the progress deadline of the pod is counted.

    This is the latest of four times: creation, scheduling, last change of the condition Ready, and
    last pause or sleep of the engine.

    Args:
        suspended_at: times at which engines were last paused or asleep, by pod name.
    """
    metadata = pod["metadata"]
    times = [
        parse_time(metadata.get("creationTimestamp")),
        parse_time(condition(pod, "PodScheduled").get("lastTransitionTime")),
        parse_time(condition(pod, "Ready").get("lastTransitionTime")),
        suspended_at.get(metadata["name"]),
    ]
    return max((time for time in times if time is not None), default=None)


def no_room_since(pod: Object) -> datetime | None:
    """Return the time since which the pod fits on no node, because other pods use the resources.

    None: the pod is scheduled, or cannot be scheduled for another reason.
    """
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") != "False" or not _TAKEN.search(scheduled.get("message") or ""):
        return None
    return parse_time(scheduled.get("lastTransitionTime")) or parse_time(
        pod["metadata"].get("creationTimestamp")
    )


def _started(container: Object) -> bool:
    """Return whether `container` is an engine that has passed its startup probe.

    If the kubelet does not report `started`, a running container counts as started.
    """
    running = bool((container.get("state") or {}).get("running"))
    return container["name"] == CONTAINER and bool(container.get("started", running))


def is_ready(pod: Object) -> bool:
    """Return whether the pod's condition Ready is True and the pod is not being deleted."""
    return condition(pod, "Ready").get("status") == "True" and not pod["metadata"].get(
        "deletionTimestamp"
    )


def has_ended(pod: Object) -> bool:
    """Return whether all containers of the pod have ended and will not run again."""
    return (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")


def gateway_schemes(gateways: list[Object]) -> tuple[Scheme, ...]:
    """Return the URL schemes of ready gateway pods, according to the names of their ports."""
    served: set[Scheme] = set()
    for pod in filter(is_ready, gateways):
        ports = {
            port.get("name")
            for each in pod["spec"]["containers"]
            for port in each.get("ports") or []
        }
        served |= ports & PORTS.keys()
    return tuple(sorted(served))


def parse_time(text: str | None) -> datetime | None:
    """Parse a Kubernetes timestamp. Return None if `text` is missing or not a timestamp."""
    try:
        return datetime.fromisoformat(text or "")
    except ValueError:
        return None
