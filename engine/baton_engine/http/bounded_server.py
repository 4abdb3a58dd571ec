"""The HTTP server of engines, coordinators and fetchers, which responds in JSON.

Its clients are untrusted, so it has limits on connections, time and bytes.

The server has one thread per connection. A request that cannot be read gets status 400, 405, 411,
413, 414 or 431 and the body {reason, message}. Then the connection is closed.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import Any, cast

import msgspec

from baton_engine.bounded_log import SparseLog, one_line

logger = logging.getLogger(__name__)

#: Maximum number of open connections. At the limit, a new connection closes the connection that has
#: been without a response for the longest time.
MAX_CONNECTIONS = 128
#: Maximum time from the start of a connection, or from its last response, to its next response.
REQUEST_TIMEOUT_S = 20.0
#: A client that sends or reads nothing for this long is disconnected.
SOCKET_TIMEOUT_S = 10.0
#: Limit on the body of a request. The largest topology has 70 KB. The limit is low because clients
#: without the service key can also send bodies.
MAX_BODY_BYTES = 2**17
#: Limit on the headers of a request. http.server allows 6.5 MB.
MAX_HEAD_BYTES = 2**14
#: Pause after an accept that failed, for example because no file descriptor was free.
ACCEPT_PAUSE_S = 0.1
#: Keep reading for this long after a response to an unread body. Closing at once would reset the
#: connection and lose the response.
LINGER_S = 1.0


class BoundedHTTPServer(ThreadingHTTPServer):
    """An HTTP server with limits on connections, sizes and times.

    A subclass of BoundedHandler handles the requests.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, handler: type[BoundedHandler]) -> None:
        """Bind the port. Raise OSError if the address is in use."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._lock = threading.Lock()
        #: By connection: time of the last response, or of the start if there was none.
        self._since: dict[Any, float] = {}
        self._log = SparseLog(logger)
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        """Bind the socket without a DNS lookup of the host name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = (
            str(self.server_address[0]),
            int(self.server_address[1]),
        )

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError as error:
            self._log.warning(
                "an HTTP connection on port %s cannot be accepted: %s; trying again",
                self.server_port,
                error,
            )
            time.sleep(ACCEPT_PAUSE_S)  # without free descriptors, the next try fails at once
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
            self._log.warning(
                "the limit of %s HTTP connections on port %s is reached: closing the connection "
                "that has been without a response for the longest time",
                MAX_CONNECTIONS,
                self.server_port,
            )
            _end(oldest)
        super().process_request(request, client_address)

    def on_answered(self, request: Any) -> None:
        """Restart the timeout of the connection `request`, because a response was sent."""
        with self._lock:
            if request in self._since:
                self._since[request] = time.monotonic()

    def service_actions(self) -> None:
        """Close connections that exceed REQUEST_TIMEOUT_S. Called twice a second."""
        limit = time.monotonic() - REQUEST_TIMEOUT_S
        with self._lock:
            late = [request for request, since in self._since.items() if since < limit]
        for request in late:
            _end(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._since.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an exception of a handler. A disconnected client is logged at debug level only."""
        error = sys.exception()
        if isinstance(error, ConnectionError | TimeoutError):
            logger.debug("an HTTP client disconnected: %s", one_line(error))
        else:
            logger.error(
                "an HTTP request from %s to port %d failed in its handler",
                client_address[0],
                self.server_port,
                exc_info=error,
            )


class _Head:
    """Reads the headers of one request from a connection."""

    def __init__(self, connection: BufferedIOBase) -> None:
        self._connection = connection
        self._left = MAX_HEAD_BYTES

    def readline(self, size: int) -> bytes:
        """Return the next line, of at most `size` bytes.

        Raises:
            LineTooLong: the headers have more than MAX_HEAD_BYTES.
        """
        line = self._connection.readline(min(size, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise http.client.LineTooLong("head")
        return line


class BoundedHandler(BaseHTTPRequestHandler):
    """The base class of request handlers. Refuses requests that exceed a limit."""

    server: BoundedHTTPServer
    disable_nagle_algorithm = True
    timeout = SOCKET_TIMEOUT_S
    protocol_version = "HTTP/1.1"
    #: Whether the request has a body that was not read.
    _has_unread_body = False

    def parse_request(self) -> bool:
        """Parse the request line and the headers. Respond with 431 if the headers are too large.

        Returns:
            Whether to handle the request.
        """
        connection = self.rfile
        self.rfile = cast(BufferedIOBase, _Head(connection))
        try:
            is_valid = super().parse_request()
        finally:
            self.rfile = connection
        if is_valid:
            self._has_unread_body = (
                self.headers.get("Content-Length", "0") != "0"
                or self.headers.get("Transfer-Encoding") is not None
            )
        return is_valid

    def handle_one_request(self) -> None:
        self._has_unread_body = False
        super().handle_one_request()
        self.server.on_answered(self.request)
        if self.close_connection and self._has_unread_body:
            self._discard_body()

    def body(self) -> bytes | None:
        """Read the request's body. If the length is invalid, refuse the request and return None.

        Raises:
            ConnectionError: the client disconnected before the end of the body.
        """
        if self.headers.get("Transfer-Encoding") is not None:
            self._refuse(411, "a body needs a Content-Length; chunked bodies are not supported")
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
        self._has_unread_body = False
        return body

    def ignore_body(self) -> None:
        """Close the connection after the response if the request has a body.

        Handlers that expect no body call this method. Otherwise the unread body would be parsed as
        the next request.
        """
        self.close_connection |= self._has_unread_body

    def not_allowed(self, *methods: str) -> None:
        """Respond with 405 and the allowed methods, and close the connection."""
        self.close_connection = True
        message = f"{one_line(self.command)} is not allowed here; allowed: {', '.join(methods)}"
        body = msgspec.json.encode({"reason": "MethodNotAllowed", "message": message})
        self._answer(405, body, headers={"Allow": ", ".join(methods), "Connection": "close"})

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Respond to a request that `http.server` rejects. An unknown method gets status 405."""
        if code == http.HTTPStatus.NOT_IMPLEMENTED:
            self.not_allowed(*sorted(name[3:] for name in dir(self) if name.startswith("do_")))
        else:
            self._refuse(code, one_line(message or http.HTTPStatus(code).phrase))

    def log_message(self, format: str, *args: object) -> None:
        logger.debug("http %s: %s", self.client_address[0], one_line(format % args))

    def _send_reason(self, status: int, reason: str, message: str) -> None:
        self._answer(status, msgspec.json.encode({"reason": reason, "message": message}))

    def _unauthorized(self) -> None:
        """Respond with 401 and close the connection, because the request's body is not read."""
        message = (
            "this request needs the service's key: send `Authorization: Bearer TOKEN`, where TOKEN "
            "is the HMAC-SHA256 of baton/http with that key, in hex. The operator's signature is "
            "valid for one address and 5 minutes, so compare the clocks"
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

    def _refuse(self, code: int, message: str) -> None:
        """Respond with an error, discard the rest of the request and close the connection."""
        self.close_connection = self._has_unread_body = True
        # `http.server` treats an unread request as HTTP/0.9, whose responses have no headers.
        self.request_version = self.protocol_version
        self._send_reason(
            code, http.HTTPStatus(code).phrase.replace(" ", "").replace("-", ""), message
        )

    def _discard_body(self) -> None:
        """Stop sending, and discard input until the client disconnects or LINGER_S is over."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(LINGER_S)
            until = time.monotonic() + LINGER_S
            while time.monotonic() < until and self.connection.recv(2**16):
                pass


def _end(connection: socket.socket) -> None:
    """Shut down a connection in both directions. The thread that handles it closes the socket."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
