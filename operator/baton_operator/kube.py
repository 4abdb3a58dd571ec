"""The Kubernetes API as the operator uses it: JSON objects by kind and name, over `kubernetes.aio`.

Kinds are a short fixed table, so a request costs no discovery; only versions that differ between clusters are discovered.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
from kubernetes.aio import client, config

from baton_operator import names

Object = dict[str, Any]

REQUEST_TIMEOUT_S = 15.0
CONNECT_TIMEOUT_S = 10.0
PAGE_SIZE = 500

_RESOURCES = {
    "LLMService": (names.API_VERSION, names.PLURAL),
    "ConfigMap": ("v1", "configmaps"),
    "Secret": ("v1", "secrets"),
    "Event": ("v1", "events"),
    "Pod": ("v1", "pods"),
    "Service": ("v1", "services"),
    "ServiceAccount": ("v1", "serviceaccounts"),
    "Deployment": ("apps/v1", "deployments"),
    "ControllerRevision": ("apps/v1", "controllerrevisions"),
    "Ingress": ("networking.k8s.io/v1", "ingresses"),
    "NetworkPolicy": ("networking.k8s.io/v1", "networkpolicies"),
    "Lease": ("coordination.k8s.io/v1", "leases"),
    "Role": ("rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": ("rbac.authorization.k8s.io/v1", "rolebindings"),
}
KINDS = tuple(_RESOURCES)
"""Kinds whose version is fixed."""
_VERBS = {"GET": "get", "POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}
_HTTP_ROUTES = ("gateway.networking.k8s.io/v1", "httproutes")
_POLICY_VERSIONS = ("policy/v1", "policy/v1beta1")
_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"


class KubeError(Exception):
    """The API server refused: `status` is the HTTP code, `reason` Kubernetes' own, the text its message."""

    def __init__(self, status: int, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s
        """How long the server asked to be left alone. None: it did not."""


class NotLeaderError(OSError):
    """This process does not hold the Lease any more, and may not write."""


class Kube:
    """One connection to one API server. Every method may raise KubeError, and OSError or TimeoutError if there is no answer."""

    def __init__(self, api: client.ApiClient) -> None:
        self.api = api
        self.counted: Callable[[str, str, int], None] = lambda verb, kind, code: None
        """Called after each request; code 0: there was no answer."""
        self.may_write_s: Callable[[], float] = lambda: REQUEST_TIMEOUT_S
        """For how long a write that starts now may take. 0 or less: it may not start."""
        self.policy_api: str | None = None
        """Version of the policy API that the server has, None if none. Set by `discover`."""
        self.http_routes = False
        """Whether the server has the Gateway API's HTTPRoutes. Set by `discover` and `serves_http_routes`."""

    async def discover(self) -> bool:
        """Learns what the server has. False while the LLMService CRD is not there. Raises KubeError."""
        self.policy_api = None
        for version in _POLICY_VERSIONS:
            if await self._serves(version, "poddisruptionbudgets"):
                self.policy_api = version
                break
        await self.serves_http_routes()
        return await self._serves(names.API_VERSION, names.PLURAL)

    async def serves_http_routes(self) -> bool:
        """Whether the server has HTTPRoutes; asks it again as long as it had not. Raises KubeError."""
        self.http_routes = self.http_routes or await self._serves(*_HTTP_ROUTES)
        return self.http_routes

    async def _serves(self, api_version: str, plural: str) -> bool:
        try:
            resources = await self._request("GET", f"/apis/{api_version}")
        except KubeError as error:
            if error.status == 404:
                return False
            raise
        return any(resource["name"] == plural for resource in resources["resources"])

    def path(self, kind: str, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """`/apis/apps/v1/namespaces/x/deployments/y`; without namespace: of all namespaces."""
        version, plural = self.resource(kind)
        parts = ["/apis" if "/" in version else "/api", version]
        if namespace is not None:
            parts += ["namespaces", namespace]
        return "/".join([*parts, plural, *(part for part in (name, subresource) if part)])

    def resource(self, kind: str) -> tuple[str, str]:
        """(apiVersion, plural) of `kind`. Raises KeyError for one that the operator does not know."""
        if kind == "PodDisruptionBudget":
            return self.policy_api or _POLICY_VERSIONS[0], "poddisruptionbudgets"
        if kind == "HTTPRoute":
            return _HTTP_ROUTES
        return _RESOURCES[kind]

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """None if it does not exist. With a cache: if the cache does not have it. Raises KubeError."""
        return await self.read(kind, namespace, name)

    async def read(self, kind: str, namespace: str, name: str) -> Object | None:
        """As the API server has it at this moment; None if it does not exist. Raises KubeError."""
        try:
            return await self._request("GET", self.path(kind, namespace, name), kind=kind)
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    async def exists(self, kind: str, namespace: str, name: str) -> bool:
        """Whether it exists at this moment. No more than its metadata is sent. Raises KubeError."""
        try:
            await self._request("GET", self.path(kind, namespace, name), kind=kind, accept=_METADATA_ONLY)
        except KubeError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def list_all(self, kind: str, namespace: str | None, selector: dict[str, str] | None = None) -> list[Object]:
        """All objects of `kind`. Raises KubeError."""
        items, _ = await self.list_versioned(kind, namespace, selector)
        return items

    async def list_versioned(
        self, kind: str, namespace: str | None, selector: dict[str, str] | None = None
    ) -> tuple[list[Object], str]:
        """All objects of `kind`, page by page, and the resource version from which to watch on. Raises KubeError."""
        query = [("limit", str(PAGE_SIZE))]
        if selector:
            query.append(("labelSelector", names.serialized(selector)))
        items: list[Object] = []
        page_token = ""
        while True:
            page = [*query, ("continue", page_token)] if page_token else query
            result = await self._request("GET", self.path(kind, namespace), query=page, kind=kind, verb="list")
            items += result.get("items") or []
            page_token = result["metadata"].get("continue") or ""
            if not page_token:
                return items, result["metadata"]["resourceVersion"]

    async def watch(
        self,
        kind: str,
        namespace: str | None,
        selector: dict[str, str] | None,
        version: str,
        *,
        timeout_s: float,
        silence_s: float,
    ) -> AsyncGenerator[Object, None]:
        """Events `{"type", "object"}` after `version`, bookmarks included, until the server ends the watch.

        Args:
            timeout_s: after which the server is asked to end it.
            silence_s: the longest time without an event or a bookmark.

        Raises:
            KubeError: refused, or an event ERROR; status 410: `version` is too old, list again.
            TimeoutError: silent for too long.
        """
        query = [("watch", "true"), ("allowWatchBookmarks", "true"), ("resourceVersion", version)]
        query.append(("timeoutSeconds", str(max(1, round(timeout_s)))))
        if selector:
            query.append(("labelSelector", names.serialized(selector)))
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_s)
        path = self.path(kind, namespace)
        code = 0
        try:
            response = await self._send("GET", path, query=query, timeout=timeout)
            code = response.status
            if code != 200:
                raise _kube_error(code, await response.read(), response.headers)
            try:
                while line := await response.response.content.readline():
                    yield _event(path, line)
            finally:
                response.response.close()
        except aiohttp.SocketTimeoutError as error:
            raise TimeoutError(f"watch {path}: silent for {silence_s:g} s") from error
        except aiohttp.ClientError as error:
            raise ConnectionError(f"watch {path}: {error or type(error).__name__}") from error
        finally:
            self.counted("watch", kind, code)

    async def create(self, obj: Object) -> Object:
        """Raises KubeError, with status 409 if the name is taken."""
        path = self.path(obj["kind"], obj["metadata"]["namespace"])
        query = [("fieldManager", names.MANAGER)]
        return await self._request("POST", path, body=obj, query=query, kind=obj["kind"])

    async def apply(self, obj: Object) -> Object:
        """Server-side apply: the fields in `obj` become ours. Raises KubeError."""
        metadata = obj["metadata"]
        return await self._request(
            "PATCH",
            self.path(obj["kind"], metadata["namespace"], metadata["name"]),
            body=obj,
            query=[("fieldManager", names.MANAGER), ("force", "true")],
            content_type="application/apply-patch+yaml",
            kind=obj["kind"],
            verb="apply",
        )

    async def merge(
        self, kind: str, namespace: str, name: str, patch: Object, subresource: str | None = None
    ) -> Object:
        """JSON merge patch. Raises KubeError."""
        return await self._request(
            "PATCH",
            self.path(kind, namespace, name, subresource),
            body=patch,
            query=[("fieldManager", names.MANAGER)],
            content_type="application/merge-patch+json",
            kind=kind if subresource is None else f"{kind}/{subresource}",
        )

    async def replace(self, obj: Object) -> Object:
        """Writes the whole object over the version that it carries. Raises KubeError; 409 if that is not the newest."""
        metadata = obj["metadata"]
        path = self.path(obj["kind"], metadata["namespace"], metadata["name"])
        return await self._request("PUT", path, body=obj, kind=obj["kind"])

    async def delete(self, kind: str, namespace: str, name: str, uid: str) -> bool:
        """Deletes this very object. False if it is gone or another took its name. Raises KubeError."""
        return await self.delete_object(kind, namespace, name, uid) is not None

    async def delete_object(self, kind: str, namespace: str, name: str, uid: str) -> Object | None:
        """As `delete`. The object as it is then, if it ends later, or a Status; None if it is gone or another took its name."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        try:
            return await self._request("DELETE", self.path(kind, namespace, name), body=body, kind=kind)
        except KubeError as error:
            if error.status in (404, 409):
                return None
            raise

    async def _send(
        self,
        method: str,
        path: str,
        *,
        body: Object | None = None,
        query: list[tuple[str, str]] | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
        timeout: aiohttp.ClientTimeout,
    ) -> Any:
        request = await self.api.param_serialize(
            method,
            path,
            query_params=query or [],
            header_params={"Accept": accept, "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        return await self.api.call_api(*request, _request_timeout=timeout)

    async def _request(
        self,
        method: str,
        path: str,
        *,
        body: Object | None = None,
        query: list[tuple[str, str]] | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
        kind: str = "",
        verb: str = "",
    ) -> Any:
        timeout_s = REQUEST_TIMEOUT_S
        if method != "GET":
            # A write that is still under way when another process may hold the Lease is given up.
            timeout_s = min(timeout_s, self.may_write_s())
            if timeout_s <= 0:
                raise NotLeaderError(f"{method} {path}: not sent, the Lease is lost")
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        code = 0
        try:
            response = await self._send(
                method, path, body=body, query=query, content_type=content_type, accept=accept, timeout=timeout
            )
            data = await response.read()
            code = response.status
        except client.ApiException as error:
            code = error.status or 0
            raise _kube_error(code, error.body or error.reason) from error
        except aiohttp.ClientError as error:
            raise ConnectionError(f"{method} {path}: {error or type(error).__name__}") from error
        finally:
            self.counted(verb or _VERBS.get(method, method), kind, code)
        if not 200 <= code <= 299:
            raise _kube_error(code, data, response.headers)
        try:
            return json.loads(data)
        except ValueError as error:  # a proxy's page, say, while the server is away
            raise ConnectionError(f"{method} {path}: the answer is not JSON: {error}") from error


def _kube_error(status: int, body: Any, headers: Mapping[str, str] | None = None) -> KubeError:
    """From a metav1.Status where the server sent one, else from whatever it sent."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body)
    try:
        retry_after_s = float((headers or {}).get("Retry-After", ""))
    except ValueError:  # there is none, or a date, which API servers do not send
        retry_after_s = None
    try:
        answer = json.loads(text)
        return KubeError(status, answer.get("reason") or "", answer.get("message") or text, retry_after_s)
    except (ValueError, AttributeError):
        return KubeError(status, "", text or f"HTTP {status}", retry_after_s)


def _event(path: str, line: bytes) -> Object:
    """Raises KubeError for an event ERROR, ConnectionError for half a line."""
    try:
        event: Object = json.loads(line)
    except ValueError as error:
        raise ConnectionError(f"watch {path}: cut off within an event: {error}") from error
    if event.get("type") == "ERROR":
        status = event.get("object") or {}
        raise KubeError(status.get("code") or 500, status.get("reason") or "", status.get("message") or "watch failed")
    return event


AnyKube = TypeVar("AnyKube", bound=Kube)


@asynccontextmanager
async def connect(
    kubeconfig: str | None,
    kind: Callable[[client.ApiClient], AnyKube] = Kube,  # type: ignore[assignment]
) -> AsyncIterator[tuple[AnyKube, client.Configuration]]:
    """A connection by `kubeconfig`, or by the pod's service account if None.

    Raises:
        config.ConfigException: neither is usable.
    """
    configuration = client.Configuration()
    configuration.connection_pool_maxsize = 0  # no bound: every watch has a connection of its own
    try:
        if kubeconfig is not None:
            await config.load_kube_config(kubeconfig, client_configuration=configuration)
        else:
            config.load_incluster_config(client_configuration=configuration)
        made = client.ApiClient(configuration)
    except config.ConfigException:
        raise
    except Exception as error:  # the library takes the file's structure and its certificates as they come
        source = f"{kubeconfig} is no kubeconfig" if kubeconfig else "the pod's service account"
        raise config.ConfigException(f"{source}: {' '.join(str(error).split())}") from error
    async with made as api:
        yield kind(api), configuration
