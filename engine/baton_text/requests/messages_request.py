"""The bodies of Anthropic's POST /v1/messages and /v1/messages/count_tokens.

A body is converted to the chat completion that runs. Fields for Anthropic's own services, such as
`cache_control` and `metadata`, are ignored. Content and tools that this server does not have, such
as images, are refused.
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton_text.chat_messages import CalledFunction, ChatMessage, ToolCall, join_texts
from baton_text.request_error import RequestError, quote
from baton_text.requests.chat_request import ChatCompletionRequest
from baton_text.requests.generation_request import JSONSchemaFormat, ResponseFormat

_THINKING_TYPES = ("enabled", "adaptive", "disabled")
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class ContentBlock(msgspec.Struct, kw_only=True):
    #: Kind of the block: text, tool_use, tool_result, thinking or redacted_thinking, whose data is
    #: ignored.
    type: str
    #: The text of a block of type text.
    text: str | None = None
    #: The text of a block of type thinking.
    thinking: str | None = None
    #: Id of the call of a block of type tool_use.
    id: str = ""
    #: Name of the tool of a block of type tool_use.
    name: str | None = None
    #: Arguments of a block of type tool_use.
    input: dict[str, Any] = {}
    #: Id of the call whose result a block of type tool_result is.
    tool_use_id: str = ""
    #: The result of a call: a text, or blocks of type text.
    content: str | list[ContentBlock] | None = None


class InputMessage(msgspec.Struct, kw_only=True):
    #: Author of the message. Bounds: user, assistant.
    role: str
    #: A text, or blocks.
    content: str | list[ContentBlock]


class MessagesTool(msgspec.Struct, kw_only=True):
    #: Name of the tool. Bounds: 1..64 letters, digits, underscores, dots and hyphens.
    name: str
    #: JSON schema of the arguments.
    input_schema: dict[str, Any] | None = None
    #: What the tool does.
    description: str | None = None
    #: Kind of the tool. Tools that Anthropic runs are refused. Bounds: custom.
    type: str | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    #: auto: the model decides. any: it calls one tool or more. tool: it calls the tool `name`.
    #: none: it calls no tool. Bounds: auto, any, tool, none.
    type: str
    #: Name of the tool of type tool.
    name: str | None = None
    #: Whether an answer has at most one call.
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    #: enabled or adaptive: the response has the reasoning. disabled: the template's variable
    #: enable_thinking is false. Bounds: enabled, adaptive, disabled.
    type: str
    #: Close the reasoning after this many tokens. Bounds: 0 or more.
    budget_tokens: int | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    #: json_schema: the text is JSON of the schema. Bounds: json_schema.
    type: str
    #: The schema. It is required.
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    #: Form of the text.
    format: OutputFormat | None = None


class _Completion(ChatCompletionRequest, kw_only=True):
    """A chat completion request whose `max_tokens` may exceed the space left in the context.

    Clients of Anthropic's API must send `max_tokens`, and many send the same large value for every
    model.
    """

    def max_tokens_field(self) -> None:
        return None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """The fields that determine the prompt: the body of /v1/messages/count_tokens."""

    #: The conversation. The last message is the user's.
    messages: list[InputMessage]
    #: Name of the served model. It may be left out.
    model: str | None = None
    #: The system prompt: a text, or blocks of type text.
    system: str | list[ContentBlock] | None = None
    #: Tools that the answer may call.
    tools: list[MessagesTool] | None = None
    #: Whether the answer calls tools. Unset: auto.
    tool_choice: ToolChoice | None = None
    #: Whether the model reasons. Unset: the template decides, and the response has no reasoning.
    thinking: Thinking | None = None

    @property
    def wants_reasoning(self) -> bool:
        return self.thinking is not None and self.thinking.type != "disabled"

    def validate(self) -> None:
        """Do nothing, because `chat_request` checks all fields."""

    def chat_request(self) -> ChatCompletionRequest:
        """Return the same request as a checked chat completion.

        Raises:
            RequestError: a field is invalid or cannot be converted. `param` names the field.
        """
        request = self._chat_request()
        request.validate()
        return request

    def _chat_request(self) -> ChatCompletionRequest:
        request = _Completion(
            model=self.model,
            messages=self._chat_messages(),
            tools=[_chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or ())],
            include_reasoning=self.wants_reasoning,
        )
        if self.thinking is not None:
            if self.thinking.type not in _THINKING_TYPES:
                raise RequestError(
                    f"thinking.type must be one of {', '.join(_THINKING_TYPES)}, "
                    f"got {quote(self.thinking.type)}",
                    param="thinking.type",
                )
            request.chat_template_kwargs = {"enable_thinking": self.wants_reasoning}
        if (choice := self.tool_choice) is not None:
            request.tool_choice = _chat_tool_choice(choice)
            request.parallel_tool_calls = not choice.disable_parallel_tool_use
        return request

    def _chat_messages(self) -> list[ChatMessage]:
        messages: list[ChatMessage] = []
        if self.system:
            messages.append(ChatMessage(role="system", content=join_texts(self.system, "system")))
        for index, message in enumerate(self.messages):
            where = f"messages[{index}]"
            if message.role == "user":
                messages += _user_messages(message.content, where)
            elif message.role == "assistant":
                messages.append(_assistant_message(message.content, where))
            else:
                raise RequestError(
                    f"{where}.role must be user or assistant, got {quote(message.role)}",
                    param=f"{where}.role",
                )
        if self.messages and self.messages[-1].role == "assistant":
            raise RequestError(
                "the last message must be the user's: this server cannot continue an assistant "
                "message",
                param="messages",
            )
        return messages


class MessagesRequest(CountTokensRequest, kw_only=True):
    #: Limit on generated tokens. It may be more than the rest of the context. Bounds: 1 or more.
    max_tokens: int
    #: Strings that end the text. The text does not contain them.
    stop_sequences: list[str] | None = None
    #: Send the response as server-sent events.
    stream: bool | None = None
    #: Randomness of sampling. 0 selects the most likely token. Bounds: 0..MAX_TEMPERATURE.
    temperature: float | None = None
    #: Sample only from the most likely tokens whose probabilities add up to this value. Bounds:
    #: above 0, at most 1.
    top_p: float | None = None
    #: Sample only from this many most likely tokens. 0: from all.
    top_k: int | None = None
    #: Options of the text.
    output_config: OutputConfig | None = None
    #: The earlier name of `output_config.format`.
    output_format: OutputFormat | None = None

    def release_prompt(self) -> None:
        self.messages = []
        self.system = self.tools = self.tool_choice = None
        self.output_config = self.output_format = None

    def _chat_request(self) -> ChatCompletionRequest:
        request = super()._chat_request()
        request.max_tokens = self.max_tokens
        request.response_format = self._response_format()
        if self.thinking is not None and self.wants_reasoning:
            request.thinking_budget = self.thinking.budget_tokens
        request.stop = self.stop_sequences
        request.stream = self.stream
        request.temperature = self.temperature
        request.top_p = self.top_p
        request.top_k = self.top_k
        return request

    def _response_format(self) -> ResponseFormat | None:
        form, field = self.output_format, "output_format"
        if self.output_config is not None and self.output_config.format is not None:
            if form is not None:
                raise RequestError(
                    "output_format cannot be combined with output_config.format",
                    param="output_format",
                )
            form, field = self.output_config.format, "output_config.format"
        if form is None:
            return None
        if form.type != "json_schema":
            raise RequestError(
                f"{field}.type must be json_schema, got {quote(form.type)}", param=f"{field}.type"
            )
        if form.schema is None:
            raise RequestError(f"{field}.schema is required", param=f"{field}.schema")
        return ResponseFormat(type="json_schema", json_schema=JSONSchemaFormat(schema=form.schema))


def _user_messages(content: str | list[ContentBlock], where: str) -> list[ChatMessage]:
    """Convert a user's content to a message for each tool result, and one for all other text."""
    if isinstance(content, str):
        return [ChatMessage(role="user", content=content)]
    messages: list[ChatMessage] = []
    texts: list[ContentBlock] = []
    for index, block in enumerate(content):
        if block.type == "tool_result":
            result = join_texts(block.content or "", f"{where}.content[{index}].content")
            messages.append(
                ChatMessage(role="tool", content=result, tool_call_id=block.tool_use_id)
            )
        else:
            texts.append(block)
    if texts or not messages:
        messages.append(ChatMessage(role="user", content=join_texts(texts, f"{where}.content")))
    return messages


def _assistant_message(content: str | list[ContentBlock], where: str) -> ChatMessage:
    if isinstance(content, str):
        return ChatMessage(role="assistant", content=content)
    texts: list[ContentBlock] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(content):
        if block.type == "thinking":
            reasoning.append(block.thinking or "")
        elif block.type == "tool_use":
            if block.name is None:
                field = f"{where}.content[{index}].name"
                raise RequestError(f"{field} is required", param=field)
            arguments = msgspec.json.encode(block.input).decode()
            function = CalledFunction(name=block.name, arguments=arguments)
            calls.append(ToolCall(id=block.id, function=function))
        elif block.type != "redacted_thinking":
            texts.append(block)
    return ChatMessage(
        role="assistant",
        content=join_texts(texts, f"{where}.content") if texts or not calls else None,
        reasoning_content="\n".join(reasoning) if reasoning else None,
        tool_calls=calls or None,
    )


def _chat_tool(tool: MessagesTool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise RequestError(
            f"{where}.type {quote(tool.type)} is not supported by this server; use 'custom'",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.input_schema is not None:
        function["parameters"] = tool.input_schema
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type not in _TOOL_CHOICES:
        raise RequestError(
            f"tool_choice.type must be auto, any, tool or none, got {quote(choice.type)}",
            param="tool_choice.type",
        )
    return _TOOL_CHOICES[choice.type]
