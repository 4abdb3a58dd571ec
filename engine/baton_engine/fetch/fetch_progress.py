"""Progress of a fetch, in the log and over HTTP on the port that the engine will use."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler

import msgspec

from baton_engine.http.bounded_server import BoundedHandler, BoundedHTTPServer
from baton_protocol.process.health import Health, LoadProgress

logger = logging.getLogger(__name__)

LOG_EVERY_S = 10.0
MAX_ERROR_CHARS = 1000


class FetchProgress:
    """The progress of a fetch, written by the fetcher and read by other threads."""

    def __init__(self) -> None:
        self._message = "starting"
        self._measure: Callable[[], LoadProgress | None] = lambda: None
        #: The last error, and the progress at that time.
        self._failed: tuple[str, LoadProgress | None] | None = None

    def set_step(
        self, message: str, measure: Callable[[], LoadProgress | None] | None = None
    ) -> None:
        """Set the current step of the fetch. Log `message` if it is not the previous message.

        Args:
            message: what the step does.
            measure: function that returns the progress of the step, or None if the progress is
                unknown. It is called for every health report. If `measure` itself is None, the
                progress is unknown.
        """
        self._measure = measure or (lambda: None)
        if message != self._message:
            logger.info("%s", message)
            self._failed = None
        self._message = message

    def fail(self, error: str) -> None:
        """Record the error of a failed attempt.

        `health` reports the error until the progress or the step changes.
        """
        self._failed = (" ".join(error.split())[:MAX_ERROR_CHARS], self._measure())

    def health(self) -> Health:
        progress, failed = self._measure(), self._failed
        is_current = failed is not None and failed[1] == progress
        return Health(
            "Fetching",
            self._message,
            progress,
            error=failed[0] if failed is not None and is_current else "",
        )

    def start_logging(self) -> None:
        """Log the progress every LOG_EVERY_S seconds, in a daemon thread."""
        threading.Thread(target=self._log, name="progress", daemon=True).start()

    def _log(self) -> None:
        while True:
            time.sleep(LOG_EVERY_S)
            health = self.health()
            logger.info("%s %s", health.message, health.progress or "")


class _Server(BoundedHTTPServer):
    progress: FetchProgress


class _Handler(BoundedHandler, BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self.ignore_body()
        if self.path == "/health":
            self._answer(200, msgspec.json.encode(self.server.progress.health()))
        else:
            self._send_reason(
                404, "NotFound", "only GET /health exists while the model is being fetched"
            )


def serve(progress: FetchProgress, host: str, port: int) -> int:
    """Serve the progress as `GET /health` in a daemon thread.

    Returns:
        The bound port.

    Raises:
        OSError: the address is in use.
    """
    server = _Server(host, port, _Handler)
    server.progress = progress
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    return int(server.server_address[1])
