"""The state of an LLMService, read from the API server and the service's pods."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
import yaml

from baton_kube.client import CONNECT_TIMEOUT_S, KubeClient, KubeError, Object, connect, refusal
from baton_operator import names
from baton_protocol.config import ENGINE_HTTP_PORT, GATEWAY_PORT
from baton_protocol.progress import Health
from pocketkube.containers.process import container_pids
from pocketkube.loopback import served_port

FIELD_MANAGER = "baton"
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
ENGINES_READY = "baton:engines_ready"
ACCOUNT_TOKEN_S = 365 * 86400


class UnknownKindError(Exception):
    """The API server does not serve the apiVersion and kind of an object."""


class PodStatus(msgspec.Struct):
    name: str
    role: str
    ip: str
    phase: str
    ready: bool
    restarts: int
    reason: str  # why it is not ready, as its containers report
    container_id: str = ""  # of its first container; empty before the start
    pid: int | None = None  # of the container's process, if it was looked up
    #: Bytes of KV sent and received, by transport, if the engine was asked.
    kv_bytes: dict[str, int] = {}


class Condition(msgspec.Struct):
    type: str
    status: str
    reason: str
    message: str


class ServiceStatus(msgspec.Struct):
    service: str
    namespace: str
    endpoint: str
    model: str  # name for clients
    conditions: list[Condition]
    pods: list[PodStatus]
    #: `curl` options for the Ingress; empty without one.
    ingress: str
    kubeconfig: str
    #: False if it was deleted. Only the names and the kubeconfig are set then.
    exists: bool = True

    @property
    def ready(self) -> bool:
        return any(c.type == "Ready" and c.status == "True" for c in self.conditions)


class ClusterApi:
    """The API server of a local cluster, as the commands use it. Created by `connect`.

    All methods raise KubeError if the server refuses, and OSError if it does not answer.
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
        """Apply the documents in order by server-side apply. Unknown fields are errors.

        Raises:
            UnknownKindError: the server does not serve a kind.
        """
        for document in documents:
            collection = await self._collection(document)
            path = f"{collection}/{quote(document['metadata']['name'], safe='')}"
            await self._kube.apply(path, document, field_manager=FIELD_MANAGER, strict=True)

    async def _collection(self, document: Object) -> str:
        """Return the path of the collection of `document`, by the server's discovery."""
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
        """Request a ServiceAccount token that outlives the cluster."""
        spec = {"audiences": [], "expirationSeconds": ACCOUNT_TOKEN_S}
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        answer = await self._kube.create(
            f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token", request
        )
        return str(answer["status"]["token"])

    async def supports_rules(self) -> bool:
        """Return whether schemas can have CEL rules, as in Kubernetes 1.25 and later."""
        version = await self._kube.get("/version")
        return (int(version["major"]), int(version["minor"].rstrip("+"))) >= (1, 25)

    async def crd_established(self) -> bool:
        crd = await self._kube.get(
            f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{names.PLURAL}.{names.GROUP}"
        )
        conditions = (crd.get("status") or {}).get("conditions") or []
        return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)

    async def service(self, namespace: str, name: str) -> ServiceStatus:
        """Read an LLMService and its pods."""
        service = await self._kube.get(
            f"/apis/{names.API_VERSION}/namespaces/{namespace}/{names.PLURAL}/{name}"
        )
        selector = f"{names.LABEL_SERVICE}={name}"
        pods, _ = await self._kube.list(
            f"/api/v1/namespaces/{namespace}/pods", label_selector=selector
        )
        status = service.get("status") or {}
        spec = service["spec"]
        return ServiceStatus(
            service=name,
            namespace=namespace,
            endpoint=_reachable(status.get("endpoint", "")),
            model=spec["model"].get("servedName") or name,
            ingress=await self._ingress(
                ((spec.get("gateway") or {}).get("ingress") or {}).get("host", "")
            ),
            conditions=[
                Condition(c["type"], c["status"], c.get("reason", ""), c.get("message", ""))
                for c in status.get("conditions", [])
            ],
            pods=sorted((_pod_status(pod) for pod in pods), key=lambda pod: pod.name),
            kubeconfig=str(self._kubeconfig),
        )

    async def _ingress(self, host: str) -> str:
        """Read the port of the Ingress proxy from the node's annotation."""
        if not host:
            return ""
        nodes, _ = await self._kube.list("/api/v1/nodes")
        for node in nodes:
            if port := (node["metadata"].get("annotations") or {}).get("pocketkube/ingress-port"):
                return f"-H 'Host: {host}' http://127.0.0.1:{port}"
        return ""

    async def log(
        self, namespace: str, pod: str, *, follow: bool, tail: int | None, previous: bool = False
    ) -> AsyncIterator[bytes]:
        """Stream a pod's log.

        Args:
            previous: the log of the container before its last restart.
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


def load_documents(path: Path) -> list[Object]:
    """Read the Kubernetes objects of a YAML file.

    Raises:
        ValueError: the file, and why a document is no Kubernetes object.
    """
    try:
        documents = [document for document in yaml.safe_load_all(path.read_text()) if document]
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    for document in documents:
        if complaint := _complaint(document):
            raise ValueError(f"{path}: {complaint}")
    return documents


def _complaint(document: Any) -> str:
    """Return why a document is no Kubernetes object; empty if it is one."""
    if not isinstance(document, dict) or not {"apiVersion", "kind", "metadata"} <= document.keys():
        return "every document needs apiVersion, kind and metadata"
    try:
        json.dumps(document, allow_nan=False)
    except TypeError as error:  # for example a date
        return f"{error}; write it in quotes"
    except RecursionError:
        return "nested too deeply"
    except ValueError as error:
        return "an alias refers to itself" if "Circular" in str(error) else f"not JSON: {error}"
    metadata = document["metadata"]
    if not isinstance(metadata, dict) or "name" not in metadata:
        return f"metadata must be an object with a name, got {metadata!r}"
    texts = {
        "apiVersion": document["apiVersion"],
        "kind": document["kind"],
        "metadata.name": metadata["name"],
    }
    for field, value in {**texts, "metadata.namespace": metadata.get("namespace", "")}.items():
        if not isinstance(value, str):
            return f"{field} must be a string, got {value!r}"
    if not isinstance(annotations := metadata.get("annotations") or {}, dict):
        return f"metadata.annotations must be an object, got {annotations!r}"
    return ""


def as_kubectl_applies(document: Object) -> Object:
    """Add the annotation of `kubectl apply`, which later finds fields that the user removes."""
    metadata = {"annotations": {}, **document["metadata"]}
    applied = {**document, "metadata": metadata}
    text = json.dumps(applied, sort_keys=True, separators=(",", ":")) + "\n"
    annotations = {**(metadata["annotations"] or {}), LAST_APPLIED: text}
    return {**document, "metadata": {**metadata, "annotations": annotations}}


async def gateways_see_all_engines(pods: list[PodStatus]) -> bool:
    """Return whether every gateway pod has connected to every ready engine.

    Gateways connect to an engine a moment after it is ready.
    """
    ready = {
        role: sum(pod.ready for pod in pods if pod.role == role) for role in ("prefill", "decode")
    }
    gateways = [pod for pod in pods if pod.role == "gateway" and pod.ready]
    try:
        seen = [await _metric_values(pod, ENGINES_READY) for pod in gateways]
    except (aiohttp.ClientError, TimeoutError):  # for example during a restart
        return False
    return bool(seen) and all(
        values.get(f'{{role="{role}"}}', 0.0) >= count
        for values in seen
        for role, count in ready.items()
    )


async def ask_kv_bytes(status: ServiceStatus) -> ServiceStatus:
    """Return `status` with the `kv_bytes` of the engines that answer `/health`."""
    pods = await asyncio.gather(*map(_with_kv_bytes, status.pods))
    return msgspec.structs.replace(status, pods=pods)


async def _with_kv_bytes(pod: PodStatus) -> PodStatus:
    if pod.role not in ("prefill", "decode") or not pod.ready:
        return pod
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
            session.get(f"http://{pod.ip}:{ENGINE_HTTP_PORT}/health") as response,
        ):
            health = msgspec.json.decode(await response.read(), type=Health)
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
        # It restarts, or has another release.
        return pod
    return msgspec.structs.replace(pod, kv_bytes=health.kv_bytes)


def kv_bytes_received(pods: list[PodStatus]) -> Counter[str]:
    """Sum the KV bytes that decode pods received, by transport."""
    return sum((Counter(pod.kv_bytes) for pod in pods if pod.role == "decode"), Counter[str]())


def format_kv_bytes(nbytes: Mapping[str, int]) -> str:
    """Format bytes by transport: `1.25 MiB over ucx tcp/lo, 0.50 MiB over tcp sockets`."""
    return ", ".join(
        f"{count / 2**20:.2f} MiB over {transport}" for transport, count in sorted(nbytes.items())
    )


async def _metric_values(pod: PodStatus, name: str) -> dict[str, float]:
    """Read one metric of a gateway pod, by its labels as written."""
    values = {}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
        session.get(f"http://{pod.ip}:{GATEWAY_PORT}/metrics") as response,
    ):
        for line in (await response.text()).splitlines():
            if line.startswith((f"{name} ", f"{name}{{")):
                key, value = line.rsplit(maxsplit=1)
                values[key.removeprefix(name)] = float(value)
    return values


def _reachable(endpoint: str) -> str:
    """Replace the endpoint's port by the port where the proxy serves it."""
    usual = 443 if endpoint.startswith("https:") else 80
    port = served_port(usual)
    return f"{endpoint}:{port}" if endpoint and port != usual else endpoint


def _pod_status(pod: Object) -> PodStatus:
    metadata, status = pod["metadata"], pod.get("status") or {}
    containers = status.get("containerStatuses") or []
    waiting = [(c.get("state") or {}).get("waiting") or {} for c in containers]
    ended = [(c.get("lastState") or {}).get("terminated") or {} for c in containers]
    reason = next((w["reason"] for w in waiting if w.get("reason")), "")
    messages = [t["message"].strip() for t in ended if t.get("message")]
    message = next((text.splitlines()[-1] for text in messages if text), "")
    return PodStatus(
        name=metadata["name"],
        role=(metadata.get("labels") or {}).get(names.LABEL_ROLE, ""),
        ip=status.get("podIP") or "",
        phase="Terminating" if metadata.get("deletionTimestamp") else status.get("phase") or "",
        ready=any(
            c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or []
        ),
        restarts=sum(c.get("restartCount") or 0 for c in containers),
        reason=": ".join(filter(None, (reason, message))) if reason else "",
        container_id=next((c["containerID"] for c in containers if c.get("containerID")), ""),
    )


def with_pids(status: ServiceStatus) -> ServiceStatus:
    """Return `status` with the pids of containers on this machine."""
    pids = container_pids()
    pods = [msgspec.structs.replace(pod, pid=pids.get(pod.container_id)) for pod in status.pods]
    return msgspec.structs.replace(status, pods=pods)
