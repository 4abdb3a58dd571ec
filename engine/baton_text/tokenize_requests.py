"""vLLM's /tokenize and /detokenize requests."""

from __future__ import annotations

from typing import Any

import msgspec

from baton_text.errors import RequestError
from baton_text.messages import ChatMessage


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of vLLM's /tokenize: a prompt, or messages that are rendered to a prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    #: None: true for a prompt, and false for messages, because templates write the special tokens.
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def validate(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("exactly one of prompt and messages is required", param="prompt")


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of vLLM's /detokenize."""

    tokens: list[int]
    model: str | None = None

    def validate(self) -> None:
        pass
