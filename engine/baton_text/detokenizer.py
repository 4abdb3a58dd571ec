"""Incremental detokenizer: token ids in, text out, piece by piece.

The pieces put together equal the full decode of all tokens, and no piece ends inside a UTF-8 sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_LONG_WINDOW = 16
"""Tokens. A window that finds no clean end (a model that emits broken UTF-8) is cut at this size, else cost is quadratic."""


class IncrementalDetokenizer:
    """Decodes a window of recent tokens only: those since the last clean end, and the piece before as context.

    Context matters because decoders treat the start of a text specially (a leading space goes away). While the
    window ends with an incomplete UTF-8 sequence (U+FFFD), that character is held back: later bytes may complete it. All text
    before it is final.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._context = 0
        """Leading tokens of the window that were emitted before the last clean end."""
        self._emitted = 0
        """Characters of the window's text already emitted."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became final with `token_ids`."""
        # Neither special tokens nor ids without a token leave a trace, so a run of bytes may go on across them.
        new_ids = [i for i in token_ids if i not in self._skipped and self._tokenizer.knows(i)]
        if not new_ids:
            return ""
        self._window += new_ids
        if self._tokenizer.is_byte_fallback(new_ids[-1]):
            return (
                ""  # a run of byte tokens is decoded as a whole: one wrong byte changes all of it
            )
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
        """What is still held back, at the end of the sequence: an incomplete UTF-8 sequence stays U+FFFD."""
        text = self._decode(self._window)
        delta = text[self._emitted :]
        self._emitted = len(text)
        return delta

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _cut(self, text: str) -> None:
        """Drops leading tokens where both parts decode alone to what they decode to together."""
        for index in range(len(self._window) - 1, 0, -1):
            head, tail = self._decode(self._window[:index]), self._decode(self._window[index:])
            if head + tail == text and len(head) <= self._emitted:
                self._window = self._window[index:]
                self._context = 0
                self._emitted -= len(head)
                return
