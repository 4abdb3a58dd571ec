"""The coordinator's HTTP server: topology, health and metrics.

With a service key, PUT and POST need a signature with the key, or a bearer token derived from the
key. GET needs neither.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler
from typing import Protocol

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from baton_engine.bounded_log import one_line
from baton_engine.elastic.coordinator.topology_validation import OperationRefusal
from baton_engine.http.bounded_server import BoundedHandler, BoundedHTTPServer
from baton_protocol.service_key import AdminRequest
from baton_protocol.topology import TopologyRequest, TopologyStatus

METHODS = {
    "/topology": ("GET", "PUT"),
    "/rebalance": ("POST",),
    "/health": ("GET",),
    "/ready": ("GET",),
    "/metrics": ("GET",),
}


class TopologyAdmin(Protocol):
    """The methods of the coordinator that the HTTP server's threads call."""

    def admits(self, authorization: str | None, request: AdminRequest) -> bool:
        """Return whether a request with this Authorization header may change the topology."""

    def topology(self) -> TopologyStatus: ...

    def request_topology(self, request: TopologyRequest) -> OperationRefusal | None: ...

    def request_rebalance(self) -> None: ...

    def metrics_text(self) -> bytes: ...

    def is_healthy(self) -> bool:
        """Return whether the loop that answers ranks is running."""


class CoordinatorServer:
    """The coordinator's HTTP server, and the thread that runs it."""

    def __init__(self, host: str, port: int, admin: TopologyAdmin) -> None:
        """Bind the address. Port 0: any free port.

        Raises:
            OSError: the address is in use.
        """
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
        if not self._has_route("GET"):
            return
        admin = self.server.admin
        if self.path == "/topology":
            self._answer(200, msgspec.json.encode(admin.topology()))
        elif self.path == "/metrics":
            self._answer(200, admin.metrics_text(), CONTENT_TYPE_PLAIN_0_0_4)
        # The coordinator is ready without ranks, because ranks connect only to a ready Service.
        elif admin.is_healthy():
            self._send_reason(200, "Healthy", "the loop that answers ranks is running")
        else:
            self._send_reason(503, "Unresponsive", "the loop that answers ranks is stalled")

    def do_PUT(self) -> None:
        body = self.body()
        if body is None or not self._may_change("PUT", body):
            return
        try:
            request = msgspec.json.decode(body, type=TopologyRequest)
        except (ValueError, RecursionError) as error:  # ValueError: also bytes that are not UTF-8
            self._send_reason(
                400, "BadRequest", f"the body is not a topology request: {one_line(error)}"
            )
            return
        refusal = self.server.admin.request_topology(request)
        if refusal is not None:
            self._send_reason(400, "BadRequest", f"{refusal.field}: {refusal.message}")
            return
        self._answer(200, msgspec.json.encode(self.server.admin.topology()))

    def do_POST(self) -> None:
        body = self.body()
        if body is None or not self._may_change("POST", body):
            return
        self.server.admin.request_rebalance()
        self._send_reason(
            202,
            "Accepted",
            "the rebalance starts when no other operation is active; see GET /topology",
        )

    def _may_change(self, method: str, body: bytes) -> bool:
        """Return whether a request may change the topology. If not, send an error response.

        A request needs a known path, and the service key if the service has one.
        """
        request = AdminRequest(method, self.path, body=body)
        if not self.server.admin.admits(self.headers.get("Authorization"), request):
            self._unauthorized()
            return False
        return self._has_route(method)

    def _has_route(self, method: str) -> bool:
        """Return whether the request's path and method exist. If not, send an error response."""
        methods = METHODS.get(self.path)
        if methods is None:
            paths = "GET and PUT /topology, POST /rebalance, GET /health, /ready, /metrics"
            self._send_reason(404, "NotFound", f"the paths are {paths}")
        elif method not in methods:
            self.not_allowed(*methods)
        return methods is not None and method in methods
