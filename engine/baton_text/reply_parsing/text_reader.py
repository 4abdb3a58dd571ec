"""Reads a text that arrives in pieces.

Parsers are generators. They read with `yield from`, and yield when the text so far does not decide
what comes next. Their decisions depend on the characters alone, so the result does not depend on
how the text is divided into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

from baton_text.stop_strings import held_back

_T = TypeVar("_T")
#: A generator that yields when it needs more text, and returns a T.
Reading = Generator[None, None, _T]

_SPACES = re.compile(r"\s*")
#: The characters of a JSON string up to a quote, a backslash or the end of the piece.
_PLAIN = re.compile(r'[^"\\]*')
_BETWEEN = re.compile(r"[-+.0-9a-zA-Z,:\s]*")
_CLOSING = {"{": "}", "[": "]"}
_SURROGATE = re.compile("[\ud800-\udfff]")


class BadSyntaxError(Exception):
    """Raised when the text is not what the format requires."""


class EndOfTextError(BadSyntaxError):
    """Raised when the text ends before the format allows it."""


class TextReader:
    """Reads a text that arrives in pieces.

    The methods that return a `Reading` are generators. They yield when they need the next piece.
    """

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        #: Position to which `rewind` may return; None: there is none.
        self._mark: int | None = None
        #: Pieces of text since the mark that `_text` no longer holds. `rewind` restores them.
        self._kept: list[str] = []
        #: Whether no more text will arrive.
        self.has_ended = False

    def push(self, text: str) -> None:
        """Add a piece of text."""
        if self._mark is not None:
            self._kept.append(self._text[self._mark : self._position])
            self._mark = 0
        self._text = self._text[self._position :] + text
        self._position = 0

    def mark(self) -> None:
        """Record the current position, to which `rewind` can return."""
        self.forget_mark()
        self._mark = self._position

    def forget_mark(self) -> None:
        self._kept.clear()
        self._mark = None

    def rewind(self) -> None:
        """Return to the position that `mark` recorded."""
        assert self._mark is not None
        self._text = "".join(self._kept) + self._text[self._mark :]
        self._position = 0
        self.forget_mark()

    def need(self) -> Reading[None]:
        """Wait until the next character has arrived.

        Raises:
            EndOfTextError: the text has ended.
        """
        while self._position == len(self._text):
            if self.has_ended:
                raise EndOfTextError
            yield

    def peek(self) -> Reading[str]:
        """Return the next character without consuming it, or "" at the end of the text."""
        try:
            yield from self.need()
        except EndOfTextError:
            return ""
        return self._text[self._position]

    def skip_spaces(self) -> Reading[str]:
        """Consume whitespace, and return it."""
        spaces = ""
        while True:
            match = _SPACES.match(self._text, self._position)
            assert match
            spaces += match[0]
            self._position = match.end()
            if self._position < len(self._text) or self.has_ended:
                return spaces
            yield

    def follows(self, literal: str) -> Reading[bool]:
        """Return whether `literal` follows. Nothing is consumed."""
        while True:
            found = self._text[self._position : self._position + len(literal)]
            if found == literal:
                return True
            if not literal.startswith(found) or self.has_ended:
                return False
            yield

    def skip(self, literal: str) -> Reading[bool]:
        """Consume `literal` if it follows, and return whether it does."""
        if (yield from self.follows(literal)):
            self._position += len(literal)
            return True
        return False

    def expect(self, literal: str) -> Reading[None]:
        """Consume `literal`.

        Raises:
            BadSyntaxError: another text follows.
        """
        if not (yield from self.skip(literal)):
            raise self._error()

    def read_until(self, markers: Sequence[str], emit: Callable[[str], None]) -> Reading[str]:
        """Consume the text up to the first of the markers, and the marker.

        Text is emitted as soon as no marker can begin in it.

        Returns:
            The marker, or "" if the text ended without one.
        """
        pattern = _any_of(tuple(markers))
        while True:
            found = pattern.search(self._text, self._position)
            # A longer marker that begins earlier may still be incomplete.
            limit = len(self._text)
            if not self.has_ended:
                limit -= held_back(self._text, self._position, markers)
            if found is not None and found.start() <= limit:
                emit(self._text[self._position : found.start()])
                self._position = found.end()
                return found[0]
            emit(self._text[self._position : limit])
            self._position = limit
            if self.has_ended:
                return ""
            yield

    def read_json(self, emit: Callable[[str], None]) -> Reading[None]:
        """Consume one JSON object, array or string, and emit its text as it arrives.

        Brackets, strings and the characters between them are checked. `json.loads` of the text may
        still fail.

        Raises:
            BadSyntaxError: the text is not JSON.
        """
        yield from self.need()
        closing: list[str] = []
        is_string = False
        while True:
            start = self._position
            while self._position < len(self._text):
                character = self._text[self._position]
                if is_string:
                    if character == "\\":
                        if self._position + 1 == len(self._text):
                            break
                        self._position += 2
                        continue
                    if character != '"':
                        self._position = _end(_PLAIN, self._text, self._position)
                        continue
                    is_string = False
                elif character == '"':
                    is_string = True
                elif character in _CLOSING:
                    closing.append(_CLOSING[character])
                elif closing and character == closing[-1]:
                    closing.pop()
                else:
                    end = _end(_BETWEEN, self._text, self._position) if closing else start
                    if end == self._position:
                        emit(self._text[start:end])
                        raise self._error()
                    self._position = end
                    continue
                self._position += 1
                if not closing and not is_string:
                    emit(self._text[start : self._position])
                    return
            emit(self._text[start : self._position])
            if self.has_ended:
                raise EndOfTextError
            yield

    def read_json_string(self) -> Reading[str]:
        """Consume a JSON string, and return its value with surrogates replaced by U+FFFD.

        Raises:
            BadSyntaxError: no valid string follows.
        """
        if (yield from self.peek()) != '"':
            raise self._error()
        pieces: list[str] = []
        yield from self.read_json(pieces.append)
        try:
            return without_surrogates(json.loads("".join(pieces), strict=False))
        except ValueError:
            raise BadSyntaxError from None

    def read_word(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Consume the characters that match `pattern`, which matches a single character."""
        word = ""
        while pattern.fullmatch(character := (yield from self.peek())):
            word += character
            self._position += 1
        return word

    def _error(self) -> BadSyntaxError:
        """Return EndOfTextError if the text ends at the current position, else BadSyntaxError."""
        is_end = self.has_ended and self._position == len(self._text)
        return EndOfTextError() if is_end else BadSyntaxError()


def without_surrogates(text: str) -> str:
    """Return the text with each surrogate, which UTF-8 cannot encode, replaced by U+FFFD.

    A JSON string may contain half of a surrogate pair as an escape.
    """
    return _SURROGATE.sub("\ufffd", text)


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    assert match
    return match.end()


@lru_cache(1024)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern whose search finds the marker that begins first in a text.

    Of several markers that begin at the same position, the pattern matches the longest. One search
    with the pattern reads the text once, instead of once for each marker.
    """
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or "(?!)")
