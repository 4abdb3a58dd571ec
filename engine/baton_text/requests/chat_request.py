"""The body of POST /v1/chat/completions."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import msgspec

from baton_protocol.sampling_params import MAX_LOGPROBS
from baton_text.chat_messages import ChatMessage, template_messages
from baton_text.request_error import RequestError, quote
from baton_text.requests.generation_request import GenerationRequest, check_max_tokens

#: OpenAI's limit.
MAX_TOOLS = 128
MAX_EFFORT_LENGTH = 64
_TOOL_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


class ToolFunction(msgspec.Struct, kw_only=True):
    #: Name of the function. Bounds: 1..64 letters, digits, underscores, dots and hyphens.
    name: str
    #: What the function does.
    description: str | None = None
    #: JSON schema of the arguments. Unset: any object.
    parameters: dict[str, Any] | None = None
    #: Whether arguments must follow the schema. They do in all cases in which the model's calls
    #: have a grammar.
    strict: bool | None = None


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    UNSUPPORTED: ClassVar[tuple[str, ...]] = (
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
    #: `none` sets the template's variable enable_thinking to false. Other values are passed as its
    #: variable reasoning_effort. `chat_template_kwargs` takes precedence.
    reasoning_effort: str | None = None
    #: Tools that the answer may call. Passed to the chat template as they are.
    tools: list[dict[str, Any]] | None = None
    #: auto: the model decides whether to call tools. required: it calls one or more. none: it gets
    #: no tools. An object with the name of a function: it calls this function. An object of type
    #: allowed_tools: only the listed tools may be called, with the mode auto or required. Unset:
    #: auto.
    tool_choice: Any = None
    #: Whether an answer may have several calls. Unset: true.
    parallel_tool_calls: bool | None = None
    #: Whether the response has the reasoning of the model. Unset: true.
    include_reasoning: bool | None = None
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

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables for the chat template, from `reasoning_effort` and `chat_template_kwargs`."""
        variables: dict[str, Any] = {}
        if self.reasoning_effort == "none":
            variables["enable_thinking"] = False
        elif self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        return variables | (self.chat_template_kwargs or {})

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools for the chat template; None if the request has none, or forbids calls."""
        return (self.tools or None) if self.tool_choice != "none" else None

    @property
    def requires_tool_call(self) -> bool:
        """Whether `tool_choice` requires an answer that consists only of tool calls."""
        return self.names_tool or self._tool_mode == "required"

    @property
    def names_tool(self) -> bool:
        """Whether `tool_choice` names the one function that the answer must call."""
        return isinstance(self.tool_choice, dict) and self.tool_choice["type"] == "function"

    @property
    def _tool_mode(self) -> Any:
        choice = self.tool_choice
        return choice["allowed_tools"]["mode"] if isinstance(choice, dict) else choice

    def callable_tools(self) -> list[ToolFunction]:
        """Return the functions that the answer may call.

        If `tool_choice` is an object, only the functions that it names are returned.
        """
        choice = self.tool_choice
        if choice == "none":
            return []
        functions = [msgspec.convert(tool["function"], ToolFunction) for tool in self.tools or ()]
        if not isinstance(choice, dict):
            return functions
        named = [choice] if self.names_tool else choice["allowed_tools"]["tools"]
        names = {tool["function"]["name"] for tool in named}
        return [function for function in functions if function.name in names]

    def release_prompt(self) -> None:
        super().release_prompt()
        self.messages = []
        self.tools = self.tool_choice = self.chat_template_kwargs = None

    def validate(self) -> None:
        super().validate()
        self._validate_tools()
        if len(self.reasoning_effort or "") > MAX_EFFORT_LENGTH:
            raise RequestError(
                f"reasoning_effort must have at most {MAX_EFFORT_LENGTH} characters",
                param="reasoning_effort",
            )
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

    def _validate_tools(self) -> None:
        tools = self.tools or []
        if len(tools) > MAX_TOOLS:
            raise RequestError(
                f"tools must have at most {MAX_TOOLS} entries, got {len(tools)}", param="tools"
            )
        names: set[str] = set()
        for index, tool in enumerate(tools):
            names.add(_check_tool(tool, f"tools[{index}]", names))
        choice = self.tool_choice
        if isinstance(choice, dict):
            _check_tool_choice(choice, names)
        elif choice not in (None, "none", "auto", "required"):
            raise RequestError(
                f"tool_choice must be none, auto, required or a function, got {quote(choice)}",
                param="tool_choice",
            )
        elif choice == "required" and not tools:
            raise RequestError("tool_choice required needs tools", param="tool_choice")
        structure = self.structured_output_field()
        has_tools = bool(self.callable_tools())
        if structure not in (None, "response_format") and has_tools:
            raise RequestError(f"{structure} cannot be combined with tools", param=structure)
        if has_tools and self.use_beam_search:
            raise RequestError("tools cannot be combined with use_beam_search", param="tools")

    def _refuse_unsupported(self) -> None:
        super()._refuse_unsupported()
        if self.modalities not in (None, ["text"]):
            raise RequestError(
                'modalities other than ["text"] are not supported by this server',
                param="modalities",
                code="unsupported_parameter",
            )


def _check_tool_choice(choice: dict[str, Any], names: set[str]) -> None:
    """Raise RequestError unless `choice` names one or more tools, all of them in `names`."""
    named: Any = [choice]
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        mode, named = (
            (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, [])
        )
        if mode not in ("auto", "required"):
            raise RequestError(
                f"tool_choice.allowed_tools.mode must be auto or required, got {quote(mode)}",
                param="tool_choice",
            )
    if not isinstance(named, list) or not named or any(_name(tool) not in names for tool in named):
        raise RequestError(
            "tool_choice must name a function of tools, as "
            '{"type": "function", "function": {"name": ...}}, or several in allowed_tools.tools',
            param="tool_choice",
        )


def _name(tool: Any) -> str | None:
    """Return the function name of `tool`, or None if `tool` is not a valid function entry."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        return None
    name = function.get("name")
    return name if isinstance(name, str) else None


def _check_tool(tool: dict[str, Any], where: str, earlier: set[str]) -> str:
    """Check a tool and return its name.

    Raises:
        RequestError: the tool is not a function, or another tool has its name.
    """
    if tool.get("type") != "function":
        raise RequestError(
            f"{where}.type must be 'function', got {quote(tool.get('type'))}",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    try:
        function = msgspec.convert(tool.get("function"), ToolFunction)
    except msgspec.ValidationError as error:
        raise RequestError(f"{where}.function: {error}", param=f"{where}.function") from error
    field = f"{where}.function.name"
    if not _TOOL_NAME.fullmatch(function.name):
        raise RequestError(
            f"{field} must be 1 to 64 letters, digits, underscores, dots or hyphens", param=field
        )
    if function.name in earlier:
        raise RequestError(f"{field}: two tools are named {function.name}", param=field)
    return function.name
