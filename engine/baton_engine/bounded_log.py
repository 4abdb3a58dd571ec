"""Logs text from untrusted processes on one line, with limited length and rate."""

from __future__ import annotations

import logging
import threading
import time

#: Maximum characters of an untrusted text in a log line.
MAX_TEXT = 300
#: Minimum time between two lines of a SparseLog, so that a peer cannot flood the log.
LOG_INTERVAL_S = 10.0


def one_line(text: object, limit: int = MAX_TEXT) -> str:
    """Return the text, cut after `limit` characters and with control characters escaped.

    Unescaped text could forge log lines or write escape sequences to a terminal.
    """
    words = str(text)
    kept = words[:limit] + "..." if len(words) > limit else words
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in kept
    )


class SparseLog:
    """Logs warnings that untrusted peers can cause, at most one line per LOG_INTERVAL_S.

    Each line gives the number of warnings that were left out since the previous line.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        #: Time of the monotonic clock from which the next line is logged.
        self._next = 0.0
        self._left_out = 0

    def warning(self, message: str, *arguments: object) -> None:
        """Log a warning, or count it if a line was logged in the last LOG_INTERVAL_S.

        Each argument is passed through `one_line`, so the entry stays on one line.
        """
        now = time.monotonic()
        with self._lock:
            if now < self._next:
                self._left_out += 1
                return
            self._next = now + LOG_INTERVAL_S
            left_out, self._left_out = self._left_out, 0
        more = f" (and {left_out} more warnings of this kind)" if left_out else ""
        self._logger.warning(message + "%s", *map(one_line, arguments), more)
