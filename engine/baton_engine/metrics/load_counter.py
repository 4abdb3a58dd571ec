"""Bytes of weights that this process has read while it loads: written by the thread that loads, read by those of HTTP.

Workers in processes of their own count for themselves, where nobody asks.
"""

from __future__ import annotations

from baton_protocol.progress import LoadProgress


class LoadCounter:
    def __init__(self) -> None:
        self._done, self._total = 0, 0

    def begin(self, total: int) -> None:
        """Another read of so many bytes begins."""
        self._done, self._total = 0, total

    def add(self, num_bytes: int) -> None:
        self._done += num_bytes

    def progress(self) -> LoadProgress | None:
        """None before the first read."""
        return LoadProgress(min(self._done, self._total), self._total) if self._total else None


COUNTER = LoadCounter()
"""Of this process."""
