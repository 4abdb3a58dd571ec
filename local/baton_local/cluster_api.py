"""A client of a local cluster's API server, for the `baton` commands."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import aiohttp

from baton_kube.client import CONNECT_TIMEOUT_S, KubeClient, KubeError, Object, connect, refusal
from baton_local.service_status import ServiceCondition, ServiceStatus, pod_status
from baton_operator import names
from pocketkube.conditions import has_condition
from pocketkube.loopback import served_port
from pocketkube.proxy.ingress_proxy import PORT_ANNOTATION

FIELD_MANAGER = "baton"
ACCOUNT_TOKEN_S = 365 * 86400


class UnknownKindError(Exception):
    """Raised when the API server does not serve the apiVersion and kind of an object."""


class ClusterApi:
    """A client of a local cluster's API server. `connect` creates it.

    All methods raise KubeError if the server refuses the request, and OSError if the server does
    not answer.
    """

    def __init__(self, kube: KubeClient, kubeconfig: Path) -> None:
        self._kube = kube
        self._kubeconfig = kubeconfig

    @staticmethod
    @asynccontextmanager
    async def connect(kubeconfig: Path) -> AsyncIterator[ClusterApi]:
        async with connect(kubeconfig) as kube:
            yield ClusterApi(kube, kubeconfig)

    async def apply(self, documents: list[Object]) -> None:
        """Create or update the objects in order, by server-side apply. Unknown fields are errors.

        Raises:
            UnknownKindError: the server does not serve the kind of an object.
        """
        for document in documents:
            collection = await self._collection(document)
            path = f"{collection}/{quote(document['metadata']['name'], safe='')}"
            await self._kube.apply(path, document, field_manager=FIELD_MANAGER, strict=True)

    async def _collection(self, document: Object) -> str:
        """Return the API path of the collection to which the object `document` belongs.

        The server's discovery API maps the object's kind to the path.
        """
        version, kind = document["apiVersion"], document["kind"]
        base = f"/apis/{version}" if "/" in version else f"/api/{version}"
        try:
            resources = (await self._kube.get(base))["resources"]
        except KubeError as error:
            if error.status != 404:
                raise
            resources = []
        for resource in resources:
            if resource["kind"] == kind and "/" not in resource["name"]:
                if resource["namespaced"]:
                    namespace = document["metadata"].get("namespace") or "default"
                    base = f"{base}/namespaces/{quote(namespace, safe='')}"
                return f"{base}/{resource['name']}"
        raise UnknownKindError(f"the API server has no {kind} in {version}")

    async def account_token(self, namespace: str, account: str) -> str:
        """Create and return a token for a ServiceAccount. The token is valid for one year."""
        spec = {"audiences": [], "expirationSeconds": ACCOUNT_TOKEN_S}
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        answer = await self._kube.create(
            f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token", request
        )
        return str(answer["status"]["token"])

    async def supports_rules(self) -> bool:
        """Return whether the server accepts CEL rules in CRDs, as Kubernetes 1.25 and later do."""
        version = await self._kube.get("/version")
        return (int(version["major"]), int(version["minor"].rstrip("+"))) >= (1, 25)

    async def crd_established(self) -> bool:
        crd = await self._kube.get(
            f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{names.PLURAL}.{names.GROUP}"
        )
        return has_condition(crd, "Established")

    async def service(self, namespace: str, name: str) -> ServiceStatus:
        """Return the status of an LLMService and its pods."""
        service = await self._kube.get(
            f"/apis/{names.API_VERSION}/namespaces/{namespace}/{names.PLURAL}/{name}"
        )
        pods, _ = await self._kube.list(
            f"/api/v1/namespaces/{namespace}/pods",
            label_selector=f"{names.LABEL_SERVICE}={name}",
        )
        spec, status = service["spec"], service.get("status") or {}
        return ServiceStatus(
            service=name,
            namespace=namespace,
            endpoint=_reachable(status.get("endpoint", "")),
            model=spec["model"].get("servedName") or name,
            ingress=await self._ingress(
                ((spec.get("gateway") or {}).get("ingress") or {}).get("host", "")
            ),
            conditions=[
                ServiceCondition(c["type"], c["status"], c.get("reason", ""), c.get("message", ""))
                for c in status.get("conditions", [])
            ],
            pods=sorted((pod_status(pod) for pod in pods), key=lambda pod: pod.name),
            kubeconfig=str(self._kubeconfig),
        )

    async def _ingress(self, host: str) -> str:
        """Return the `curl` arguments that reach `host` through the Ingress proxy.

        The proxy's port is read from an annotation of the node. The result is empty if `host` is
        empty or no proxy runs.
        """
        if not host:
            return ""
        nodes, _ = await self._kube.list("/api/v1/nodes")
        for node in nodes:
            if port := (node["metadata"].get("annotations") or {}).get(PORT_ANNOTATION):
                return f"-H 'Host: {host}' http://127.0.0.1:{port}"
        return ""

    async def log(
        self, namespace: str, pod: str, *, follow: bool, tail: int | None, previous: bool = False
    ) -> AsyncIterator[bytes]:
        """Yield a pod's log in pieces of any size.

        Args:
            follow: whether to wait for further output.
            tail: number of lines to read, from the end of the log; None: all lines.
            previous: whether to read the log of the container that ran before the latest restart.
        """
        options = {"follow": str(follow).lower(), "previous": str(previous).lower()}
        if tail is not None:
            options["tailLines"] = str(tail)
        url = f"{self._kube.server}/api/v1/namespaces/{namespace}/pods/{pod}/log"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        async with (
            self._kube.http_session() as session,
            session.get(url, params=options, timeout=timeout) as response,
        ):
            if response.status != 200:
                raise refusal(response.status, await response.read(), response.headers)
            async for chunk in response.content.iter_any():
                yield chunk


def _reachable(endpoint: str) -> str:
    """Return the URL `endpoint` with the port on which the cluster's proxy listens.

    The URL stays unchanged if the proxy listens on the URL's default port, 80 or 443.
    """
    usual = 443 if endpoint.startswith("https:") else 80
    port = served_port(usual)
    return f"{endpoint}:{port}" if endpoint and port != usual else endpoint
