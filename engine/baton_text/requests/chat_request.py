"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any, ClassVar

from baton_protocol.sampling import MAX_LOGPROBS
from baton_text.errors import RequestError
from baton_text.messages import ChatMessage, template_messages
from baton_text.requests.generation_request import GenerationRequest, check_max_tokens


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    UNSUPPORTED: ClassVar[tuple[str, ...]] = (
        "tools",
        "functions",
        "function_call",
        "audio",
        "prediction",
        "web_search_options",
        "chat_template",
        "continue_final_message",
    )

    #: The conversation, one message or more.
    messages: list[ChatMessage]
    #: Limit on generated tokens. It takes precedence over `max_tokens`. Bounds: 1 or more.
    max_completion_tokens: int | None = None
    #: Report the log-probability of each generated token.
    logprobs: bool | None = None
    #: Also report this many most likely tokens at each position. Needs `logprobs`. Bounds:
    #: 0..MAX_LOGPROBS.
    top_logprobs: int | None = None
    #: End the prompt with the start of an assistant's message. Unset: true.
    add_generation_prompt: bool | None = None
    #: Variables of the template, such as enable_thinking.
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    #: `none` and `auto` have no effect. Other values are refused.
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    #: `["text"]` has no effect. Other values are refused.
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    continue_final_message: Any = None

    def requested_max_tokens(self) -> int | None:
        return (
            self.max_completion_tokens
            if self.max_completion_tokens is not None
            else self.max_tokens
        )

    def max_tokens_field(self) -> str | None:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return super().max_tokens_field()

    def requested_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def validate(self) -> None:
        super().validate()
        check_max_tokens("max_completion_tokens", self.max_completion_tokens)
        check_max_tokens("max_tokens", self.max_tokens)
        if self.top_logprobs is not None:
            if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
                raise RequestError(
                    f"top_logprobs must be in [0, {MAX_LOGPROBS}], got {self.top_logprobs}",
                    param="top_logprobs",
                )
            if not self.logprobs:
                raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
        if not self.messages:
            raise RequestError("messages must not be empty", param="messages")
        template_messages(self.messages)

    def _refuse_unsupported(self) -> None:
        super()._refuse_unsupported()
        if self.tool_choice not in (None, "none", "auto"):
            raise RequestError(
                "tool_choice is not supported by this server",
                param="tool_choice",
                code="unsupported_parameter",
            )
        if self.modalities not in (None, ["text"]):
            raise RequestError(
                'modalities other than ["text"] are not supported by this server',
                param="modalities",
                code="unsupported_parameter",
            )
