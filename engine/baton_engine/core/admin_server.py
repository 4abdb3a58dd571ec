"""The engine's HTTP side: health, readiness, metrics and drain. A thread of its own; it never touches the engine's state."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

logger = logging.getLogger(__name__)

SOCKET_TIMEOUT_S = 10.0
MAX_BODY_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True)
class Condition:
    """Whether something holds, and why."""

    ok: bool
    reason: str
    message: str


class DrainStatus(msgspec.Struct):
    draining: bool
    unfinished: int
    """Requests running and waiting, and transfers that a peer still needs."""


class EngineAdmin(Protocol):
    """What the server asks of the process; called from its threads."""

    def health(self) -> Condition: ...

    def readiness(self) -> Condition: ...

    def drain_status(self, *, start: bool) -> DrainStatus:
        """Starts draining if asked to. Raises TimeoutError if the engine's loop does not answer."""


class AdminServer:
    def __init__(self, host: str, port: int, admin: EngineAdmin, registry: CollectorRegistry) -> None:
        """Binds. Raises OSError if the address is taken. Port 0: any free one, see `port`."""
        self._server = _Server((host, port), _Handler)
        self._server.admin, self._server.registry = admin, registry
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    admin: EngineAdmin
    registry: CollectorRegistry


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = SOCKET_TIMEOUT_S
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/health":
            self._condition(self.server.admin.health())
        elif self.path == "/ready":
            self._condition(self.server.admin.readiness())
        elif self.path == "/metrics":
            self._answer(200, generate_latest(self.server.registry), CONTENT_TYPE_PLAIN_0_0_4)
        elif self.path == "/drain":
            self._drain(start=False)
        else:
            self._not_found()

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length") or "0"
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            self.close_connection = True  # what follows is not read
            message = f"Content-Length must be in [0, {MAX_BODY_BYTES}]; nothing here takes a body"
            self._answer(400, msgspec.json.encode({"reason": "BadRequest", "message": message}))
            return
        self.rfile.read(int(length))
        if self.path == "/drain":
            self._drain(start=True)
        else:
            self._not_found()

    def _condition(self, condition: Condition) -> None:
        body = msgspec.json.encode({"reason": condition.reason, "message": condition.message})
        self._answer(200 if condition.ok else 503, body)

    def _drain(self, *, start: bool) -> None:
        try:
            self._answer(200, msgspec.json.encode(self.server.admin.drain_status(start=start)))
        except TimeoutError as error:
            self._answer(503, msgspec.json.encode({"reason": "Unresponsive", "message": str(error)}))

    def _not_found(self) -> None:
        paths = "GET /health, /ready, /metrics, /drain and POST /drain"
        self._answer(404, msgspec.json.encode({"reason": "NotFound", "message": f"there is only {paths}"}))

    def _answer(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug("http %s: %s", self.address_string(), format % args)
