"""An HTTP server for a few clients that stands those who mean it ill: bounded in connections, time and bytes, and always JSON.

Threads, one per connection. Requests that cannot be read are answered 400, 405, 411, 413, 414 or 431 with {reason, message}, and
their connection ends.
"""

from __future__ import annotations

import contextlib
import http
import logging
import socket
import socketserver
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

import msgspec

from baton_engine.http.json_server import JSONHandler, JSONServer
from baton_engine.untrusted import SparseLog, one_line

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 128
"""If more come, the one goes whose request began the longest ago."""
REQUEST_TIMEOUT_S = 20.0
"""From a connection's beginning, or its last answer, to its next one."""
MAX_BODY_BYTES = 2**20
ACCEPT_PAUSE_S = 0.1
LINGER_S = 1.0
"""Who is refused before all was said may say so much longer: else the network would drop the answer with the rest."""


class BoundedHTTPServer(JSONServer):
    request_queue_size = 128

    def __init__(self, host: str, port: int, handler: type[BoundedHandler]) -> None:
        """Binds. Raises OSError if the address is taken."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._lock = threading.Lock()
        self._since: dict[Any, float] = {}
        """Of each connection, when its request began, or could have."""
        self._log = SparseLog(logger)
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        """Without asking a name server what this host is called."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = (
            str(self.server_address[0]),
            int(self.server_address[1]),
        )

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError as error:
            self._log.warning("cannot take an HTTP connection: %s", error)
            time.sleep(ACCEPT_PAUSE_S)  # without a descriptor for it, it stays there to be taken
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            oldest = (
                min(self._since, key=self._since.__getitem__)
                if len(self._since) >= MAX_CONNECTIONS
                else None
            )
            if oldest is not None:
                del self._since[oldest]
            self._since[request] = time.monotonic()
        if oldest is not None:
            self._log.warning("%s HTTP connections are open; the oldest goes", MAX_CONNECTIONS)
            _end(oldest)
        super().process_request(request, client_address)

    def on_answered(self, request: Any) -> None:
        with self._lock:
            if request in self._since:
                self._since[request] = time.monotonic()

    def service_actions(self) -> None:
        """Between connections, and twice a second."""
        limit = time.monotonic() - REQUEST_TIMEOUT_S
        with self._lock:
            late = [request for request, since in self._since.items() if since < limit]
        for request in late:
            _end(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._since.pop(request, None)
        super().shutdown_request(request)


class BoundedHandler(JSONHandler, BaseHTTPRequestHandler):
    server: BoundedHTTPServer
    disable_nagle_algorithm = True

    def handle_one_request(self) -> None:
        super().handle_one_request()
        self.server.on_answered(self.request)

    def body(self) -> bytes | None:
        """Of the request; None: it was refused. Raises ConnectionError: the client is gone before all was there."""
        if self.headers.get("Transfer-Encoding") is not None:
            self._refuse(411, "a body needs a Content-Length; it is not taken in chunks")
            return None
        lengths = set(self.headers.get_all("Content-Length") or ["0"])
        length = lengths.pop()
        if lengths or not (length.isascii() and length.isdecimal()):
            self._refuse(400, "Content-Length must be one number")
            return None
        if len(length) > len(str(MAX_BODY_BYTES)) or int(length) > MAX_BODY_BYTES:
            self._refuse(413, f"a body has at most {MAX_BODY_BYTES} bytes")
            return None
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ConnectionError("the body ended early")
        return body

    def ignore_body(self) -> None:
        """Of a request that has no business with one: what follows is not to be taken for the next request."""
        if (
            self.headers.get("Content-Length", "0") != "0"
            or self.headers.get("Transfer-Encoding") is not None
        ):
            self.close_connection = True

    def not_allowed(self, *methods: str) -> None:
        """405: `methods` are."""
        self.close_connection = True
        message = f"{one_line(self.command)} is not allowed here; allowed: {', '.join(methods)}"
        body = msgspec.json.encode({"reason": "MethodNotAllowed", "message": message})
        self._answer(405, body, headers={"Allow": ", ".join(methods), "Connection": "close"})

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the library finds wrong with a request."""
        if code == http.HTTPStatus.NOT_IMPLEMENTED:
            self.not_allowed(*sorted(name[3:] for name in dir(self) if name.startswith("do_")))
        else:
            self._refuse(code, one_line(message or http.HTTPStatus(code).phrase))

    def log_message(self, format: str, *args: object) -> None:
        logger.debug("http %s: %s", self.client_address[0], one_line(format % args))

    def _refuse(self, code: int, message: str) -> None:
        """The rest of the request is not read, so the connection ends."""
        self.close_connection = True
        self.request_version = (
            self.protocol_version
        )  # until it is read it counts as 0.9, whose answers have no head
        self._tell(code, http.HTTPStatus(code).phrase.replace(" ", "").replace("-", ""), message)
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(LINGER_S)
            until = time.monotonic() + LINGER_S
            while time.monotonic() < until and self.connection.recv(2**16):
                pass


def _end(connection: socket.socket) -> None:
    """Its thread finds out, and closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
