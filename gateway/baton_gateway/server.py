"""One gateway process: builds its components, serves until a signal, shuts down gracefully."""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl

from aiohttp import web

from baton_gateway.access.api_keys import ApiKeys
from baton_gateway.components import build_applications
from baton_gateway.endpoints.request_services import RequestServices, served_name
from baton_gateway.http.connections import (
    Connections,
    bounded_by_resources,
    connection_limit,
)
from baton_gateway.http.cors import CORS
from baton_gateway.http.listener import listen, stop_listening
from baton_gateway.http.tls import ServerCertificate
from baton_gateway.metrics import GatewayMetrics
from baton_gateway.routing.discovery import Discovery
from baton_gateway.routing.engine_pool import EnginePool
from baton_protocol.options.config import GatewayConfig, container_path
from baton_protocol.service_key import ServiceKey
from baton_text.generation_defaults import GenerationDefaults
from baton_text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

#: Interval at which changed API keys and certificates are read.
SECRETS_POLL_S = 1.0
#: Limit on the connections to the port of the metrics. It is high, because a burst of connections
#: must not evict a probe.
METRICS_CONNECTIONS = 1024


class Gateway:
    """One gateway process.

    Args:
        config: ports, limits and timeouts.
        tokenizer: the tokenizer of the served checkpoint.
        discovery: yields the engines.
        defaults: the model's sampling parameters for fields that requests leave out.

    Raises:
        OSError: API keys or a certificate are configured but cannot be read.
        ServiceKeyError: the service key cannot be read.
    """

    def __init__(
        self,
        config: GatewayConfig,
        tokenizer: Tokenizer,
        discovery: Discovery,
        defaults: GenerationDefaults,
    ) -> None:
        self.config = config
        self.metrics = GatewayMetrics()
        service_key = ServiceKey.load(config.service_key_file)
        self.pool = EnginePool(
            discovery,
            self.metrics,
            service_key=service_key,
            heartbeat_interval_s=config.heartbeat_interval_s,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            stall_timeout_s=config.stall_timeout_s,
        )
        services = RequestServices(config, self.metrics, self.pool)
        self.admission = services.admission
        access = config.access
        self._keys = ApiKeys(container_path(access.api_keys_dir)) if access.api_keys_dir else None
        self._certificate = (
            ServerCertificate(container_path(access.tls_dir)) if access.tls_dir else None
        )
        self._cors = CORS(access.allowed_origins)
        limit = connection_limit(config.max_connections, config.max_concurrent_requests)
        self._connections = Connections(limit, self.metrics)
        self.metrics.connections.set_function(lambda: self._connections.num_open)
        self.app, self.metrics_app, self._shutdown = build_applications(
            services, service_key, tokenizer, defaults, self._keys, self._cors
        )
        #: Port of the metrics, from `start` on.
        self.metrics_port = 0
        self._servers: list[tuple[web.AppRunner, asyncio.Server]] = []
        self._pool_task: asyncio.Task[None] | None = None
        self._secrets_task: asyncio.Task[None] | None = None

    async def start(self, host: str) -> int:
        """Start the HTTP servers, and begin to connect to engines.

        Args:
            host: address to bind, also for the metrics unless metrics_host is set.

        Returns:
            The port for clients.

        Raises:
            OSError: the port is in use.
        """
        context = self._certificate.context if self._certificate else None
        # Bind the port of the metrics first. If it is in use, the port for clients never opens.
        self.metrics_port = await self._listen(
            self.metrics_app,
            self.config.metrics_host or host,
            self.config.metrics_port,
            None,
            Connections(bounded_by_resources(METRICS_CONNECTIONS, 8), self.metrics),
        )
        port = await self._listen(self.app, host, self.config.port, context, self._connections)
        self._pool_task = asyncio.create_task(self.pool.run(), name="engine pool")
        if self._keys or self._certificate:
            self._secrets_task = asyncio.create_task(self._refresh_secrets(), name="secrets")
        logger.info(
            "the gateway serves %s on %s://%s:%d, and metrics on port %d",
            served_name(self.config),
            "https" if context else "http",
            host,
            port,
            self.metrics_port,
        )
        return port

    async def _listen(
        self,
        app: web.Application,
        host: str,
        port: int,
        context: ssl.SSLContext | None,
        connections: Connections,
    ) -> int:
        """Serve `app`, and return the port.

        When a client disconnects, aiohttp cancels the handler of its request
        (`handler_cancellation`). The cancelled handler aborts the requests on the engines
        (`Dispatcher._attempt`), even if its response is not streamed.

        Raises:
            OSError: the port is in use.
        """
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=2.0
        )
        await runner.setup()
        listener = await listen(runner, host, port, context, connections, self._cors)
        self._servers.append((runner, listener))
        bound: int = listener.sockets[0].getsockname()[1]
        return bound

    async def shut_down(self) -> None:
        """Shut down gracefully: serve until clients have moved to other gateways, then stop.

        The wait for clients takes at most half of drain_timeout_s.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self.config.drain_timeout_s
        await self._shutdown.wait_quiet(self.config.drain_timeout_s / 2)
        await self.stop(max(0.0, ends_at - loop.time()))

    async def stop(self, timeout_s: float | None = None) -> None:
        """Refuse new requests, wait for the running requests, then close all HTTP servers.

        Requests that still run after the wait fail.

        Args:
            timeout_s: longest wait for the running requests; None for `drain_timeout_s`.
        """
        await self._shutdown.drain(self.config.drain_timeout_s if timeout_s is None else timeout_s)
        for task in (self._pool_task, self._secrets_task):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        for runner, listener in reversed(self._servers):
            await stop_listening(listener)
            await runner.cleanup()

    def end_drain(self) -> None:
        """End the graceful shutdown now. Requests that have not ended fail."""
        self._shutdown.end()

    async def serve_until_signal(self, host: str) -> None:
        """Serve until SIGTERM or SIGINT, then shut down.

        SIGTERM calls `shut_down`, SIGINT calls `stop`, and a second signal calls `end_drain`.

        Raises:
            RuntimeError: the engine pool failed, which is a bug.
        """
        signalled = asyncio.Event()
        loop = asyncio.get_running_loop()
        shut_down = self.shut_down

        def on_signal(number: signal.Signals) -> None:
            nonlocal shut_down
            if signalled.is_set():
                self.end_drain()
            elif number is signal.SIGINT:  # from a terminal, where no Service sends requests
                shut_down = self.stop
            signalled.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        await self.start(host)
        assert self._pool_task is not None
        wait = asyncio.create_task(signalled.wait())
        await asyncio.wait([wait, self._pool_task], return_when=asyncio.FIRST_COMPLETED)
        if self._pool_task.done():
            wait.cancel()
            raise RuntimeError(
                "the engine pool ended, so the gateway stops"
            ) from self._pool_task.exception()
        logger.info(
            "the gateway shuts down: running requests have %g s to end",
            self.config.drain_timeout_s,
        )
        await shut_down()

    async def _refresh_secrets(self) -> None:
        while True:
            await asyncio.sleep(SECRETS_POLL_S)
            if self._keys is not None:
                await asyncio.to_thread(self._keys.refresh)
            if self._certificate is not None:
                # On the event loop's thread, because OpenSSL changes the certificate first and then
                # the key. A handshake between the two changes would fail.
                self._certificate.refresh()
