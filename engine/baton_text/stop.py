"""Stop strings: ends a text at the first of them, wherever token boundaries fall."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Passes text through, but holds back any end of it that may grow into a stop string.

    The match that ends first wins, and of those that end together the longest: so the result does not depend on how the text was
    cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found. Nothing comes out after it."""

    def push(self, text: str) -> str:
        """Text that may be sent now."""
        if self.matched is not None:
            return ""
        buffer = self._held + text
        match = self._first_match(buffer)
        if match is not None:
            start, end = match
            self._held = ""
            self.matched = buffer[start:end]
            return buffer[: end if self._include_stop else start]
        keep = self._possible_prefix(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """What was held back, once it is known that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, int] | None:
        found = ((buffer.find(stop), len(stop)) for stop in self._stops)
        spans = [(start + length, start) for start, length in found if start >= 0]
        if not spans:
            return None
        end, start = min(spans)
        return start, end

    def _possible_prefix(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that is a proper prefix of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(buffer)), 0, -1):
            tail = buffer[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
