"""Converts token ids to pieces of text, incrementally.

The pieces together equal the decoded text of all tokens. No piece ends inside a UTF-8 sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
#: Number of tokens above which a window without a clean end is cut, because the cost of decoding
#: grows with its square. Broken UTF-8 has no clean end.
_LONG_WINDOW = 16


class IncrementalDetokenizer:
    """A decoder of a window of recent tokens.

    The window holds the tokens since the last clean end, and the piece before them as context:
    decoders treat the start of a text specially, and drop a leading space. An incomplete UTF-8
    sequence at the end (U+FFFD) is held back, because later bytes may complete it. All text before
    it is final.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []
        #: Number of leading tokens of the window that were emitted before the last clean end.
        self._context = 0
        #: Characters of the window's text already emitted.
        self._emitted = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that became final."""
        # Special tokens and ids without a token have no text: a run of bytes continues across them.
        new_ids = [i for i in token_ids if i not in self._skipped and self._tokenizer.has_token(i)]
        if not new_ids:
            return ""
        self._window += new_ids
        if self._tokenizer.is_byte_fallback(new_ids[-1]):
            # A run of byte tokens is decoded as a whole: one wrong byte changes all of it.
            return ""
        text = self._decode(self._window)
        held = 1 if text.endswith(_REPLACEMENT) else 0
        delta = text[self._emitted : len(text) - held]
        self._emitted = max(self._emitted, len(text) - held)
        if not held:
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._emitted = len(self._decode(self._window))
        elif len(self._window) > _LONG_WINDOW:
            self._cut(text)
        return delta

    def flush(self) -> str:
        """Return the text held back, at the end of the sequence. Incomplete UTF-8 stays U+FFFD."""
        text = self._decode(self._window)
        delta = text[self._emitted :]
        self._emitted = len(text)
        return delta

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _cut(self, text: str) -> None:
        """Drop leading tokens where the two parts decode to the same text as the whole."""
        for index in range(len(self._window) - 1, 0, -1):
            head, tail = self._decode(self._window[:index]), self._decode(self._window[index:])
            if head + tail == text and len(head) <= self._emitted:
                self._window = self._window[index:]
                self._context = 0
                self._emitted -= len(head)
                return
