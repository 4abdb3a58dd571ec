"""Serve `pods/{name}/log` by forwarding the log from the kubelet of the pod's node."""

from __future__ import annotations

import aiohttp
from aiohttp import web

from pocketkube.apiserver import errors
from pocketkube.apiserver.errors import ApiError
from pocketkube.apiserver.objects.registry import Registry
from pocketkube.apiserver.resources import Object, RequestInfo

_PARAMETERS = (
    "follow",
    "previous",
    "sinceSeconds",
    "sinceTime",
    "timestamps",
    "tailLines",
    "limitBytes",
)
_CONNECT_S = 5.0


def _kubelet(node: Object) -> str:
    """Return the base URL of a node's kubelet.

    Raises:
        ApiError: 502, the Node object has no address or port.
    """
    status = node.get("status") or {}
    address = next(
        (a["address"] for a in status.get("addresses") or () if a["type"] == "InternalIP"), None
    )
    port = ((status.get("daemonEndpoints") or {}).get("kubeletEndpoint") or {}).get("Port")
    if not address or not port:
        name = node["metadata"]["name"]
        raise ApiError(
            502,
            "BadGateway",
            f"node {name} reports no InternalIP or kubelet port; is its kubelet running?",
        )
    return f"https://{address}:{port}"


def _container(pod: Object, asked: str) -> str:
    name = pod["metadata"]["name"]
    spec = pod["spec"]
    names = [c["name"] for group in ("initContainers", "containers") for c in spec.get(group) or ()]
    if asked:
        if asked not in names:
            raise errors.bad_request(f"container {asked} is not valid for pod {name}")
        return asked
    main = [container["name"] for container in spec["containers"]]
    if len(main) > 1:
        raise errors.bad_request(
            f"a container name must be specified for pod {name}, choose one of: [{' '.join(main)}]"
        )
    return str(main[0])


async def stream_logs(
    request: web.Request, info: RequestInfo, registry: Registry, session: aiohttp.ClientSession
) -> web.StreamResponse:
    pod = registry.get(info)
    container = _container(pod, request.query.get("container", ""))
    node_name = pod["spec"].get("nodeName")
    if not node_name:
        raise errors.bad_request(f"pod {info.name} does not have a host assigned")
    nodes = registry.catalog.builtin("nodes")
    kubelet = _kubelet(registry.get(RequestInfo(nodes, name=node_name)))
    url = f"{kubelet}/containerLogs/{info.namespace}/{info.name}/{container}"
    parameters = {key: request.query[key] for key in _PARAMETERS if key in request.query}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
    try:
        upstream = await session.get(url, params=parameters, ssl=False, timeout=timeout)
    except aiohttp.ClientError as error:
        raise ApiError(
            502, "BadGateway", f"cannot reach the kubelet of node {node_name}: {error}"
        ) from error
    async with upstream:
        if upstream.status != 200:
            raise ApiError(
                upstream.status,
                "KubeletError",
                (await upstream.text()).strip() or str(upstream.reason),
            )
        response = web.StreamResponse(
            headers={"Content-Type": upstream.headers.get("Content-Type", "text/plain")}
        )
        await response.prepare(request)
        try:
            async for chunk in upstream.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
        except (ConnectionError, aiohttp.ClientError):
            pass  # the client or the kubelet has closed its connection
    return response
