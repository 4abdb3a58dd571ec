"""Logging of text from untrusted processes: on one line, limited in length and rate."""

from __future__ import annotations

import logging
import threading
import time

#: Characters of an untrusted text in a log line.
MAX_TEXT = 300
LOG_INTERVAL_S = 10.0


def one_line(text: object, limit: int = MAX_TEXT) -> str:
    """Return at most `limit` characters of a text, with control characters escaped.

    Otherwise the sender could forge log lines or write escape sequences to a terminal.
    """
    words = str(text)
    kept = words[:limit] + "..." if len(words) > limit else words
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in kept
    )


class SparseLog:
    """Warnings that untrusted peers can cause at any rate: one line per LOG_INTERVAL_S.

    The line counts the warnings that were left out.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        #: Time of the monotonic clock from which the next line is logged.
        self._next = 0.0
        self._left_out = 0

    def warning(self, message: str, *arguments: object) -> None:
        """Log a warning, with each of its arguments on one line."""
        now = time.monotonic()
        with self._lock:
            if now < self._next:
                self._left_out += 1
                return
            self._next = now + LOG_INTERVAL_S
            left_out, self._left_out = self._left_out, 0
        more = f" (and {left_out} more warnings of this kind)" if left_out else ""
        self._logger.warning(message + "%s", *map(one_line, arguments), more)
