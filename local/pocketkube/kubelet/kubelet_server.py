"""The kubelet's HTTPS server, for `kubectl logs`, `exec`, `attach`, `port-forward` and `top`.

The API server connects clients with this server. The paths and parameters are those of a kubelet.
The API server must present a client certificate that the cluster's authority has signed.
"""

from __future__ import annotations

import ssl
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from aiohttp import web

from pocketkube.certificates import create_certificates
from pocketkube.containers.container_log import stream_log
from pocketkube.containers.exec_process import ExecStreams
from pocketkube.kubelet import port_forward, remote_command
from pocketkube.kubelet.pod_worker import PodWorker
from pocketkube.kubelet.stats_summary import measure
from pocketkube.timestamps import parse_time
from pocketkube.websockets import accept


class KubeletServer:
    """Serves logs and the usage of containers, runs commands in them, and forwards ports of pods.

    Args:
        workers: pod uid -> PodWorker. The caller adds and removes workers while the server runs.
        client_authority: certificate, in PEM, of the authority that signs clients' certificates.
    """

    def __init__(
        self, node_name: str, workers: Mapping[str, PodWorker], client_authority: bytes
    ) -> None:
        self._node_name = node_name
        self._workers = workers
        self._client_authority = client_authority
        app = web.Application()
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._logs)
        app.router.add_get("/exec/{namespace}/{pod}/{container}", self._exec)
        app.router.add_get("/attach/{namespace}/{pod}/{container}", self._attach)
        app.router.add_get("/portForward/{namespace}/{pod}", self._port_forward)
        app.router.add_get("/stats/summary", self._stats)
        # A disconnect cancels the handler. Without this, a handler that follows a log
        # would wait for the container's next line.
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0
        )

    async def start(self, address: str) -> int:
        """Listen on a free port of `address`, and return the port."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, address, 0, ssl_context=self._tls_context(address))
        await site.start()
        return self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close the server and its connections."""
        await self._runner.cleanup()

    def _tls_context(self, address: str) -> ssl.SSLContext:
        """Create a TLS context with a new certificate for `address`.

        An API server accepts the certificate unless `--kubelet-certificate-authority` is set.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self._client_authority.decode())
        # The ssl module loads from files only.
        with tempfile.TemporaryDirectory() as folder:
            files = create_certificates(Path(folder), [address])
            context.load_cert_chain(files.certificate, files.key)
        return context

    def _worker(self, request: web.Request) -> PodWorker:
        names = request.match_info
        matches = [
            worker
            for worker in self._workers.values()
            if worker.pod["metadata"]["namespace"] == names["namespace"]
            and worker.pod["metadata"]["name"] == names["pod"]
        ]
        if not matches:
            raise web.HTTPNotFound(
                text=f"pod {names['namespace']}/{names['pod']} is not on this node\n"
            )
        return matches[-1]

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        worker, query = self._worker(request), request.query
        argv = query.getall("command", [])
        if not argv:
            raise web.HTTPBadRequest(text="the query has no command\n")
        # A terminal has no stderr.
        tty = _flag(query, "tty")
        streams = ExecStreams(
            stdin=_flag(query, "input"),
            stdout=_flag(query, "output"),
            stderr=_flag(query, "error") and not tty,
            tty=tty,
        )
        runner = worker.runners.get(request.match_info["container"])
        socket = await accept(request, remote_command.PROTOCOLS)
        container = runner.process if runner is not None else None
        await remote_command.run_command(socket, container, argv, streams)
        return socket

    async def _attach(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["container"]
        found = self._worker(request).log(name, previous=False)
        if found is None:
            raise web.HTTPBadRequest(text=f"container {name!r} has not started\n")
        path, live = found
        socket = await accept(request, remote_command.PROTOCOLS)
        await remote_command.attach(socket, stream_log(path, live, follow=True, tail=0))
        return socket

    async def _port_forward(self, request: web.Request) -> web.StreamResponse:
        worker = self._worker(request)
        try:
            ports = [int(port) for port in request.query.getall("port", [])]
        except ValueError as error:
            raise web.HTTPBadRequest(text=f"bad query {request.query_string!r}\n") from error
        if not (address := worker.runtime.pod_ip):
            raise web.HTTPBadRequest(text="the pod has no address yet\n")
        socket = await accept(request, port_forward.PROTOCOLS)
        await port_forward.forward_ports(socket, address, ports)
        return socket

    async def _stats(self, request: web.Request) -> web.Response:
        return web.json_response(await measure(self._node_name, self._workers.values()))

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        worker, names = self._worker(request), request.match_info
        query = request.query
        try:
            tail = int(query["tailLines"]) if "tailLines" in query else None
            limit = int(query["limitBytes"]) if "limitBytes" in query else None
            since = _since(query)
        except ValueError as error:
            raise web.HTTPBadRequest(
                text=f"bad query {request.query_string!r}: {error}\n"
            ) from error
        previous = _flag(query, "previous")
        found = worker.log(names["container"], previous=previous)
        if found is None:
            which = "previous terminated container" if previous else "container"
            raise web.HTTPBadRequest(
                text=(
                    f"{which} {names['container']!r} in pod {names['pod']!r} "
                    "not found or not started\n"
                )
            )
        path, live = found
        response = web.StreamResponse(headers={"Content-Type": "text/plain; charset=utf-8"})
        await response.prepare(request)
        chunks = stream_log(
            path,
            live,
            follow=_flag(query, "follow"),
            tail=tail,
            since=since,
            timestamps=_flag(query, "timestamps"),
            limit_bytes=limit,
        )
        async for chunk in chunks:
            await response.write(chunk)
        await response.write_eof()
        return response


def _flag(query: Mapping[str, str], name: str) -> bool:
    return query.get(name, "").lower() in ("true", "1")


def _since(query: Mapping[str, str]) -> datetime | None:
    if seconds := query.get("sinceSeconds"):
        return datetime.now(UTC) - timedelta(seconds=int(seconds))
    return parse_time(query.get("sinceTime"))
