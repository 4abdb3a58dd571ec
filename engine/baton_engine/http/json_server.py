"""Base classes of the HTTP servers of engines, coordinators and fetchers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from baton_engine.untrusted import one_line

logger = logging.getLogger(__name__)

#: A client that sends or reads nothing for this long is disconnected.
SOCKET_TIMEOUT_S = 10.0


class JSONServer(ThreadingHTTPServer):
    """A server with one daemon thread per connection."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an exception of a handler. A disconnected client is logged at debug level only."""
        error = sys.exception()
        if isinstance(error, ConnectionError | TimeoutError):
            logger.debug("an HTTP client disconnected: %s", one_line(error))
        else:
            logger.error("a handler of an HTTP request failed", exc_info=error)


class JSONHandler(BaseHTTPRequestHandler):
    """A request handler that responds in JSON."""

    timeout = SOCKET_TIMEOUT_S
    protocol_version = "HTTP/1.1"

    def _send_reason(self, status: int, reason: str, message: str) -> None:
        self._answer(status, msgspec.json.encode({"reason": reason, "message": message}))

    def _unauthorized(self) -> None:
        """Respond with 401 and close the connection, because the request's body is not read."""
        message = (
            "this request needs the service's key: send `Authorization: Bearer TOKEN`, where TOKEN "
            "is the HMAC-SHA256 of baton/http with that key, in hex"
        )
        body = msgspec.json.encode({"reason": "Unauthorized", "message": message})
        self._answer(
            401, body, headers={"WWW-Authenticate": 'Bearer realm="baton"', "Connection": "close"}
        )

    def _answer(
        self,
        status: int,
        body: bytes,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug("http %s: %s", self.address_string(), format % args)
