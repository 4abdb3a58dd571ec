"""The coordinator's HTTP side: the topology, health, metrics. Threads of its own; what they call takes care of that.

With a service key, what changes something (PUT, POST) is only for who shows that they have it; to look is for everybody.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler
from typing import Protocol

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from baton_engine.elastic.coordinator.checks import Refusal
from baton_engine.http.bounded_server import BoundedHandler, BoundedHTTPServer
from baton_engine.untrusted import one_line
from baton_protocol.topology import TopologyRequest, TopologyStatus

METHODS = {
    "/topology": ("GET", "PUT"),
    "/rebalance": ("POST",),
    "/healthz": ("GET",),
    "/readyz": ("GET",),
    "/metrics": ("GET",),
}


class TopologyAdmin(Protocol):
    """What the server asks of the process; called from its threads."""

    def admits(self, authorization: str | None) -> bool:
        """Whether a request with this header may change something."""

    def topology(self) -> TopologyStatus: ...

    def ask_for(self, request: TopologyRequest) -> Refusal | None: ...

    def ask_for_rebalance(self) -> None: ...

    def metrics_text(self) -> bytes: ...

    def is_healthy(self) -> bool:
        """The loop that answers ranks runs."""


class CoordinatorServer:
    def __init__(self, host: str, port: int, admin: TopologyAdmin) -> None:
        """Binds. Raises OSError if the address is taken. Port 0: any free one, see `port`."""
        self._server = _Server(host, port, _Handler)
        self._server.admin = admin
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)

    def start(self) -> None:
        self._thread.start()


class _Server(BoundedHTTPServer):
    admin: TopologyAdmin


class _Handler(BoundedHandler, BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self.ignore_body()
        if not self._is_there("GET"):
            return
        admin = self.server.admin
        if self.path == "/topology":
            self._answer(200, msgspec.json.encode(admin.topology()))
        elif self.path == "/metrics":
            self._answer(200, admin.metrics_text(), CONTENT_TYPE_PLAIN_0_0_4)
        # Ready without a single rank: ranks must be able to find it.
        elif admin.is_healthy():
            self._send_reason(200, "Healthy", "the loop that answers ranks runs")
        else:
            self._send_reason(503, "Unresponsive", "the loop that answers ranks does not run")

    def do_PUT(self) -> None:
        body = self.body()
        if body is None or not self._may_change("PUT"):
            return
        try:
            request = msgspec.json.decode(body, type=TopologyRequest)
        except (ValueError, RecursionError) as error:  # also of bytes that are no UTF-8
            self._send_reason(
                400,
                "BadRequest",
                f"the body is no topology that can be asked for: {one_line(error)}",
            )
            return
        refusal = self.server.admin.ask_for(request)
        if refusal is not None:
            self._send_reason(400, "BadRequest", f"{refusal.field}: {refusal.message}")
            return
        self._answer(200, msgspec.json.encode(self.server.admin.topology()))

    def do_POST(self) -> None:
        if self.body() is None or not self._may_change("POST"):
            return
        self.server.admin.ask_for_rebalance()
        self._send_reason(
            202,
            "Accepted",
            "experts are placed anew as soon as nothing else is under way; see GET /topology",
        )

    def _may_change(self, method: str) -> bool:
        """False: it was refused."""
        if not self.server.admin.admits(self.headers.get("Authorization")):
            self._unauthorized()
            return False
        return self._is_there(method)

    def _is_there(self, method: str) -> bool:
        """False: it was refused."""
        methods = METHODS.get(self.path)
        if methods is None:
            paths = "GET and PUT /topology, POST /rebalance, GET /healthz, /readyz, /metrics"
            self._send_reason(404, "NotFound", f"there is only {paths}")
        elif method not in methods:
            self.not_allowed(*methods)
        return methods is not None and method in methods
