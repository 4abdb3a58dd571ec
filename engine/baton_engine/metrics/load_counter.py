"""Counts the bytes of weights that this process has read.

The loading thread writes the counter, and HTTP threads read it. The counters of worker processes
are not read.
"""

from __future__ import annotations

from baton_protocol.process.health import LoadProgress


class LoadCounter:
    """Counts the bytes of weights that one load of a model has read."""

    def __init__(self) -> None:
        self._done, self._total = 0, 0

    def begin(self, total: int) -> None:
        """Reset the counter for a new load of `total` bytes."""
        self._done, self._total = 0, total

    def add(self, num_bytes: int) -> None:
        self._done += num_bytes

    def progress(self) -> LoadProgress | None:
        """Return the bytes read so far and the total. None before the first load."""
        return LoadProgress(min(self._done, self._total), self._total) if self._total else None


#: The counter of this process.
COUNTER = LoadCounter()
