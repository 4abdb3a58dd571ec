"""Converts token ids to pieces of text, as the tokens arrive.

All pieces together equal the decoded text of all tokens. No piece ends inside a UTF-8 sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
#: A window with more tokens than this is shortened, even if it ends inside a UTF-8 sequence. Each
#: new token decodes the whole window again, and invalid UTF-8 may never complete a character.
_LONG_WINDOW = 16


class IncrementalDetokenizer:
    """Converts the tokens of one sequence to text, as the tokens arrive.

    Only a window of recent tokens is decoded. The window holds the tokens since the text last ended
    with a complete UTF-8 sequence. It also holds some earlier tokens as context, because decoders
    drop a space at the start of a text.

    Byte tokens, such as `<0xE4>`, are held back until another kind of token follows. If the decoded
    text ends with U+FFFD, this character is held back, because later bytes may complete the UTF-8
    sequence. All other text is final.

    Args:
        kept_token_ids: special tokens whose text is kept, even with `skip_special_tokens`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        kept_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = (
            tokenizer.special_token_ids - kept_token_ids if skip_special_tokens else frozenset()
        )
        self._window: list[int] = []
        #: Number of leading tokens of the window that are only context. Their text was emitted.
        self._context = 0
        #: Characters of the window's text already emitted.
        self._emitted = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that becomes final."""
        # Special tokens and ids outside the vocabulary have no text, so byte tokens before and
        # after them are decoded together.
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
        """End the sequence and return the text that was held back.

        An incomplete UTF-8 sequence becomes U+FFFD.
        """
        text = self._decode(self._window)
        delta = text[self._emitted :]
        self._emitted = len(text)
        return delta

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _cut(self, text: str) -> None:
        """Shorten the window: drop leading tokens whose text was already emitted.

        The window is cut only where both parts, decoded separately, give the same text as before.

        Args:
            text: the decoded text of the window.
        """
        for index in range(len(self._window) - 1, 0, -1):
            head, tail = self._decode(self._window[:index]), self._decode(self._window[index:])
            if head + tail == text and len(head) <= self._emitted:
                self._window = self._window[index:]
                self._context = 0
                self._emitted -= len(head)
                return
