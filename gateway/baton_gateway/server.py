"""The HTTP server: routes, error bodies, metrics per endpoint, and the way down on SIGTERM."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from baton_gateway.access import CLIENT, OPEN_PATHS, ApiKeys, client_name
from baton_gateway.admission import Admission
from baton_gateway.bodies import MAX_BODY_BYTES
from baton_gateway.connections import listen, stop_listening
from baton_gateway.departure import Departure
from baton_gateway.discovery import Discovery
from baton_gateway.dispatch import PREFILL_TIMEOUT_S, Dispatcher
from baton_gateway.errors import APIError, bad_request, internal, unavailable, unknown_model
from baton_gateway.generation import GenerationService
from baton_gateway.handlers import (
    CLIENT_CLOSED_REQUEST,
    FINAL_STATUS,
    ChatEndpoint,
    CompletionEndpoint,
)
from baton_gateway.holding import HoldingRoom
from baton_gateway.metrics import GatewayMetrics
from baton_gateway.placer import Placer
from baton_gateway.pool import MAX_BACKOFF_S, EnginePool
from baton_gateway.text_endpoints import TextEndpoints
from baton_gateway.tls import ServerCertificate
from baton_protocol.config import GatewayConfig, container_path
from baton_protocol.service_key import ServiceKey
from baton_text.errors import RequestError
from baton_text.responses import Model, ModelList
from baton_text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

ACCESS_POLL_S = 1.0
"""Files of keys and certificates are looked at so often."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gateway:
    """One gateway process.

    Args:
        config: ports, limits and timeouts.
        tokenizer: of the served checkpoint.
        discovery: where the engines are.

    Raises:
        OSError: API keys or a certificate were asked for, but cannot be read.
        ServiceKeyError: the engines' key cannot be read.
    """

    def __init__(
        self,
        config: GatewayConfig,
        tokenizer: Tokenizer,
        discovery: Discovery,
        *,
        prefill_timeout_s: float = PREFILL_TIMEOUT_S,
        max_backoff_s: float = MAX_BACKOFF_S,
    ) -> None:
        self.config = config
        self.served_name = served_name(config)
        self.metrics = GatewayMetrics()
        self.pool = EnginePool(
            discovery,
            self.metrics,
            service_key=ServiceKey.load(config.service_key_file),
            heartbeat_interval_s=config.heartbeat_interval_s,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            max_backoff_s=max_backoff_s,
        )
        access = config.access
        self._keys = ApiKeys(container_path(access.api_keys_dir)) if access.api_keys_dir else None
        self._certificate = (
            ServerCertificate(container_path(access.tls_dir)) if access.tls_dir else None
        )
        self._admission = Admission(
            config.max_concurrent_requests,
            self.metrics,
            client_limit=access.max_concurrent_per_client,
        )
        self._departure = Departure(self._admission, config.drain_quiet_s)
        self._room = HoldingRoom(
            self.pool, self.metrics, hold_s=config.hold_s, limit=config.max_held_requests
        )
        dispatcher = Dispatcher(
            self.pool,
            Placer(self.pool, queue_wait_s=config.queue_wait_s, resume_wait_s=config.resume_wait_s),
            self.metrics,
            prefill_threshold_tokens=config.prefill_threshold_tokens,
            prefill_timeout_s=prefill_timeout_s,
        )
        self._service = GenerationService(tokenizer, self.pool, dispatcher, self.metrics, access)
        self._text = TextEndpoints(
            tokenizer,
            self.pool,
            self._admission,
            access,
            served_name=self.served_name,
            request_timeout_s=config.request_timeout_s,
        )
        self._created = int(time.time())
        self._hurry = asyncio.Event()
        """Set: a drain ends now."""
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._pool_task: asyncio.Task[None] | None = None
        self._access_task: asyncio.Task[None] | None = None

    async def start(self, host: str) -> int:
        """Binds `host` and starts to connect to engines. Returns the port. Raises OSError if it is taken."""
        # handler_cancellation: a client that goes away cancels its handler, which aborts the work on the engines.
        self._runner = web.AppRunner(
            self._app(), handler_cancellation=True, access_log=None, shutdown_timeout=2.0
        )
        await self._runner.setup()
        context = self._certificate.context if self._certificate else None
        self._listener = await listen(self._runner, host, self.config.port, context)
        self._pool_task = asyncio.create_task(self.pool.run(), name="engine pool")
        if self._keys or self._certificate:
            self._access_task = asyncio.create_task(self._follow_access(), name="access")
        port: int = self._listener.sockets[0].getsockname()[1]
        logger.info(
            "serving %s on %s://%s:%d", self.served_name, "https" if context else "http", host, port
        )
        return port

    async def leave(self) -> None:
        """Goes out of service, then closes. New requests are served until those who send them know of it, for half of
        drain_timeout_s at most."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self.config.drain_timeout_s
        quiet = asyncio.create_task(self._departure.until_quiet(self.config.drain_timeout_s / 2))
        await self._unless_hurried(quiet)
        await self.stop(max(0.0, ends_at - loop.time()))

    async def stop(self, timeout_s: float | None = None) -> None:
        """Takes no new work, lets running requests end for `timeout_s` (default: drain_timeout_s), fails the rest clearly, and
        closes."""
        self._admission.draining = True
        timeout_s = self.config.drain_timeout_s if timeout_s is None else timeout_s
        idle = asyncio.create_task(self._admission.wait_idle(timeout_s))
        await self._unless_hurried(idle)
        if idle.cancelled() or not idle.result():
            logger.warning("requests still run: ending them")
            self._service.fail_all()
            self._room.dismiss_all()
            await self._admission.wait_idle(timeout_s=2.0)
        if self._pool_task is not None:
            self._pool_task.cancel()
            await asyncio.gather(self._pool_task, return_exceptions=True)
        if self._access_task is not None:
            self._access_task.cancel()
            await asyncio.gather(self._access_task, return_exceptions=True)
        if self._listener is not None:
            await stop_listening(self._listener)
        if self._runner is not None:
            await self._runner.cleanup()

    async def _unless_hurried(self, work: asyncio.Task[Any]) -> None:
        """Until `work` is done; it is cancelled when a drain is to end now."""
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait([work, hurry], return_when=asyncio.FIRST_COMPLETED)
        for task in (work, hurry):
            task.cancel()
        await asyncio.gather(work, hurry, return_exceptions=True)

    async def serve_until_signal(self, host: str) -> None:
        """Runs until SIGTERM, then leaves, or SIGINT, then stops; another signal ends the drain. Raises RuntimeError if discovery
        ends by a bug."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        way_out = self.leave

        def on_signal(number: signal.Signals) -> None:
            nonlocal way_out
            if stop.is_set():
                self._hurry.set()
            elif number is signal.SIGINT:  # somebody sits in front of it, and no Service
                way_out = self.stop
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        await self.start(host)
        assert self._pool_task is not None
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([stopped, self._pool_task], return_when=asyncio.FIRST_COMPLETED)
        if self._pool_task.done():
            stopped.cancel()
            raise RuntimeError("the engine pool ended") from self._pool_task.exception()
        logger.info("stopping: running requests have %g s", self.config.drain_timeout_s)
        await way_out()

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._middleware], client_max_size=MAX_BODY_BYTES)
        timeout_s = self.config.request_timeout_s
        chat = ChatEndpoint(
            self._service,
            self._admission,
            self._room,
            served_name=self.served_name,
            request_timeout_s=timeout_s,
        )
        completion = CompletionEndpoint(
            self._service,
            self._admission,
            self._room,
            served_name=self.served_name,
            request_timeout_s=timeout_s,
        )
        app.on_response_prepare.append(self._departure.sign)
        app.router.add_post("/v1/chat/completions", chat.handle)
        app.router.add_post("/v1/completions", completion.handle)
        app.router.add_post("/tokenize", self._text.tokenize)
        app.router.add_post("/detokenize", self._text.detokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._model)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/version", self._version)
        return app

    @web.middleware
    async def _middleware(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Every failure becomes an OpenAI error body; every request is counted."""
        status = CLIENT_CLOSED_REQUEST
        self._departure.arrived(request.path)
        try:
            try:
                if self._keys is not None and request.path not in OPEN_PATHS:
                    request[CLIENT] = self._keys.client_of(
                        request.headers.getall("Authorization", [])
                    )
                response = await handler(request)
            except RequestError as error:
                response = _error_response(bad_request(error))
            except APIError as error:
                response = _error_response(error)
            except web.HTTPException as error:
                response = _error_response(_http_error(request, error), error)
            except Exception:
                logger.exception(
                    "%s %s%s failed", request.method, request.path, client_name(request)
                )
                response = _error_response(internal("The gateway failed; its log says why."))
            status = request.get(FINAL_STATUS, response.status)
            return response
        finally:
            resource = request.match_info.route.resource
            endpoint = "unknown" if resource is None else resource.canonical
            self.metrics.requests.labels(endpoint, str(status)).inc()
            if CLIENT in request:
                self.metrics.client_requests.labels(request[CLIENT], str(status)).inc()

    async def _follow_access(self) -> None:
        """Keys and certificates change while the gateway runs."""
        while True:
            await asyncio.sleep(ACCESS_POLL_S)
            if self._keys is not None:
                await asyncio.to_thread(self._keys.refresh)
            if self._certificate is not None:
                await asyncio.to_thread(self._certificate.refresh)

    async def _models(self, _: web.Request) -> web.Response:
        return _json(ModelList(data=[self._served_model()]))

    async def _model(self, http: web.Request) -> web.Response:
        name = http.match_info["model"]
        if name != self.served_name:
            raise unknown_model(name, self.served_name)
        return _json(self._served_model())

    def _served_model(self) -> Model:
        return Model(
            id=self.served_name, created=self._created, max_model_len=self.pool.max_model_len
        )

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _ready(self, _: web.Request) -> web.Response:
        """200 from the first decode engine on, or at once if requests are held for it. Were it withdrawn when they all go, the
        Service would have nobody left to hold requests or to answer 503 with Retry-After, and clients would see refused
        connections instead."""
        self._admission.check_draining()
        if self._departure.begun:
            raise unavailable("This gateway is leaving; another one will answer.", code="draining")
        if not (self.pool.decode_seen or self._room.is_open):
            raise unavailable("No decode engine is ready yet.", code="no_ready_engine")
        return web.Response()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self.metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": importlib.metadata.version("baton")})


def served_name(config: GatewayConfig) -> str:
    """The name clients use: as configured, else that of the model's folder."""
    return config.model.served_name or config.model.path.rstrip("/").rsplit("/", 1)[-1]


def _json(body: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _error_response(error: APIError, http_error: web.HTTPException | None = None) -> web.Response:
    headers = dict(error.headers)
    if http_error is not None and "Allow" in http_error.headers:
        headers["Allow"] = http_error.headers["Allow"]
    body = msgspec.json.encode(error.body)
    return web.Response(
        status=error.status, body=body, content_type="application/json", headers=headers
    )


def _http_error(http: web.Request, error: web.HTTPException) -> APIError:
    """aiohttp's own refusals in words."""
    if error.status == 404:
        return APIError(
            404, f"Unknown URL {http.method} {http.path}; see GET /v1/models.", code="unknown_url"
        )
    if error.status == 405:
        return APIError(405, f"{http.path} does not take {http.method}.", code="method_not_allowed")
    if error.status == 413:
        message = f"The request body is larger than {MAX_BODY_BYTES} bytes."
        return APIError(413, message, code="request_too_large")
    return APIError(error.status, error.reason)
