"""The Ingress proxy: forwards HTTP requests to Services by host and path.

Request and response bodies are streamed. The proxy writes its address into the status of the
Ingresses.
"""

from __future__ import annotations

import asyncio
import logging

import aiohttp
from aiohttp import web
from yarl import URL

from baton_kube.client import KubeClient, KubeError, Object
from baton_kube.reflector import Reflector, key_of
from pocketkube.lifecycle import wait_up_to
from pocketkube.proxy.service_proxy import CONNECT_TIMEOUT_S, RESYNC_S, ServiceProxy
from pocketkube.proxy.service_routes import Route, find_port, match_route, routes

logger = logging.getLogger(__name__)

INGRESSES = "/apis/networking.k8s.io/v1/ingresses"
#: Node annotation from which clients of the cluster read the proxy's port.
PORT_ANNOTATION = "pocketkube/ingress-port"

#: Hop-by-hop headers (RFC 9110, section 7.6.1). The proxy does not forward them.
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


class IngressProxy:
    """An HTTP server that routes requests to Services by the rules of all Ingresses."""

    def __init__(
        self,
        api: KubeClient,
        ingresses: Reflector,
        nodes: Reflector,
        services: Reflector,
        proxy: ServiceProxy,
    ) -> None:
        self._api = api
        self._ingresses = ingresses
        self._nodes = nodes
        self._services = services
        self._proxy = proxy
        self._table: list[Route] = []
        self._changed = asyncio.Event()
        self._http: aiohttp.ClientSession | None = None
        ingresses.subscribe(lambda old, new: self._changed.set())
        nodes.subscribe(lambda old, new: self._changed.set())

    async def run(self, address: str, port: int) -> None:
        """Serve on `address:port` until cancelled. With port 0, the system chooses the port.

        Raises:
            OSError: the port cannot be bound.
        """
        app = web.Application(client_max_size=0)
        app.router.add_route("*", "/{path:.*}", self._handle)
        # A disconnect cancels the handler, which closes the connection to the pod.
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0
        )
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        async with aiohttp.ClientSession(
            timeout=timeout,
            auto_decompress=False,
            # Only the client's headers are sent. aiohttp would accept encodings that the client may
            # not be able to read.
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as self._http:
            await runner.setup()
            try:
                await web.TCPSite(runner, address, port, backlog=1024).start()
                bound = runner.addresses[0][1]
                logger.info("the Ingress proxy listens on http://%s:%d", address, bound)
                await self._follow(address, bound)
            finally:
                await runner.cleanup()

    async def _follow(self, address: str, port: int) -> None:
        await self._ingresses.synced.wait()
        while True:
            self._changed.clear()
            self._table = routes(self._ingresses.objects.values())
            for ingress in list(self._ingresses.objects.values()):
                await self._write_status(ingress, address, port)
            for node in list(self._nodes.objects.values()):
                await self._annotate(node, port)
            await wait_up_to(RESYNC_S, self._changed)

    async def _write_status(self, ingress: Object, address: str, port: int) -> None:
        entries = ((ingress.get("status") or {}).get("loadBalancer") or {}).get("ingress") or []
        if [entry.get("ip") for entry in entries] == [address]:
            return
        metadata = ingress["metadata"]
        namespace = f"/apis/networking.k8s.io/v1/namespaces/{metadata['namespace']}"
        path = f"{namespace}/ingresses/{metadata['name']}/status"
        # API servers before 1.22 drop `ports`.
        entry: Object = {"ip": address, "ports": [{"port": port, "protocol": "TCP"}]}
        try:
            await self._api.merge(path, {"status": {"loadBalancer": {"ingress": [entry]}}})
        except (KubeError, OSError) as error:
            logger.warning(
                "writing the status of Ingress %s failed, trying again within %g s: %s",
                key_of(ingress),
                RESYNC_S,
                error,
            )

    async def _annotate(self, node: Object, port: int) -> None:
        if (node["metadata"].get("annotations") or {}).get(PORT_ANNOTATION) == str(port):
            return
        try:
            body = {"metadata": {"annotations": {PORT_ANNOTATION: str(port)}}}
            await self._api.merge(f"/api/v1/nodes/{node['metadata']['name']}", body)
        except (KubeError, OSError) as error:
            logger.warning(
                "annotating node %s with the Ingress port failed, trying again within %g s: %s",
                key_of(node),
                RESYNC_S,
                error,
            )

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        host = request.host.rsplit(":", 1)[0]
        backend = match_route(self._table, host, request.path)
        if backend is None:
            raise web.HTTPNotFound(
                text=f"no Ingress has a rule for host {host!r} and path {request.path!r}\n"
            )
        service = self._services.objects.get(f"{backend.namespace}/{backend.service}")
        port = find_port(service, backend.port) if service is not None else None
        if service is None or port is None:
            text = f"service {backend.namespace}/{backend.service} has no port {backend.port!r}\n"
            raise web.HTTPServiceUnavailable(text=text, headers={"Retry-After": "1"})
        scheme = "https" if port.get("name") == "https" else "http"
        for pod_host, pod_port in self._proxy.candidates(service, port):
            try:
                return await self._forward(
                    request, f"{scheme}://{pod_host}:{pod_port}{request.raw_path}"
                )
            except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
                # No byte was sent, so the next endpoint can serve the request.
                logger.info(
                    "Service %s: a pod does not answer, trying the next one: %s",
                    key_of(service),
                    error,
                )
            except aiohttp.ClientError as error:
                raise web.HTTPBadGateway(text=f"{pod_host}:{pod_port}: {error!r}\n") from error
        text = f"no pod of service {backend.namespace}/{backend.service} is ready\n"
        raise web.HTTPServiceUnavailable(text=text, headers={"Retry-After": "1"})

    async def _forward(self, request: web.Request, url: str) -> web.StreamResponse:
        assert self._http is not None
        # The body is passed as a stream, which is unread if a connection fails.
        body = request.content if request.can_read_body else None
        async with self._http.request(
            request.method,
            URL(url, encoded=True),
            headers=_request_headers(request),
            data=body,
            allow_redirects=False,
            ssl=False,  # certificates do not have pods' addresses
        ) as upstream:
            response = web.StreamResponse(status=upstream.status, reason=upstream.reason)
            for name, value in upstream.headers.items():
                if name.lower() not in HOP_BY_HOP:
                    response.headers.add(name, value)
            await response.prepare(request)
            try:
                async for chunk in upstream.content.iter_any():
                    await response.write(chunk)
            except aiohttp.ClientError as error:
                # The status has been sent. An incomplete message is the only way to report the
                # failure.
                logger.warning(
                    "the response of %s was cut off, closing the client's connection: %r",
                    url,
                    error,
                )
                if request.transport is not None:
                    request.transport.close()
                return response
            await response.write_eof()
            return response


def _request_headers(request: web.Request) -> list[tuple[str, str]]:
    peer = request.remote or ""
    before = request.headers.get("X-Forwarded-For")
    dropped = HOP_BY_HOP | {"x-forwarded-for"}
    return [
        *((name, value) for name, value in request.headers.items() if name.lower() not in dropped),
        ("X-Forwarded-For", f"{before}, {peer}" if before else peer),
        ("X-Forwarded-Host", request.host),
        ("X-Forwarded-Proto", request.scheme),
    ]
