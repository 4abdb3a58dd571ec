"""The body of OpenAI's POST /v1/responses.

A body is converted to the chat completion that runs. Content and tools that this server does not
have, such as images and web search, are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from baton_text.chat_messages import CalledFunction, ChatMessage, ToolCall, join_texts
from baton_text.request_error import RequestError, quote
from baton_text.requests.chat_request import ChatCompletionRequest
from baton_text.requests.generation_request import (
    JSONSchemaFormat,
    ResponseFormat,
    check_max_tokens,
)

#: Limit on the JSON of the fields that a response repeats.
MAX_RETURNED_BYTES = 2**18
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_TYPES = ("input_text", "output_text", "text")


class InputPart(msgspec.Struct, kw_only=True):
    #: Kind of the part: input_text or output_text. In items of type reasoning: reasoning_text or
    #: summary_text.
    type: str
    #: The text. It is required.
    text: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    #: Kind of the item. Bounds: message, function_call, function_call_output, reasoning,
    #: item_reference.
    type: str = "message"
    #: Id of the kept item of an item_reference. Ignored in other items.
    id: str | None = None
    #: Author of a message. Bounds: user, assistant, system, developer.
    role: str | None = None
    #: Text of a message, or parts. Of a reasoning item: parts.
    content: str | list[InputPart] | None = None
    #: Summary of a reasoning item, which replaces a missing `content`.
    summary: list[InputPart] = []
    #: Id of a call, in function_call and function_call_output.
    call_id: str = ""
    #: Name of the function of a function_call.
    name: str | None = None
    #: Arguments of a function_call: the JSON text of an object.
    arguments: str = "{}"
    #: Result of a function_call_output: a text, or parts.
    output: str | list[InputPart] | None = None


class ResponseTool(msgspec.Struct, kw_only=True):
    #: Kind of the tool. Bounds: function.
    type: str
    #: Name of the function. Bounds: 1..64 letters, digits, underscores, dots and hyphens.
    name: str | None = None
    #: What the function does.
    description: str | None = None
    #: JSON schema of the arguments. Unset: any object.
    parameters: dict[str, Any] | None = None
    #: Whether arguments must follow the schema, as in chat completions.
    strict: bool | None = None


class TextFormat(JSONSchemaFormat, kw_only=True):
    #: text: any text. json_object: any JSON object. json_schema: see `schema`. Bounds: text,
    #: json_object, json_schema.
    type: str = "text"


class TextOptions(msgspec.Struct, kw_only=True):
    #: Form of the text.
    format: TextFormat | None = None
    #: Ignored.
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    #: As `reasoning_effort` of chat completions.
    effort: str | None = None
    #: Ignored: the response has the reasoning itself.
    summary: str | None = None


class KeptOutput(msgspec.Struct):
    """The output items of a stored response, parsed as input items of a request."""

    output: list[InputItem]


class Earlier(msgspec.Struct):
    """The conversation that a request continues, and the responses that the request refers to."""

    #: The messages of the conversation so far, without instructions.
    messages: list[ChatMessage] = []
    #: The responses to whose items the input refers.
    responses: list[KeptOutput] = []

    def items(self) -> dict[str, InputItem]:
        return {str(item.id): item for response in self.responses for item in response.output}


class ResponsesRequest(msgspec.Struct, kw_only=True):
    #: Names of fields that are refused, unless the value is null, false, 0 or empty.
    UNSUPPORTED: ClassVar[tuple[str, ...]] = (
        "background",
        "conversation",
        "prompt",
        "max_tool_calls",
        "top_logprobs",
    )

    #: A text of the user, or the items of a conversation.
    input: str | list[InputItem]
    #: Name of the served model. It may be left out.
    model: str | None = None
    #: A system message before the conversation. It is not kept for later responses. The response
    #: repeats it, if it has at most MAX_RETURNED_BYTES bytes.
    instructions: str | None = None
    #: Continue the conversation of this response.
    previous_response_id: str | None = None
    #: Keep the conversation for `previous_response_id`. Unset: true.
    store: bool | None = None
    #: Send the response as server-sent events.
    stream: bool | None = None
    #: Limit on generated tokens. Unset: the rest of the context. Bounds: 1 or more.
    max_output_tokens: int | None = None
    #: Randomness of sampling. 0 selects the most likely token. Bounds: 0..MAX_TEMPERATURE.
    temperature: float | None = None
    #: Sample only from the most likely tokens whose probabilities add up to this value. Bounds:
    #: above 0, at most 1.
    top_p: float | None = None
    #: Functions that the answer may call.
    tools: list[ResponseTool] | None = None
    #: auto, required, none, or an object of type function or allowed_tools. Unset: auto.
    tool_choice: Any = None
    #: Whether an answer may have several calls. Unset: true.
    parallel_tool_calls: bool | None = None
    #: Form of the text.
    text: TextOptions | None = None
    #: Options of the reasoning.
    reasoning: ReasoningOptions | None = None
    #: As `thinking_budget` of chat completions (an extension). Bounds: 0 or more.
    thinking_budget: int | None = None
    #: Returned with the response.
    metadata: dict[str, str] | None = None
    #: A conversation that does not fit is refused. Bounds: disabled.
    truncation: str | None = None
    background: Any = None
    conversation: Any = None
    prompt: Any = None
    max_tool_calls: Any = None
    top_logprobs: Any = None

    def release_prompt(self) -> None:
        self.input = ""
        self.tools = self.tool_choice = self.text = self.metadata = self.instructions = None

    def validate(self) -> None:
        """Raise RequestError if a field is invalid."""
        for name in self.UNSUPPORTED:
            if getattr(self, name):
                raise RequestError(
                    f"{name} is not supported by this server",
                    param=name,
                    code="unsupported_parameter",
                )
        if self.truncation not in (None, "disabled"):
            raise RequestError(
                f"truncation must be disabled, got {quote(self.truncation)}", param="truncation"
            )
        check_max_tokens("max_output_tokens", self.max_output_tokens)
        if not self.input and not self.previous_response_id:
            raise RequestError("input must not be empty", param="input")
        returned = (self.metadata, self.tools, self.tool_choice, self.text, self.reasoning)
        if len(msgspec.json.encode(returned)) > MAX_RETURNED_BYTES:
            raise RequestError(
                "metadata, tools, tool_choice, text and reasoning must have at most "
                f"{MAX_RETURNED_BYTES} bytes, because the response repeats them",
                param="tools",
            )

    def referenced_ids(self) -> list[str]:
        """Return the ids in the item references of the input. They name stored output items.

        Raises:
            RequestError: an item_reference has no id, or two references have the same id.
        """
        ids: dict[str, None] = {}
        for index, item in enumerate([] if isinstance(self.input, str) else self.input):
            if item.type != "item_reference":
                continue
            if not item.id or item.id in ids:
                problem = "occurs twice" if item.id else "is required"
                raise RequestError(f"input[{index}].id {problem}", param=f"input[{index}].id")
            ids[item.id] = None
        return list(ids)

    def chat_request(self, earlier: bytes = b"") -> ChatCompletionRequest:
        """Return the same request as a checked chat completion.

        Args:
            earlier: the JSON of `Earlier`. Empty: the request continues no conversation and refers
                to no item of a stored response.

        Raises:
            RequestError: a field is invalid or cannot be converted. `param` names the field.
        """
        kept = msgspec.json.decode(earlier or b"{}", type=Earlier)
        messages: list[ChatMessage] = []
        if self.instructions:
            messages.append(ChatMessage(role="system", content=self.instructions))
        messages += kept.messages
        messages += self.input_messages(kept.items())
        request = ChatCompletionRequest(
            model=self.model,
            messages=messages,
            stream=self.stream,
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            tools=[_chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or ())],
            tool_choice=_chat_tool_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self._response_format(),
            thinking_budget=self.thinking_budget,
        )
        if self.reasoning is not None:
            request.reasoning_effort = self.reasoning.effort
        request.validate()
        return request

    def input_messages(self, kept: Mapping[str, InputItem] = {}) -> list[ChatMessage]:
        """Convert the input, a text or a list of items, to chat messages.

        A function call is added to the preceding message if the assistant sent that message.
        Otherwise, the call gets a new message.

        Args:
            kept: items of stored responses, by id.

        Raises:
            RequestError: an item is invalid, or not in `kept`. `param` names the field.
        """
        if isinstance(self.input, str):
            return [ChatMessage(role="user", content=self.input)] if self.input else []
        messages: list[ChatMessage] = []
        for index, item in enumerate(self.input):
            where = f"input[{index}]"
            if item.type == "item_reference":
                if item.id is None or item.id not in kept:
                    raise RequestError(
                        f"{where}.id: no kept response has this item",
                        param=f"{where}.id",
                        code="previous_response_not_found",
                    )
                item = kept[item.id]
            _add_item(messages, item, where)
        return messages

    def _response_format(self) -> ResponseFormat | None:
        form = None if self.text is None else self.text.format
        if form is None or form.type == "text":
            return None
        if form.type not in ("json_object", "json_schema"):
            raise RequestError(
                "text.format.type must be text, json_object or json_schema, "
                f"got {quote(form.type)}",
                param="text.format.type",
            )
        return ResponseFormat(type=form.type, json_schema=form)


def _add_item(messages: list[ChatMessage], item: InputItem, where: str) -> None:
    """Append an input item to the messages, or add it to the last message.

    Raises:
        RequestError: the item is invalid. `param` names the field.
    """
    if item.type == "message":
        if item.role not in _ROLES:
            raise RequestError(
                f"{where}.role must be one of {', '.join(_ROLES)}, got {quote(item.role)}",
                param=f"{where}.role",
            )
        content = _text(item.content, f"{where}.content")
        last = messages[-1] if messages else None
        if item.role == "assistant" and last is not None and _has_only_reasoning(last):
            last.content = content
        else:
            messages.append(ChatMessage(role=item.role, content=content))
    elif item.type == "reasoning":
        parts = item.content or item.summary
        text = _text(parts, f"{where}.content", ("reasoning_text", "summary_text"))
        messages.append(ChatMessage(role="assistant", content="", reasoning_content=text))
    elif item.type == "function_call":
        if item.name is None:
            raise RequestError(f"{where}.name is required", param=f"{where}.name")
        function = CalledFunction(name=item.name, arguments=item.arguments)
        call = ToolCall(id=item.call_id, function=function)
        if not messages or messages[-1].role != "assistant":
            messages.append(ChatMessage(role="assistant", content=None))
        message = messages[-1]
        message.content = message.content or None
        message.tool_calls = message.tool_calls or []
        message.tool_calls.append(call)
    elif item.type == "function_call_output":
        result = _text(item.output, f"{where}.output")
        messages.append(ChatMessage(role="tool", content=result, tool_call_id=item.call_id))
    else:
        raise RequestError(
            f"{where}.type {quote(item.type)} is not supported by this server",
            param=f"{where}.type",
            code="unsupported_parameter",
        )


def _has_only_reasoning(message: ChatMessage) -> bool:
    return message.reasoning_content is not None and not (message.content or message.tool_calls)


def _text(
    content: str | list[InputPart] | None, where: str, types: tuple[str, ...] = _TEXT_TYPES
) -> str:
    """Return `content` as one text. The texts of parts are joined with line breaks.

    Raises:
        RequestError: `content` is None, a part's type is not in `types`, or a part has no text.
    """
    if content is None:
        raise RequestError(f"{where} is required", param=where)
    return join_texts(content, where, types)


def _chat_tool(tool: ResponseTool, where: str) -> dict[str, Any]:
    if tool.type != "function":
        raise RequestError(
            f"{where}.type must be 'function', got {quote(tool.type)}",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {
        "type": "function",
        "function": {name: value for name, value in function.items() if value is not None},
    }


def _chat_tool_choice(choice: Any) -> Any:
    """Convert a `tool_choice` of /v1/responses to the form of chat completions."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "allowed_tools":
        return _chat_tool_name(choice)
    tools = choice.get("tools")
    named = [_chat_tool_name(tool) for tool in tools] if isinstance(tools, list) else []
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}


def _chat_tool_name(tool: Any) -> Any:
    if not isinstance(tool, dict):
        return tool
    return {"type": tool.get("type"), "function": {"name": tool.get("name")}}
