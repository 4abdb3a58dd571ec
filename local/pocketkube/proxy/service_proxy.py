"""The Service proxy: one TCP listener per clusterIP and port of the Services.

Each connection is forwarded to a ready pod, chosen round robin.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging

from baton_kube.client import Object
from baton_kube.reflector import Reflector, key_of
from pocketkube.event_recorder import EventRecorder
from pocketkube.lifecycle import wait_up_to
from pocketkube.loopback import LoopbackAddresses, served_port
from pocketkube.proxy.service_routes import Endpoint, endpoints

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2.0  # after this time, the next pod is tried
RESYNC_S = 15.0  # longest wait before a failed step is tried again
_CHUNK = 65536


class ServiceProxy:
    """Opens and closes listeners as Services change, and forwards connections to pods."""

    def __init__(
        self,
        services: Reflector,
        pods: Reflector,
        events: EventRecorder,
        loopback: LoopbackAddresses,
    ) -> None:
        self._services = services
        self._pods = pods
        self._events = events
        self._loopback = loopback
        self._listeners: dict[Endpoint, asyncio.Server] = {}
        self._connections: dict[asyncio.Task[None], Endpoint] = {}
        self._turn = itertools.count()
        self._changed = asyncio.Event()
        services.subscribe(lambda old, new: self._changed.set())

    async def run(self) -> None:
        """Keep the listeners up to date until cancelled, then close listeners and connections."""
        await self._services.synced.wait()
        await self._pods.synced.wait()
        try:
            while True:
                self._changed.clear()
                await self._reconcile()
                # After the timeout, ports that were in use are tried again.
                await wait_up_to(RESYNC_S, self._changed)
        finally:
            for server in self._listeners.values():
                server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            self._loopback.remove_all()

    def candidates(self, service: Object, port: Object) -> list[Endpoint]:
        """Return the endpoints of a Service's port, in the order in which to try them.

        The order starts one endpoint later with each call for any Service (round robin).
        """
        found = endpoints(service, port, self._pods.objects.values())
        if not found:
            return []
        start = next(self._turn) % len(found)
        return found[start:] + found[:start]

    async def _reconcile(self) -> None:
        wanted: dict[Endpoint, Object] = {}
        for service in self._services.objects.values():
            address = service["spec"].get("clusterIP")
            if not address or address == "None" or not service["spec"].get("selector"):
                continue
            for port in service["spec"].get("ports") or []:
                if (port.get("protocol") or "TCP") == "TCP":
                    wanted[(address, port["port"])] = service
                else:
                    message = f"port {port['port']}/{port['protocol']} is not proxied; use TCP"
                    self._events.record(service, "Service", "UnsupportedProtocol", message)
        for endpoint in self._listeners.keys() - wanted.keys():
            # Open connections continue until one side ends them.
            await _stop_listening(self._listeners.pop(endpoint))
        # The address of a deleted Service stays until its connections are closed.
        addresses = {address for address, _ in [*wanted, *self._connections.values()]}
        for endpoint, service in wanted.items():
            if endpoint not in self._listeners:
                await self._listen(endpoint, service)
        self._loopback.keep_only(addresses)

    async def _listen(self, endpoint: Endpoint, service: Object) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._connections[task] = endpoint
            try:
                await self._forward(endpoint, reader, writer)
            finally:
                del self._connections[task]
                writer.close()
                if endpoint not in self._listeners:
                    self._changed.set()

        try:
            self._loopback.add(endpoint[0])
            address, port = endpoint[0], served_port(endpoint[1])
            self._listeners[endpoint] = await asyncio.start_server(
                accept, address, port, backlog=1024
            )
            if port != endpoint[1]:
                message = f"the proxy may not bind {address}:{endpoint[1]}; use port {port} instead"
                self._events.record(service, "Service", "PortMoved", message)
        except OSError as error:
            message = f"cannot listen on {endpoint[0]}:{endpoint[1]}: {error}"
            self._events.record(service, "Service", "BindFailed", message)
            logger.warning("Service %s: %s", key_of(service), message)

    async def _forward(
        self, listener: Endpoint, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        found = self._port_of(listener)
        if found is None:
            return
        service, port = found
        for host, number in self.candidates(service, port):
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    upstream = await asyncio.open_connection(host, number)
            except (OSError, TimeoutError) as error:
                logger.info(
                    "Service %s: pod %s:%d does not answer, trying the next one: %r",
                    key_of(service),
                    host,
                    number,
                    error,
                )
                continue
            await _splice((reader, writer), upstream)
            return
        logger.info("Service %s: no pod answers, closing the client's connection", key_of(service))

    def _port_of(self, listener: Endpoint) -> tuple[Object, Object] | None:
        """Return a listener's Service and `spec.ports` entry; None if either was deleted."""
        for service in self._services.objects.values():
            if service["spec"].get("clusterIP") == listener[0]:
                for port in service["spec"].get("ports") or []:
                    if port["port"] == listener[1]:
                        return service, port
        return None


async def _stop_listening(listener: asyncio.Server) -> None:
    """Close `listener`, but first let asyncio set up the connections that it already accepted.

    Otherwise, asyncio would leave such a connection open without serving the client.
    """
    try:
        loop = asyncio.get_running_loop()
        for socket in listener.sockets:
            loop.remove_reader(socket.fileno())
        await asyncio.sleep(0)
    finally:
        listener.close()


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _splice(client: Stream, upstream: Stream) -> None:
    """Copy bytes between `client` and `upstream` in both directions.

    The end of a stream is passed on to the other side. An error ends both directions.
    """
    ways = [
        asyncio.ensure_future(_copy(client[0], upstream[1])),
        asyncio.ensure_future(_copy(upstream[0], client[1])),
    ]
    try:
        done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
        for way in done:
            with contextlib.suppress(OSError):
                way.result()
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        upstream[1].close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
