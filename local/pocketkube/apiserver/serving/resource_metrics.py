"""Serve metrics.k8s.io for `kubectl top`, as metrics-server does in a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import aiohttp

from pocketkube.apiserver import errors
from pocketkube.apiserver.errors import ApiError
from pocketkube.apiserver.objects.object_registry import Registry
from pocketkube.apiserver.resources import NODE_METRICS, Object, RequestInfo, Resource
from pocketkube.apiserver.serving.kubelet_lookup import CONNECT_S, kubelet_url
from pocketkube.apiserver.serving.request_parsing import parse_selectors

#: Maximum time in which a kubelet measures and responds.
_TIMEOUT_S = 20.0
#: Time over which kubelets measure the CPU usage.
_WINDOW = "1s"


async def read_metrics(
    info: RequestInfo, query: Mapping[str, str], registry: Registry, session: aiohttp.ClientSession
) -> Object:
    """Return the metrics of the node or pod that `info` names, or a list if it names none.

    The list omits nodes whose kubelet does not answer, and pods without a running container.

    Raises:
        ApiError: 404, there are no metrics of the named object; 400, a selector is invalid.
    """
    # Metrics have the names, namespaces and labels of their nodes or pods.
    core = RequestInfo(registry.catalog.builtin(info.resource.plural), info.namespace, info.name)
    matches = parse_selectors(core, query)
    nodes = registry.store.list("nodes")
    found = await asyncio.gather(*(_summary(node, session) for node in nodes))
    summaries = [summary for summary in found if summary is not None]
    if info.resource is NODE_METRICS:
        measured = {("", each["node"]["nodeName"]): _node(each["node"]) for each in summaries}
    else:
        measured = {_key(pod["podRef"]): _pod(pod) for each in summaries for pod in each["pods"]}
    items = [
        _metrics(info.resource, obj["metadata"], measured[_key(obj["metadata"])])
        for obj in registry.store.list(core.resource.storage_key, info.namespace, matches)
        if _key(obj["metadata"]) in measured
    ]
    if not info.name:
        kind, version = info.resource.list_kind_name, info.resource.api_version
        return {"kind": kind, "apiVersion": version, "metadata": {}, "items": items}
    if not items:
        raise errors.not_found(info.resource, info.name)
    return items[0]


async def _summary(node: Object, session: aiohttp.ClientSession) -> Object | None:
    """Return `/stats/summary` from the node's kubelet; None if the request fails."""
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S, sock_connect=CONNECT_S)
    try:
        url = f"{kubelet_url(node)}/stats/summary"
        async with session.get(url, timeout=timeout) as response:
            return await response.json() if response.status == 200 else None
    except (ApiError, aiohttp.ClientError, TimeoutError):
        return None


def _key(reference: Object) -> tuple[str, str]:
    return reference.get("namespace", ""), reference["name"]


def _usage(measured: Object) -> Object:
    return {
        "cpu": f"{measured['cpu']['usageNanoCores']}n",
        "memory": f"{measured['memory']['workingSetBytes'] // 1024}Ki",
    }


def _node(measured: Object) -> Object:
    return {"timestamp": measured["cpu"]["time"], "usage": _usage(measured)}


def _pod(measured: Object) -> Object:
    containers = [{"name": each["name"], "usage": _usage(each)} for each in measured["containers"]]
    return {"timestamp": measured["containers"][0]["cpu"]["time"], "containers": containers}


def _metrics(resource: Resource, metadata: Object, measured: Object) -> Object:
    kept = {key: metadata[key] for key in ("name", "namespace", "labels") if key in metadata}
    return {
        "kind": resource.kind,
        "apiVersion": resource.api_version,
        "metadata": {**kept, "creationTimestamp": measured["timestamp"]},
        "window": _WINDOW,
        **measured,
    }
