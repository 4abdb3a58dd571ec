"""Serve `pods/{name}/log` by forwarding the log from the kubelet of the pod's node."""

from __future__ import annotations

import aiohttp
from aiohttp import web

from pocketkube.apiserver.errors import ApiError
from pocketkube.apiserver.objects.object_registry import Registry
from pocketkube.apiserver.resources import RequestInfo
from pocketkube.apiserver.serving.kubelet_lookup import CONNECT_S, container_of, locate

_PARAMETERS = (
    "follow",
    "previous",
    "sinceSeconds",
    "sinceTime",
    "timestamps",
    "tailLines",
    "limitBytes",
)


async def stream_logs(
    request: web.Request, info: RequestInfo, registry: Registry, session: aiohttp.ClientSession
) -> web.StreamResponse:
    """Copy the log of a container from its kubelet to the client.

    Raises:
        ApiError: the pod or the container does not exist, or the kubelet refuses the request or
            does not answer.
    """
    pod = registry.get(info)
    container = container_of(pod, request.query.get("container", ""))
    kubelet = locate(pod, registry)
    url = f"{kubelet.url}/containerLogs/{info.namespace}/{info.name}/{container}"
    parameters = {key: request.query[key] for key in _PARAMETERS if key in request.query}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    try:
        upstream = await session.get(url, params=parameters, timeout=timeout)
    except aiohttp.ClientError as error:
        raise kubelet.unreachable(error) from error
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
