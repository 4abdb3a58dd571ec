"""The engine's admin HTTP server: health, readiness, metrics, drain, pause, sleep, profiles.

The server's threads do not access the engine's state directly. If the service has a key, POST
requests need a signature with the key or the bearer token that is derived from the key.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple, Protocol
from urllib.parse import parse_qs, urlsplit

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from baton_engine.http.bounded_server import BoundedHandler, BoundedHTTPServer
from baton_engine.server.access import Access
from baton_protocol.process.health import Health
from baton_protocol.process.metrics_text import MetricsText
from baton_protocol.service_key import AdminRequest

logger = logging.getLogger(__name__)

#: Utility methods of the engine core by HTTP method. The path is /<name>, and the query holds the
#: arguments.
CALLS = {
    "GET": frozenset({"is_paused", "is_sleeping"}),
    "POST": frozenset(
        {
            "pause",
            "reset_prefix_cache",
            "resume",
            "sleep",
            "start_profile",
            "stop_profile",
            "wake_up",
        }
    ),
}


class ProbeResult(NamedTuple):
    """The engine's health or readiness, as the response to a probe of the kubelet."""

    ok: bool
    body: Health


class DrainStatus(msgspec.Struct):
    """The response to GET and POST /drain."""

    draining: bool
    #: Number of running and waiting requests, and of KV transfers that a peer still needs.
    unfinished: int


@dataclass(frozen=True, slots=True)
class AdminCallPending:
    """The result of a call that is still running. The HTTP server responds with status 202."""


class EngineAdmin(Protocol):
    """The methods of the engine process that the HTTP server's threads call."""

    def health(self) -> ProbeResult: ...

    def readiness(self) -> ProbeResult: ...

    def drain_status(self, *, start: bool) -> DrainStatus:
        """Return the state of the drain.

        Args:
            start: whether to start the drain first.

        Raises:
            TimeoutError: the engine's loop does not answer.
        """

    def run_admin_call(self, method: str, query: Mapping[str, Sequence[str]]) -> Any:
        """Run a utility method with arguments from a URL's query.

        Returns:
            The method's result, or `AdminCallPending` if the call is still running.

        Raises:
            ValueError: the arguments are wrong.
            TimeoutError: the engine's loop does not answer.
            Exception: any exception of the method.
        """


class AdminServer:
    """The admin HTTP server and its thread."""

    def __init__(
        self,
        host: str,
        port: int,
        admin: EngineAdmin,
        registry: CollectorRegistry,
        access: Access | None = None,
    ) -> None:
        """Bind the port.

        Args:
            host: address of the pod. The signature of a signed POST request must cover it.
            port: 0 selects a free port. The attribute `port` contains the bound port.
            access: checks POST requests for the key. None admits all requests.

        Raises:
            OSError: the address is in use.
        """
        self._server = _Server(host, port, _Handler)
        self._server.admin, self._server.metrics = admin, MetricsText(registry)
        self._server.access = access or Access()
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(BoundedHTTPServer):
    admin: EngineAdmin
    metrics: MetricsText
    access: Access

    def __init__(self, host: str, port: int, handler: type[BoundedHandler]) -> None:
        super().__init__(host, port, handler)
        self.host = host


class _Handler(BoundedHandler, BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self.ignore_body()
        if self.path == "/health":
            self._send_probe(self.server.admin.health())
        elif self.path == "/ready":
            self._send_probe(self.server.admin.readiness())
        elif self.path == "/metrics":
            self._answer(200, self.server.metrics.get(), CONTENT_TYPE_PLAIN_0_0_4)
        elif self.path == "/drain":
            self._drain(start=False)
        else:
            self._call()

    def do_POST(self) -> None:
        request = AdminRequest("POST", self.path, self.server.host)
        if not self.server.access.admits(self.headers.get("Authorization"), request):
            self._unauthorized()
            return
        if self.body() is None:
            return
        if self.path == "/drain":
            self._drain(start=True)
        else:
            self._call()

    def _send_probe(self, result: ProbeResult) -> None:
        self._answer(200 if result.ok else 503, msgspec.json.encode(result.body))

    def _drain(self, *, start: bool) -> None:
        try:
            self._answer(200, msgspec.json.encode(self.server.admin.drain_status(start=start)))
        except TimeoutError as error:
            self._send_reason(503, "Unresponsive", str(error))

    def _call(self) -> None:
        try:
            url = urlsplit(self.path)
        except ValueError as error:  # an absolute URL with an invalid host
            self._send_reason(400, "BadRequest", f"the path is invalid: {error}")
            return
        method = url.path.removeprefix("/")
        if method not in CALLS[self.command]:
            self._not_found()
            return
        try:
            result = self.server.admin.run_admin_call(
                method, parse_qs(url.query, keep_blank_values=True)
            )
        except ValueError as error:
            self._send_reason(400, "BadRequest", str(error))
        except TimeoutError as error:
            self._send_reason(503, "Unresponsive", str(error))
        except Exception as error:
            self._send_reason(409, "Failed", f"{method}: {error}")
        else:
            if isinstance(result, AdminCallPending):
                self._send_reason(
                    202,
                    "Pending",
                    f"{method} is in progress; see GET /is_paused and GET /is_sleeping",
                )
            else:
                self._answer(200, msgspec.json.encode({"result": result}))

    def _not_found(self) -> None:
        names = {
            method: ", ".join(f"/{name}" for name in sorted(names))
            for method, names in CALLS.items()
        }
        paths = (
            f"GET /health, /ready, /metrics, /drain, {names['GET']} "
            f"and POST /drain, {names['POST']}"
        )
        self._send_reason(404, "NotFound", f"the paths are {paths}")
