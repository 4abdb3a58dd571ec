"""vLLM's /tokenize and /detokenize requests."""

from __future__ import annotations

from typing import Any

import msgspec

from baton_text.chat_messages import ChatMessage
from baton_text.request_error import RequestError


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of vLLM's /tokenize: a prompt, or messages that are rendered to a prompt."""

    #: Name of the served model. It may be left out.
    model: str | None = None
    #: The text to tokenize.
    prompt: str | None = None
    #: A conversation to render and tokenize, instead of `prompt`.
    messages: list[ChatMessage] | None = None
    #: Add special tokens, such as BOS. If unset: true for a prompt, and false for messages, because
    #: chat templates already write the special tokens.
    add_special_tokens: bool | None = None
    #: End rendered messages with the start of an assistant's message. Unset: true.
    add_generation_prompt: bool | None = None
    #: Variables of the template, such as enable_thinking.
    chat_template_kwargs: dict[str, Any] | None = None
    #: Also return the text of each token.
    return_token_strs: bool | None = None

    def validate(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("exactly one of prompt and messages is required", param="prompt")


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of vLLM's /detokenize."""

    #: The token ids to convert to text.
    tokens: list[int]
    #: Name of the served model. It may be left out.
    model: str | None = None

    def validate(self) -> None:
        pass
