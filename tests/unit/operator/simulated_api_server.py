"""The embedded control plane's API server without HTTP, on a clock of the test's own, and the operator's connection to it, on which
anything can go wrong."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import msgspec
from services import NOW

from baton_local.control_plane.embedded import discovery
from baton_local.control_plane.embedded.cluster import Cluster
from baton_local.control_plane.embedded.deletion import DeleteOptions
from baton_local.control_plane.embedded.errors import ApiError
from baton_local.control_plane.embedded.registry import WriteOptions
from baton_local.control_plane.embedded.routing import parse_path
from baton_local.control_plane.embedded.selectors import label_selector
from baton_operator import names
from baton_operator.crd import custom_resource_definition
from baton_operator.kube import Kube, KubeError

Object = dict[str, Any]
NAMESPACE = "default"
SYSTEM = WriteOptions("test")


class Crash(BaseException):
    """The operator's process ends here."""


class Fault(enum.Enum):
    CONFLICT = "409"
    BROKEN = "500"
    TIMEOUT = "no answer; it was not done"
    LOST_ANSWER = "no answer; it was done"
    CRASH_BEFORE = "the operator ends; it was not done"
    CRASH_AFTER = "the operator ends; it was done"


@dataclass
class ApiServer:
    """Objects, with Kubernetes' rules."""

    now: datetime = NOW
    cluster: Cluster = field(default_factory=lambda: Cluster("token", "10.96.0.0/20"))

    def __post_init__(self) -> None:
        crds = self._resource("apiextensions.k8s.io", "v1", "customresourcedefinitions")
        self.cluster.registry.create(crds, "", _without_rules(custom_resource_definition()), SYSTEM)

    def _resource(self, group: str, version: str, plural: str) -> Any:
        found = self.cluster.catalog.find(group, version, plural)
        assert found is not None, plural
        return found

    def request(self, method: str, path: str, body: Any, query: dict[str, str], content_type: str) -> Any:
        """The answer's body. Raises KubeError."""
        try:
            return _copy(self._answer(method, path, _copy(body), query, content_type))
        except ApiError as error:
            raise KubeError(error.code, error.reason, str(error)) from error

    def _answer(self, method: str, path: str, body: Any, query: dict[str, str], content_type: str) -> Any:
        cluster = self.cluster
        match [part for part in path.split("/") if part]:
            case ["apis", group, version]:
                if version not in cluster.catalog.versions(group):
                    raise ApiError(404, "NotFound", path)
                return discovery.resource_list(cluster.catalog, group, version)
        call = parse_path(path, cluster.catalog)
        if call is None:
            raise ApiError(404, "NotFound", path)
        target = (call.resource, call.namespace)
        options = WriteOptions(query.get("fieldManager", "test"), force=query.get("force") == "true")
        sub = call.subresource.name if call.subresource else ""
        if method == "GET" and call.name:
            return cluster.registry.get(*target, call.name)
        if method == "GET":
            matches = label_selector(query.get("labelSelector", ""))
            items = [obj for obj in cluster.registry.list(*target) if matches(obj)]
            return {"metadata": {"resourceVersion": str(cluster.store.version)}, "items": items}
        if method == "POST":
            return self._made(call.resource, cluster.registry.create(*target, body, options))
        if method == "PATCH":
            existed = cluster.store.get(call.resource.storage_key, call.namespace, call.name) is not None
            written = cluster.registry.patch(*target, call.name, content_type, body, options, sub)
            return written if existed else self._made(call.resource, written)
        assert method == "DELETE", method
        uid = ((body or {}).get("preconditions") or {}).get("uid", "")
        last, gone = cluster.deletion.delete(*target, call.name, DeleteOptions(uid=uid))
        if not gone:
            grace = timedelta(seconds=last["metadata"].get("deletionGracePeriodSeconds", 0))
            last = self._edit_metadata(call.resource, last, deletionTimestamp=_timestamp(self.now + grace))
        self.cluster.collector.drain()
        return last

    def _made(self, resource: Any, obj: Object) -> Object:
        return self._edit_metadata(resource, obj, creationTimestamp=_timestamp(self.now))

    def _edit_metadata(self, resource: Any, obj: Object, **fields: str) -> Object:
        return self.cluster.store.put(resource.storage_key, {**obj, "metadata": {**obj["metadata"], **fields}})

    # The other parts of the cluster

    def list(self, storage: str) -> list[Object]:
        return self.cluster.store.list(storage, NAMESPACE)

    def get(self, storage: str, name: str) -> Object | None:
        return self.cluster.store.get(storage, NAMESPACE, name)

    def edit(self, storage: str, name: str, change: Callable[[Object], None]) -> None:
        """As a controller or kubelet does it."""
        obj = copy.deepcopy(self.cluster.store.get(storage, NAMESPACE, name))
        assert obj is not None, name
        change(obj)
        self.cluster.store.put(storage, obj)

    def put(self, obj: Object, plural: str) -> Object:
        """Somebody else makes an object."""
        call = parse_path(f"/api/v1/namespaces/{NAMESPACE}/{plural}", self.cluster.catalog)
        assert call is not None
        return self._made(call.resource, self.cluster.registry.create(call.resource, NAMESPACE, obj, SYSTEM))

    def remove(self, storage: str, name: str) -> None:
        self.cluster.store.remove(storage, NAMESPACE, name)
        self.cluster.collector.drain()


class SimulatedKube(Kube):
    """The operator's connection. Faults happen to the requests they are planned for."""

    def __init__(self, server: ApiServer) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self._server = server
        self.requests = 0
        self.writes: list[tuple[str, str]] = []
        """(method, path) of those that were carried out."""
        self.faults: dict[int, Fault] = {}
        """By number of the request, or of the write, from 0."""
        self.faults_hit_writes = False

    async def _request(
        self,
        method: str,
        path: str,
        *,
        body: Object | None = None,
        query: list[tuple[str, str]] | None = None,
        content_type: str = "application/json",
        kind: str = "",
        verb: str = "",
    ) -> Any:
        is_write = method != "GET"
        fault = self.faults.get(self.requests) if is_write or not self.faults_hit_writes else None
        if is_write or not self.faults_hit_writes:
            self.requests += 1
        match fault:
            case Fault.CONFLICT:
                raise KubeError(409, "Conflict", "somebody else was faster")
            case Fault.BROKEN:
                raise KubeError(500, "InternalError", "etcdserver: leader changed")
            case Fault.TIMEOUT:
                raise TimeoutError(f"{method} {path}")
            case Fault.CRASH_BEFORE:
                raise Crash
        answer = self._server.request(method, path, body, dict(query or []), content_type)
        if is_write:
            self.writes.append((method, path))
        if fault is Fault.CRASH_AFTER:
            raise Crash
        if fault is Fault.LOST_ANSWER:
            raise ConnectionError(f"{method} {path}: connection reset")
        return answer


def _without_rules(node: Any) -> Any:
    """The simulated user breaks no CEL rule, and to evaluate them takes longer than all the rest."""
    if isinstance(node, dict):
        return {key: _without_rules(value) for key, value in node.items() if key != "x-kubernetes-validations"}
    return list(map(_without_rules, node)) if isinstance(node, list) else node


def _copy(body: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(body))


def _timestamp(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def service_path(name: str = "") -> str:
    return f"/apis/{names.API_VERSION}/namespaces/{NAMESPACE}/{names.PLURAL}" + (f"/{name}" if name else "")
