"""What comes from processes that need not be friends, on its way into a log: in one line, not too long, not too often."""

from __future__ import annotations

import logging
import threading
import time

MAX_TEXT = 300
"""Characters of a foreign text in a log."""
LOG_INTERVAL_S = 10.0


def one_line(text: object, limit: int = MAX_TEXT) -> str:
    """At most `limit` characters of a text, without control characters, so that nobody writes lines of a log, or to a terminal."""
    words = str(text)
    kept = words[:limit] + "..." if len(words) > limit else words
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in kept
    )


class SparseLog:
    """Warnings of what anybody can cause as often as they like: one line in `interval_s`, which counts those left out."""

    def __init__(self, logger: logging.Logger, interval_s: float = LOG_INTERVAL_S) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._next = 0.0
        """By the monotonic clock."""
        self._left_out = 0

    def warning(self, message: str, *foreign: object) -> None:
        """`foreign`: the arguments of `message`, each in one line."""
        now = time.monotonic()
        with self._lock:
            if now < self._next:
                self._left_out += 1
                return
            self._next = now + self._interval_s
            left_out, self._left_out = self._left_out, 0
        more = f" (and {left_out} more like it, or like others before it)" if left_out else ""
        self._logger.warning(message + "%s", *map(one_line, foreign), more)
