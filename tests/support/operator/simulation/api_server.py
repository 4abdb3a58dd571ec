"""A simulated API server, the operator's connection to it, which may fail, and kopf's session.

For the tests of the Reconciler.

The server is that of pocketkube's embedded control plane, without HTTP and on a simulated clock.
"""

from __future__ import annotations

import asyncio
import copy
import enum
import itertools
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any, Self

import aiohttp
import msgspec
from yarl import URL

from baton_kube.client import REQUEST_TIMEOUT_S, KubeClient, KubeError, Object, Query
from baton_operator import names
from baton_operator.api.crd import custom_resource_definition
from pocketkube.apiserver.cluster_state import ClusterState
from pocketkube.apiserver.errors import ApiError
from pocketkube.apiserver.objects.deletion import DeleteOptions
from pocketkube.apiserver.objects.object_registry import WriteOptions
from pocketkube.apiserver.resources import RequestInfo
from pocketkube.apiserver.serving import api_discovery
from pocketkube.apiserver.serving.request_parsing import parse_path
from pocketkube.apiserver.serving.selectors import label_selector
from pocketkube.apiserver.store import StoreEvent
from support.operator.services import NOW
from support.operator.simulation.watches import Wire


class SimulatedSession:
    """A fake aiohttp session with the methods that kopf uses.

    Args:
        middlewares: middlewares of an aiohttp client, the outermost first.
    """

    def __init__(self, server: ApiServer, middlewares: Sequence[Any]) -> None:
        self.headers: dict[str, str] = {}
        self.closed = False
        self._server = server
        self._middlewares = middlewares

    async def request(self, *, method: str, url: str, **_: Any) -> Response:
        async def send(request: Any) -> Response:
            assert request.method == "get", "kopf writes"
            return self._answer(request.url)

        handler: Any = send
        for middleware in reversed(self._middlewares):

            def wrapped(request: Any, middleware: Any = middleware, inner: Any = handler) -> Any:
                return middleware(request, inner)

            handler = wrapped
        response: Response = await handler(SimpleNamespace(method=method, url=URL(url), headers={}))
        return response

    def _answer(self, url: URL) -> Response:
        query = dict(url.query)
        parts = [part for part in url.path.split("/") if part]
        group = parts[1] if parts[0] == "apis" and len(parts) > 1 else ""
        wire = self._server.wire_of(f"{parts[-1]}.{group}".rstrip("."))
        if query.get("watch") == "true":
            matches = label_selector(query.get("labelSelector", ""))
            timeout_s = float(query["timeoutSeconds"])
            return Response(
                200, events=wire.watch(matches, int(query["resourceVersion"]), timeout_s=timeout_s)
            )
        match wire.lists:
            case "500":
                return Response(500, {"kind": "Status", "message": "etcdserver: request timed out"})
            case "429":
                return Response(
                    429, {"kind": "Status", "message": "later"}, headers={"Retry-After": "3"}
                )
            case "break":
                return Response(200)
        try:
            return Response(200, self._server.request("GET", url.path, None, query, ""))
        except KubeError as error:
            return Response(error.status, {"kind": "Status", "message": str(error)})

    async def close(self) -> None:
        self.closed = True


class Response:
    """The response to a list (with `body`) or to a watch (with `events`)."""

    def __init__(
        self,
        status: int,
        body: Any = None,
        events: AsyncGenerator[Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.status = status
        self.headers = headers or {}
        self.closed = False
        self.content = self
        self._body = body
        self._events = events

    async def json(self) -> Any:
        if self._body is None:
            raise aiohttp.ClientPayloadError("the connection broke")
        return self._body

    def raise_for_status(self) -> None:
        request_info: Any = SimpleNamespace(real_url="simulated")
        raise aiohttp.ClientResponseError(request_info, (), status=self.status)

    async def iter_chunked(self, size: int) -> AsyncGenerator[bytes]:
        assert self._events is not None
        async with aclosing(self._events) as events:
            try:
                async for event in events:
                    yield json.dumps(event).encode() + b"\n"
            except ConnectionError as error:
                raise aiohttp.ClientPayloadError(str(error)) from error

    def close(self) -> None:
        self.closed = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


NAMESPACE = "default"
SYSTEM = WriteOptions("test")


class Crash(BaseException):
    """The operator crashes in the simulation."""


class Fault(enum.Enum):
    CONFLICT = "409"
    BROKEN = "500"
    TIMEOUT = "no answer; it was not done"
    LOST_ANSWER = "no answer; it was done"
    CRASH_BEFORE = "the operator ends; it was not done"
    CRASH_AFTER = "the operator ends; it was done"


@dataclass
class ApiServer:
    """Stores objects by the rules of Kubernetes, on a simulated clock."""

    now: datetime = NOW
    cluster: ClusterState = field(default_factory=lambda: ClusterState("token", "10.96.0.0/20"))
    #: Objects by storage key.
    _wires: dict[str, Wire] = field(default_factory=dict)

    def __post_init__(self) -> None:
        crds = self._resource("apiextensions.k8s.io", "v1", "customresourcedefinitions")
        self.cluster.registry.create(
            RequestInfo(crds), _without_rules(custom_resource_definition()), SYSTEM
        )
        self.cluster.store.listen(self._confirm)

    def seconds(self) -> float:
        """Return the simulated seconds since the start."""
        return (self.now - NOW).total_seconds()

    def wire(self, resource: tuple[str, str]) -> Wire:
        """Return the watches of a resource, given as (apiVersion, plural)."""
        api_version, plural = resource
        group = api_version.rpartition("/")[0]
        return self.wire_of(f"{plural}.{group}".rstrip("."))

    def wire_of(self, storage: str) -> Wire:
        return self._wires.setdefault(storage, Wire(version=self.cluster.store.version))

    @property
    def wires(self) -> list[Wire]:
        return list(self._wires.values())

    def _confirm(self, storage: str, event: StoreEvent) -> None:
        for wire in self._wires.values():
            wire.version = event.version
        self._wires.setdefault(storage, Wire()).happened(event)

    def _resource(self, group: str, version: str, plural: str) -> Any:
        found = self.cluster.catalog.find(group, version, plural)
        assert found is not None, plural
        return found

    def request(
        self, method: str, path: str, body: Any, query: dict[str, str], content_type: str
    ) -> Any:
        """Process a request, and return the body of the response.

        Raises:
            KubeError: the request is refused.
        """
        try:
            return _copy(self._answer(method, path, _copy(body), query, content_type))
        except ApiError as error:
            raise KubeError(error.code, error.reason, str(error)) from error

    def _answer(
        self, method: str, path: str, body: Any, query: dict[str, str], content_type: str
    ) -> Any:
        cluster = self.cluster
        match [part for part in path.split("/") if part]:
            case ["api"]:
                return api_discovery.core_versions("simulated")
            case ["api", "v1"]:
                return api_discovery.resource_list(cluster.catalog, "", "v1")
            case ["apis"]:
                return api_discovery.group_list(cluster.catalog)
            case ["apis", group, version]:
                if version not in cluster.catalog.versions(group):
                    raise ApiError(404, "NotFound", path)
                return api_discovery.resource_list(cluster.catalog, group, version)
        info = parse_path(path, cluster.catalog)
        if info is None:
            raise ApiError(404, "NotFound", path)
        options = WriteOptions(
            query.get("fieldManager", "test"), force=query.get("force") == "true"
        )
        if method == "GET" and "resourceVersion" in query:
            return self._cached(info, query)
        if method == "GET" and info.name:
            return cluster.registry.get(info)
        if method == "GET":
            matches = label_selector(query.get("labelSelector", ""))
            items = cluster.store.list(info.resource.storage_key, info.namespace, matches)
            return {"metadata": {"resourceVersion": str(cluster.store.version)}, "items": items}
        if method == "POST":
            return self._made(info.resource, cluster.registry.create(info, body, options))
        if method == "PATCH":
            existed = (
                cluster.store.get(info.resource.storage_key, info.namespace, info.name) is not None
            )
            written = cluster.registry.patch(info, content_type, body, options)
            return written if existed else self._made(info.resource, written)
        assert method == "DELETE", method
        uid = ((body or {}).get("preconditions") or {}).get("uid", "")
        last, gone = cluster.deletion.delete(info, DeleteOptions(uid=uid))
        if not gone:
            grace = timedelta(seconds=last["metadata"].get("deletionGracePeriodSeconds", 0))
            last = self._edit_metadata(
                info.resource, last, deletionTimestamp=_timestamp(self.now + grace)
            )
        self.cluster.collector.drain()
        return last

    def _cached(self, info: RequestInfo, query: dict[str, str]) -> Any:
        """Read from the watch cache, which may lag behind."""
        items, version = self.wire_of(info.resource.storage_key).cached(
            label_selector(query.get("labelSelector", ""))
        )
        if version < int(query["resourceVersion"]):
            raise ApiError(
                504,
                "Timeout",
                f"Too large resource version: {query['resourceVersion']}, current: {version}",
            )
        if not info.name:
            return {"metadata": {"resourceVersion": str(version)}, "items": items}
        found = [obj for obj in items if obj["metadata"]["name"] == info.name]
        if not found:
            raise ApiError(404, "NotFound", info.name)
        return found[0]

    def _made(self, resource: Any, obj: Object) -> Object:
        return self._edit_metadata(resource, obj, creationTimestamp=_timestamp(self.now))

    def _edit_metadata(self, resource: Any, obj: Object, **fields: str) -> Object:
        return self.cluster.store.put(
            resource.storage_key, {**obj, "metadata": {**obj["metadata"], **fields}}
        )

    # The other parts of the cluster

    def list(self, storage: str) -> list[Object]:
        return self.cluster.store.list(storage, NAMESPACE)

    def get(self, storage: str, name: str) -> Object | None:
        return self.cluster.store.get(storage, NAMESPACE, name)

    def edit(self, storage: str, name: str, change: Callable[[Object], None]) -> None:
        """Apply `change` to a stored object, as a write of a controller or kubelet."""
        obj = copy.deepcopy(self.cluster.store.get(storage, NAMESPACE, name))
        assert obj is not None, name
        change(obj)
        self.cluster.store.put(storage, obj)

    def put(self, obj: Object, storage: str) -> Object:
        """Create an object, as a write of a client other than the operator."""
        info = RequestInfo(self.cluster.catalog.by_storage(storage), NAMESPACE)
        return self._made(info.resource, self.cluster.registry.create(info, obj, SYSTEM))

    def remove(self, storage: str, name: str) -> None:
        self.cluster.store.remove(storage, NAMESPACE, name)
        self.cluster.collector.drain()


class SimulatedClient(KubeClient):
    """The API client of one operator process. Planned faults hit the client's requests."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self.server = "http://simulated"
        self.on_request = lambda verb, path, code: None
        self.write_timeout_s = lambda: REQUEST_TIMEOUT_S
        #: Whether the process is alive.
        self.lives = True
        self.requests = 0
        #: Reads for which the watch cache was too old. A real API server answers them after 3 s.
        self.waits = 0
        #: (method, path) of writes that took effect.
        self.writes: list[tuple[str, str]] = []
        #: (action, uid of the pod) of confirmed writes, and of creations refused because the pod
        #: exists.
        self.confirmed: list[tuple[str, str]] = []
        #: Faults by number of the request, or of the write, from 0.
        self.faults: dict[int, Fault] = {}
        self.faults_hit_writes = False
        #: The service as last read.
        self.seen_service: Object | None = None
        self.seen_pods: list[Object] = []
        self._ways: Iterator[int] = itertools.repeat(0)
        self._actions: dict[int, Callable[[], None]] = {}

    def begin(
        self,
        faults: dict[int, Fault],
        actions: dict[int, Callable[[], None]],
        *,
        hit_writes: bool,
        delays: list[int],
    ) -> None:
        """Reset the records, and count requests from 0 again.

        Args:
            faults: number of a request -> fault of the request.
            actions: number of a request -> function to call before the request takes effect.
            hit_writes: whether `faults` and `actions` count only writes.
            delays: loop iterations that each request and each response takes, repeated in a cycle.
        """
        self.requests, self.waits, self.writes, self.confirmed = 0, 0, [], []
        self.faults, self.faults_hit_writes, self._actions = faults, hit_writes, actions
        self._ways = itertools.cycle(delays)
        self.seen_service, self.seen_pods = None, []

    def http_session(self, *middlewares: Any) -> Any:
        return SimulatedSession(self._server, middlewares)

    async def _request(
        self,
        verb: str,
        method: str,
        path: str,
        *,
        body: Object | None = None,
        query: Query = (),
        content_type: str = "application/json",
        accept: str = "application/json",
        budget: Any = None,
        type_: Any = Object,
    ) -> Any:
        is_write = method != "GET"
        fault = self.faults.get(self.requests) if is_write or not self.faults_hit_writes else None
        if is_write or not self.faults_hit_writes:
            self.requests += 1
        number = self.requests - 1
        await self._way()
        self._actions.pop(number, lambda: None)()
        match fault:
            case Fault.CONFLICT:
                raise KubeError(409, "Conflict", "another client was faster")
            case Fault.BROKEN:
                raise KubeError(500, "InternalError", "etcdserver: leader changed")
            case Fault.TIMEOUT:
                raise TimeoutError(f"{method} {path}")
            case Fault.CRASH_BEFORE:
                self._crash()
        is_pod = "/pods" in path
        try:
            answer = self._server.request(method, path, body, dict(query), content_type)
        except KubeError as error:
            if is_pod and error.reason == "AlreadyExists":
                self._confirm("exists", self._server.get("pods", (body or {})["metadata"]["name"]))
            self.waits += error.status == 504
            raise
        if is_write:
            self.writes.append((method, path))
        if fault is Fault.CRASH_AFTER:
            self._crash()
        await self._way()
        if fault is Fault.LOST_ANSWER:
            raise ConnectionError(f"{method} {path}: connection reset")
        self._note(method, path, body or {}, answer)
        return answer if type_ is Object else msgspec.convert(answer, type_)

    def _note(self, method: str, path: str, body: Object, answer: Object) -> None:
        """Record the objects that a response shows, and the actions that it confirms."""
        if method == "GET" and path.startswith(service_path()) and path != service_path():
            self.seen_service = answer
        elif method == "GET" and path.endswith("/pods"):
            self.seen_pods = answer["items"]
        elif method == "POST" and path.endswith("/pods"):
            self._confirm("made", answer)
        elif method == "DELETE" and "/pods/" in path:
            self.confirmed.append(("deleted", body["preconditions"]["uid"]))
        elif "/pods/" in path and names.ANNOTATION_DRAINING in body.get("metadata", {}).get(
            "annotations", {}
        ):
            self._confirm("drained", answer)

    def _confirm(self, what: str, pod: Object | None) -> None:
        if pod is not None:
            self.confirmed.append((what, pod["metadata"]["uid"]))

    async def _way(self) -> None:
        for _ in range(next(self._ways)):
            await asyncio.sleep(0)
        if not self.lives:
            raise Crash

    def _crash(self) -> None:
        self.lives = False
        raise Crash


def _without_rules(node: Any) -> Any:
    """Return `node` without CEL rules, which are slow and which no simulated edit breaks."""
    if isinstance(node, dict):
        return {
            key: _without_rules(value)
            for key, value in node.items()
            if key != "x-kubernetes-validations"
        }
    return list(map(_without_rules, node)) if isinstance(node, list) else node


def _copy(body: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(body))


def _timestamp(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def service_path(name: str = "") -> str:
    return f"/apis/{names.API_VERSION}/namespaces/{NAMESPACE}/{names.PLURAL}" + (
        f"/{name}" if name else ""
    )
