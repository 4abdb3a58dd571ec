"""Serve `exec`, `attach` and `portforward` of pods.

The module connects the client's WebSocket with a WebSocket of the pod's kubelet.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlencode

import aiohttp
from aiohttp import web

from pocketkube.apiserver import errors
from pocketkube.apiserver.errors import ApiError
from pocketkube.apiserver.objects.object_registry import Registry
from pocketkube.apiserver.resources import Object, RequestInfo
from pocketkube.apiserver.serving.kubelet_lookup import container_of, locate
from pocketkube.websockets import create_socket, run_until_closed

#: The subresources that this module serves.
STREAMS = ("exec", "attach", "portforward")
#: Parameter of a client -> parameter of the kubelet.
_FLAGS = {"stdin": "input", "stdout": "output", "stderr": "error", "tty": "tty"}
#: Maximum wait for the kubelet's answer to a close message. aiohttp's own timeout restarts at each
#: other message of the kubelet.
_CLOSE_S = 1.0

_Socket = web.WebSocketResponse | aiohttp.ClientWebSocketResponse


async def stream_pod(
    request: web.Request, info: RequestInfo, registry: Registry, session: aiohttp.ClientSession
) -> web.StreamResponse:
    """Serve exec, attach or port-forward: copy messages between the client and the kubelet.

    The copying ends when the client or the kubelet closes its WebSocket.

    Raises:
        ApiError: the request is invalid, or the kubelet refuses the request or does not answer.
    """
    pod = registry.get(info)
    path = _kubelet_path(request, info, pod)
    kubelet = locate(pod, registry)
    offered = request.headers.get("Sec-WebSocket-Protocol", "").split(",")
    protocols = [protocol.strip() for protocol in offered]
    if not web.WebSocketResponse(protocols=protocols).can_prepare(request).ok:
        raise errors.bad_request(
            "Upgrade request required: use a WebSocket, as kubectl does from 1.31 on"
        )
    try:
        upstream = await session.ws_connect(
            kubelet.url + path,
            protocols=protocols,
            max_msg_size=0,
        )
    except aiohttp.WSServerHandshakeError as error:
        message = f"the kubelet of node {kubelet.node} refuses {path} with HTTP {error.status}"
        raise ApiError(error.status, "KubeletError", message) from error
    except aiohttp.ClientError as error:
        raise kubelet.unreachable(error) from error
    async with _closing(upstream):
        client = create_socket([upstream.protocol or ""])
        await client.prepare(request)
        await run_until_closed(client, _copy(client, upstream), _copy(upstream, client))
        await client.close(code=upstream.close_code or aiohttp.WSCloseCode.OK)
    return client


def _kubelet_path(request: web.Request, info: RequestInfo, pod: Object) -> str:
    """Return the path and the query of the request to the kubelet.

    Raises:
        ApiError: 400, an exec request has no command, or the container or a port is invalid.
    """
    query, where = request.query, f"{info.namespace}/{info.name}"
    if info.subresource == "portforward":
        given = ",".join(query.getall("ports", []))
        ports = given.split(",") if given else []
        for port in ports:
            if not (port.isdecimal() and 0 < int(port) < 65536):
                raise errors.bad_request(f"ports: {port!r} is not a port")
        return f"/portForward/{where}?{urlencode([('port', port) for port in ports])}"
    words = query.getall("command", []) if info.subresource == "exec" else []
    if info.subresource == "exec" and not words:
        raise errors.bad_request("you must specify at least 1 command for the container")
    parameters = [
        *(("command", word) for word in words),
        *((theirs, "1") for ours, theirs in _FLAGS.items() if query.get(ours) in ("1", "true")),
    ]
    container = container_of(pod, query.get("container", ""))
    return f"/{info.subresource}/{where}/{container}?{urlencode(parameters)}"


async def _copy(source: _Socket, sink: _Socket) -> None:
    with contextlib.suppress(ConnectionError):  # the sink has closed
        async for message in source:
            if message.type is aiohttp.WSMsgType.BINARY:
                await sink.send_bytes(message.data)
            elif message.type is aiohttp.WSMsgType.TEXT:
                await sink.send_str(message.data)


@contextlib.asynccontextmanager
async def _closing(upstream: aiohttp.ClientWebSocketResponse) -> AsyncIterator[None]:
    """Close `upstream`, the WebSocket to the kubelet, at the end of the `with` block.

    Wait at most `_CLOSE_S` for the kubelet's response.
    """
    try:
        yield
    finally:
        with contextlib.suppress(TimeoutError):  # the timeout also closes the connection
            async with asyncio.timeout(_CLOSE_S):
                await upstream.close()
