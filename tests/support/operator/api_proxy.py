"""A proxy in front of an API server that records the requests of one client and injects faults.

For the tests of the leader election and of faults in the operator process.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import yaml
from aiohttp import web
from kubernetes.aio import client, config


@dataclass(frozen=True)
class Fault:
    """The faults of one response. Several faults may be combined."""

    #: With another status the request does not reach the API server.
    status: int = 200
    retry_after_s: int | None = None
    #: Number of bytes after which the connection is closed.
    cut_after: int | None = None
    #: Events of a watch, instead of those of the API server.
    events: bytes | None = None
    #: Number of times that each event is sent.
    repeats: int = 1
    #: Delay of each event.
    late_s: float = 0.0


@dataclass
class ApiProxy:
    """The requests that the proxy has received, and the fault of later responses."""

    kubeconfig: Path
    #: (monotonic time of arrival, method, path) of every request that is not a GET.
    writes: list[tuple[float, str, str]] = field(default_factory=list)
    reads: list[tuple[float, str]] = field(default_factory=list)
    #: (User-Agent, method) of every request.
    agents: list[tuple[str, str]] = field(default_factory=list)
    #: Returns the fault of a request, if any.
    fault: Callable[[web.Request], Fault | None] = lambda request: None

    def writes_since(self, moment: float) -> list[str]:
        return [f"{method} {path}" for at, method, path in list(self.writes) if at >= moment]


@contextmanager
def api_proxy(kubeconfig: Path, folder: Path) -> Iterator[ApiProxy]:
    """Run a proxy during the block. Clients connect to it with `proxy.kubeconfig`."""
    folder.mkdir(parents=True, exist_ok=True)
    proxy = ApiProxy(folder / "kubeconfig")
    started, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            loop.run_until_complete(_serve(kubeconfig, proxy, started, stop))
        except BaseException as error:  # raised below
            failures.append(error)
            started.set()
        finally:
            loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert started.wait(30), "the proxy does not start"
    assert not failures, failures
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)


async def _serve(
    kubeconfig: Path, proxy: ApiProxy, started: threading.Event, stop: asyncio.Event
) -> None:
    upstream = client.Configuration()
    await config.load_kube_config(str(kubeconfig), client_configuration=upstream)
    context = ssl.create_default_context(cafile=upstream.ssl_ca_cert)
    if upstream.cert_file:
        context.load_cert_chain(upstream.cert_file, upstream.key_file)
    connector = aiohttp.TCPConnector(limit=0, ssl=context)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None)
    ) as session:

        async def forward(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            if request.method == "GET":
                proxy.reads.append((time.monotonic(), str(request.rel_url)))
            else:
                proxy.writes.append((time.monotonic(), request.method, request.path))
            headers = {
                name: value
                for name, value in request.headers.items()
                if name.lower() in ("accept", "content-type", "authorization")
            }
            proxy.agents.append((request.headers.get("User-Agent", ""), request.method))
            if fault := proxy.fault(request):
                return await _fail(request, fault, session, headers, upstream.host)
            url = f"{upstream.host}{request.rel_url}"
            async with session.request(
                request.method, url, headers=headers, data=body or None
            ) as answer:
                response = web.StreamResponse(
                    status=answer.status,
                    headers={"Content-Type": answer.headers.get("Content-Type", "text/plain")},
                )
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response

        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        document = yaml.safe_load(kubeconfig.read_text())
        document["clusters"][0]["cluster"] = {
            "server": f"http://127.0.0.1:{runner.addresses[0][1]}"
        }
        proxy.kubeconfig.write_text(yaml.safe_dump(document))
        started.set()
        await stop.wait()
        await runner.cleanup()


async def _fail(
    request: web.Request,
    fault: Fault,
    session: aiohttp.ClientSession,
    headers: dict[str, str],
    host: str,
) -> web.StreamResponse:
    """Respond to a request with `fault`. The request's body is not forwarded."""
    if fault.status != 200:
        retry = {} if fault.retry_after_s is None else {"Retry-After": str(fault.retry_after_s)}
        status = {
            "kind": "Status",
            "code": fault.status,
            "message": "of the test",
            "reason": "Fault",
        }
        return web.json_response(status, status=fault.status, headers=retry)
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    sent = 0
    if fault.events is not None:
        await response.write(fault.events)
        await response.write_eof()
        return response
    async with session.get(f"{host}{request.rel_url}", headers=headers) as answer:
        async for line in answer.content:
            await asyncio.sleep(fault.late_s)
            piece = line * fault.repeats
            if fault.cut_after is not None:
                piece = piece[: fault.cut_after - sent]
            await response.write(piece)
            sent += len(piece)
            if sent == fault.cut_after:
                request.transport.close()
                return response
    await response.write_eof()
    return response
