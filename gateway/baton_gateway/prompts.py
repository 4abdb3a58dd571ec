"""Prompts: messages and texts to token ids, within bounds that are looked at before anything takes time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton_gateway.errors import prompt_too_long
from baton_text.chat_template import ChatTemplateError
from baton_text.errors import RequestError
from baton_text.messages import ChatMessage, template_messages
from baton_text.tokenizer import Tokenizer

LONG_TEXT = 8
"""Characters for each token that a prompt may have. Longer texts are tokenized in pieces first, up to the one that shows that they
cannot fit."""
TEXT_FACTOR = 4
"""Times the tokens of the longest prompt."""
_MIN_PIECE = 4096
"""Characters. A cut changes the tokens of the words beside it only, so pieces must be long compared with words."""


@dataclass(frozen=True)
class PromptBounds:
    """How many tokens the prompt of a generation request may have."""

    max_model_len: int
    """The prompt must leave room for one token more."""
    max_prompt_tokens: int | None = None
    """The server's own bound."""

    @property
    def most(self) -> int:
        own = self.max_prompt_tokens
        return self.max_model_len if own is None else min(self.max_model_len, own)

    def check(self, at_least: int, field: str) -> None:
        """Raises APIError or RequestError: a prompt with `at_least` so many tokens is too long."""
        if at_least >= self.max_model_len:
            raise prompt_too_long(self.max_model_len, at_least, field)
        self.check_own(at_least, field)

    def check_own(self, at_least: int, field: str) -> None:
        if self.max_prompt_tokens is not None and at_least > self.max_prompt_tokens:
            raise RequestError(
                f"this server takes prompts of {self.max_prompt_tokens} tokens at most, got {at_least} or more",
                param=field,
                code="prompt_too_long",
            )


@dataclass(frozen=True)
class TextBounds:
    """How many tokens a text that is not to be answered may have: several times those of a prompt, for who cuts texts to length has
    some that are too long."""

    prompt: PromptBounds

    @property
    def most(self) -> int:
        return TEXT_FACTOR * self.prompt.most

    def check(self, at_least: int, field: str) -> None:
        """Raises RequestError: a text with `at_least` so many tokens is too long."""
        if at_least > self.most:
            raise RequestError(
                f"{field} may have {self.most} tokens, {TEXT_FACTOR} times those of a prompt, got {at_least} or more",
                param=field,
                code="prompt_too_long",
            )


class PromptReader:
    """All methods may be called from any thread, and take a time that the bounds bound."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def render(
        self,
        messages: list[ChatMessage],
        variables: dict[str, Any] | None,
        bounds: PromptBounds | TextBounds,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The chat template's text. Raises RequestError, or APIError: there are more messages than tokens fit."""
        bounds.check(len(messages), "messages")
        template = self._tokenizer.chat_template
        if template is None:
            raise RequestError(
                "This model has no chat template; send a prompt instead, or add chat_template.jinja to the checkpoint.",
                param="messages",
            )
        try:
            return template.render(
                template_messages(messages),
                add_generation_prompt=add_generation_prompt,
                **(variables or {}),
            )
        except ChatTemplateError as error:
            raise RequestError(
                f"The chat template refuses these messages: {error}", param="messages"
            ) from error

    def encode(
        self, text: str, field: str, bounds: PromptBounds | TextBounds, *, add_special_tokens: bool
    ) -> list[int]:
        """Raises APIError or RequestError: it is too long, which may be known before it is tokenized."""
        bounds.check(self._tokenizer.fewest_tokens(text), field)
        if len(text) > LONG_TEXT * bounds.most:
            self._check_pieces(text, field, bounds)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def check_ids(self, token_ids: Sequence[int], field: str) -> None:
        """Raises RequestError: one is outside the vocabulary."""
        vocab_size = self._tokenizer.vocab_size
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
            raise RequestError(
                f"{field}: token ids must be in [0, {vocab_size - 1}], got {wrong}", param=field
            )

    def _check_pieces(self, text: str, field: str, bounds: PromptBounds | TextBounds) -> None:
        """Raises if its pieces have more than twice as many tokens as fit; a text as a whole has hardly fewer than they have."""
        num_tokens, piece = 0, max(_MIN_PIECE, LONG_TEXT * bounds.most)
        for start in range(0, len(text), piece):
            num_tokens += len(
                self._tokenizer.encode(text[start : start + piece], add_special_tokens=False)
            )
            if num_tokens > 2 * bounds.most + 1:
                bounds.check(num_tokens // 2, field)
