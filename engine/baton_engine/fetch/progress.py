"""How far the fetcher is: on stderr, and over HTTP on the port that will be the engine's."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler

import msgspec

from baton_engine.http.json_server import JSONHandler, JSONServer
from baton_protocol.progress import Health, LoadProgress

logger = logging.getLogger(__name__)

LOG_EVERY_S = 10.0
MAX_ERROR_CHARS = 1000


class Progress:
    """Written by the fetcher, read by the server's threads."""

    def __init__(self) -> None:
        self._message = "starting"
        self._measure: Callable[[], LoadProgress | None] = lambda: None
        self._failed: tuple[str, LoadProgress | None] | None = None
        """An error, and how much there was when it came."""

    def tell(self, message: str, measure: Callable[[], LoadProgress | None] | None = None) -> None:
        """What is done now; `measure` says how much of it, whenever someone asks."""
        self._measure = measure or (lambda: None)
        if message != self._message:
            logger.info("%s", message)
            self._failed = None
        self._message = message

    def fail(self, error: str) -> None:
        """What is done now failed, and is tried again; told until more is there, or something else is done."""
        self._failed = (" ".join(error.split())[:MAX_ERROR_CHARS], self._measure())

    def health(self) -> Health:
        progress, failed = self._measure(), self._failed
        stands = failed is not None and failed[1] == progress
        return Health(
            "Fetching",
            self._message,
            progress,
            error=failed[0] if failed is not None and stands else "",
        )

    def log_from_now_on(self) -> None:
        """A line on stderr every few seconds, by a thread that ends with the process."""
        threading.Thread(target=self._log, name="progress", daemon=True).start()

    def _log(self) -> None:
        while True:
            time.sleep(LOG_EVERY_S)
            health = self.health()
            logger.info("%s %s", health.message, health.progress or "")


class _Server(JSONServer):
    progress: Progress


class _Handler(JSONHandler, BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, msgspec.json.encode(self.server.progress.health()))
        else:
            self._send_reason(
                404, "NotFound", "there is only GET /health: the model is being fetched"
            )


def serve(progress: Progress, host: str, port: int) -> int:
    """Answers `GET /health` from now on; returns the port. Raises OSError if the address is taken."""
    server = _Server((host, port), _Handler)
    server.progress = progress
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    return int(server.server_address[1])
