"""The coordinator's HTTP side: the topology, health, metrics. Threads of its own; what they call takes care of that."""

from __future__ import annotations

import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from baton_engine.elastic.checks import Refusal
from baton_engine.json_handler import JSONHandler
from baton_engine.protocol.topology import TopologyRequest, TopologyStatus

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 2**20


class TopologyAdmin(Protocol):
    """What the server asks of the process; called from its threads."""

    def topology(self) -> TopologyStatus: ...

    def ask_for(self, request: TopologyRequest) -> Refusal | None: ...

    def ask_for_rebalance(self) -> None: ...

    def metrics_text(self) -> bytes: ...

    def is_healthy(self) -> bool:
        """The loop that answers ranks runs."""


class CoordinatorServer:
    def __init__(self, host: str, port: int, admin: TopologyAdmin) -> None:
        """Binds. Raises OSError if the address is taken. Port 0: any free one, see `port`."""
        self._server = _Server((host, port), _Handler)
        self._server.admin = admin
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)

    def start(self) -> None:
        self._thread.start()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    admin: TopologyAdmin


class _Handler(JSONHandler, BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        admin = self.server.admin
        if self.path == "/topology":
            self._answer(200, msgspec.json.encode(admin.topology()))
        elif self.path in ("/healthz", "/readyz"):
            # Ready without a single rank: ranks must be able to find it.
            if admin.is_healthy():
                self._tell(200, "Healthy", "the loop that answers ranks runs")
            else:
                self._tell(503, "Unresponsive", "the loop that answers ranks does not run")
        elif self.path == "/metrics":
            self._answer(200, admin.metrics_text(), CONTENT_TYPE_PLAIN_0_0_4)
        else:
            self._not_found()

    def do_PUT(self) -> None:
        body = self._body()
        if body is None:
            return
        if self.path != "/topology":
            self._not_found()
            return
        try:
            request = msgspec.json.decode(body, type=TopologyRequest)
        except msgspec.DecodeError as error:
            self._tell(400, "BadRequest", f"the body is no topology that can be asked for: {error}")
            return
        refusal = self.server.admin.ask_for(request)
        if refusal is not None:
            self._tell(400, "BadRequest", f"{refusal.field}: {refusal.message}")
            return
        self._answer(200, msgspec.json.encode(self.server.admin.topology()))

    def do_POST(self) -> None:
        if self._body() is None:
            return
        if self.path != "/rebalance":
            self._not_found()
            return
        self.server.admin.ask_for_rebalance()
        self._tell(202, "Accepted", "experts are placed anew as soon as nothing else is under way; see GET /topology")

    def _body(self) -> bytes | None:
        """None: it was refused."""
        length = self.headers.get("Content-Length") or "0"
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            self.close_connection = True  # what follows is not read
            self._tell(400, "BadRequest", f"Content-Length must be in [0, {MAX_BODY_BYTES}]")
            return None
        return self.rfile.read(int(length))

    def _not_found(self) -> None:
        paths = "GET and PUT /topology, POST /rebalance, GET /healthz, /readyz, /metrics"
        self._tell(404, "NotFound", f"there is only {paths}")
