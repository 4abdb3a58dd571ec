"""Ends a text at the first stop string, which may begin and end inside tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Receives a text in pieces, and ends the text at the first stop string.

    The end of the text is held back while it may be the beginning of a stop string. If several stop
    strings match, the match that ends first counts. Of matches that end at the same character, the
    longest counts. Therefore the result does not depend on how the text is divided into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._include_stop = include_stop
        self._held = ""
        #: The stop string that ended the text; None until one matches.
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Add a piece of text and return the text that becomes final.

        After a stop string has matched, the result is always empty.
        """
        if self.matched is not None:
            return ""
        buffer = self._held + text
        match = self._first_match(buffer)
        if match is not None:
            start, end = match
            self._held = ""
            self.matched = buffer[start:end]
            return buffer[: end if self._include_stop else start]
        keep = held_back(buffer, 0, self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """End the text and return the part that was held back."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, int] | None:
        """Return (start, end) of the match that ends the text, as positions in `buffer`."""
        matches = [
            (start + len(stop), start) for stop in self._stops if (start := buffer.find(stop)) >= 0
        ]
        if not matches:
            return None
        end, start = min(matches)
        return start, end


def held_back(text: str, start: int, markers: Sequence[str]) -> int:
    """Return how many characters at the end of `text[start:]` may begin one of the markers.

    This is the length of the longest proper prefix of a marker that is a suffix of the text.
    """
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text) - start), 0, -1):
        end = text[-length:]
        for marker in markers:
            if len(marker) > length and marker.startswith(end):
                return length
    return 0
