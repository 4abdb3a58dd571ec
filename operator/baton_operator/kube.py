"""The Kubernetes API as the operator uses it: JSON objects by kind and name, over `kubernetes.aio`.

Kinds are a short fixed table, so a request costs no discovery; only versions that differ between clusters are discovered.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from kubernetes.aio import client, config

from baton_operator import names

Object = dict[str, Any]

REQUEST_TIMEOUT_S = 15.0
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
    "Ingress": ("networking.k8s.io/v1", "ingresses"),
    "Role": ("rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": ("rbac.authorization.k8s.io/v1", "rolebindings"),
}
_POLICY_VERSIONS = ("policy/v1", "policy/v1beta1")


class KubeError(Exception):
    """The API server refused: `status` is the HTTP code, `reason` Kubernetes' own, the text its message."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class Kube:
    """One connection to one API server. Every method may raise KubeError, and OSError or TimeoutError if there is no answer."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api
        self.policy_api: str | None = None
        """Version of the policy API that the server has, None if none. Set by `discover`."""

    async def discover(self) -> bool:
        """Learns what the server has. False while the LLMService CRD is not there. Raises KubeError."""
        self.policy_api = None
        for version in _POLICY_VERSIONS:
            if await self._serves(version, "poddisruptionbudgets"):
                self.policy_api = version
                break
        return await self._serves(names.API_VERSION, names.PLURAL)

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
        if kind == "PodDisruptionBudget":
            version, plural = self.policy_api or _POLICY_VERSIONS[0], "poddisruptionbudgets"
        else:
            version, plural = _RESOURCES[kind]
        parts = ["/apis" if "/" in version else "/api", version]
        if namespace is not None:
            parts += ["namespaces", namespace]
        return "/".join([*parts, plural, *(part for part in (name, subresource) if part)])

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """None if it does not exist. Raises KubeError."""
        try:
            return await self._request("GET", self.path(kind, namespace, name))
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    async def list_all(self, kind: str, namespace: str | None, selector: dict[str, str] | None = None) -> list[Object]:
        """All objects of `kind`, page by page. Raises KubeError."""
        query = [("limit", str(PAGE_SIZE))]
        if selector:
            query.append(("labelSelector", names.serialized(selector)))
        items: list[Object] = []
        page_token = ""
        while True:
            page = [*query, ("continue", page_token)] if page_token else query
            result = await self._request("GET", self.path(kind, namespace), query=page)
            items += result.get("items") or []
            page_token = result["metadata"].get("continue") or ""
            if not page_token:
                return items

    async def create(self, obj: Object) -> Object:
        """Raises KubeError, with status 409 if the name is taken."""
        path = self.path(obj["kind"], obj["metadata"]["namespace"])
        return await self._request("POST", path, body=obj, query=[("fieldManager", names.MANAGER)])

    async def apply(self, obj: Object) -> Object:
        """Server-side apply: the fields in `obj` become ours. Raises KubeError."""
        metadata = obj["metadata"]
        return await self._request(
            "PATCH",
            self.path(obj["kind"], metadata["namespace"], metadata["name"]),
            body=obj,
            query=[("fieldManager", names.MANAGER), ("force", "true")],
            content_type="application/apply-patch+yaml",
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
        )

    async def delete(self, kind: str, namespace: str, name: str, uid: str) -> bool:
        """Deletes this very object. False if it is gone or another took its name. Raises KubeError."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        try:
            await self._request("DELETE", self.path(kind, namespace, name), body=body)
        except KubeError as error:
            if error.status in (404, 409):
                return False
            raise
        return True

    async def _request(
        self,
        method: str,
        path: str,
        *,
        body: Object | None = None,
        query: list[tuple[str, str]] | None = None,
        content_type: str = "application/json",
    ) -> Any:
        request = await self._api.param_serialize(
            method,
            path,
            query_params=query or [],
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            response = await self._api.call_api(*request, _request_timeout=REQUEST_TIMEOUT_S)
            data = await response.read()
        except client.ApiException as error:
            raise _kube_error(error.status or 0, error.body or error.reason) from error
        except aiohttp.ClientError as error:
            raise ConnectionError(f"{method} {path}: {error or type(error).__name__}") from error
        if not 200 <= response.status <= 299:
            raise _kube_error(response.status, data)
        try:
            return json.loads(data)
        except ValueError as error:  # a proxy's page, say, while the server is away
            raise ConnectionError(f"{method} {path}: the answer is not JSON: {error}") from error


def _kube_error(status: int, body: Any) -> KubeError:
    """From a metav1.Status where the server sent one, else from whatever it sent."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body)
    try:
        answer = json.loads(text)
        return KubeError(status, answer.get("reason") or "", answer.get("message") or text)
    except (ValueError, AttributeError):
        return KubeError(status, "", text or f"HTTP {status}")


@asynccontextmanager
async def connect(kubeconfig: str | None) -> AsyncIterator[tuple[Kube, client.Configuration]]:
    """A connection by `kubeconfig`, or by the pod's service account if None.

    Raises:
        config.ConfigException: neither is usable.
    """
    configuration = client.Configuration()
    if kubeconfig is not None:
        await config.load_kube_config(kubeconfig, client_configuration=configuration)
    else:
        config.load_incluster_config(client_configuration=configuration)
    async with client.ApiClient(configuration) as api:
        yield Kube(api), configuration
