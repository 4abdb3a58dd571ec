"""What the HTTP handlers of engines and coordinators have in common: answers in JSON, deadlines, quiet logs."""

from __future__ import annotations

import logging
from http.server import BaseHTTPRequestHandler

import msgspec

logger = logging.getLogger(__name__)

SOCKET_TIMEOUT_S = 10.0
"""A client that sends or takes nothing for so long is let go."""


class JSONHandler(BaseHTTPRequestHandler):
    timeout = SOCKET_TIMEOUT_S
    protocol_version = "HTTP/1.1"

    def _tell(self, status: int, reason: str, message: str) -> None:
        self._answer(status, msgspec.json.encode({"reason": reason, "message": message}))

    def _answer(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug("http %s: %s", self.address_string(), format % args)
