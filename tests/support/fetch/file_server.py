"""The HTTP server of the fake hub and the fake store. For the tests of the model fetcher."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def send_head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # tests kill clients during a body


@contextlib.contextmanager
def serving(handler: type[Handler], **attributes: object) -> Iterator[str]:
    """Serve during the block with handlers of class `handler`, and yield the URL.

    Args:
        attributes: attributes of each handler.
    """
    server = _Server(("127.0.0.1", 0), type("_BoundHandler", (handler,), attributes))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
