"""OpenAI requests: JSON bodies as structs, checked field by field.

Fields this server does not know are ignored, as OpenAI-compatible servers do, so that clients of every version work. Fields
that would change the answer and are not supported here are refused by name: an answer that silently ignores them would be wrong.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from baton_engine.protocol.sampling import MAX_LOGPROBS, SamplingParams

MAX_N = 128
MAX_STOPS = 4
MAX_TEMPERATURE = 2.0
COMPLETION_DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; chat completions may fill the context."""

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class RequestError(ValueError):
    """The request is wrong.

    Args:
        message: what is wrong, and what would be right.
        param: the field, like `messages[0].content`.
        code: OpenAI's machine-readable code, where there is one.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    tool_calls: Any = None
    """Any: only looked at to be refused."""
    function_call: Any = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What completions and chat completions have in common. `None` is what JSON null and a missing field mean."""

    model: str
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    return_token_ids: bool | None = None
    """Also answer with the generated ids, the one that ended it included (vLLM's extension)."""
    priority: int | None = None
    cache_salt: str | None = None
    # Refused when they ask for something; Any, for nothing else is read from them.
    prompt_logprobs: Any = None
    use_beam_search: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    response_format: Any = None

    @property
    def num_samples(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def num_sequences(self) -> int:
        """What it asks for in all: n samples of every prompt."""
        return self.num_samples

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def requested_max_tokens(self) -> int | None:
        """None: as many as the context holds."""
        return self.max_tokens

    def requested_logprobs(self) -> int | None:
        """How many alternatives per token to report; None: no logprobs at all."""
        raise NotImplementedError

    def validate(self) -> None:
        """Raises RequestError naming the first field that is wrong."""
        self._refuse_unsupported()
        if not 1 <= self.num_samples <= MAX_N:
            raise RequestError(f"n must be in [1, {MAX_N}], got {self.n}", param="n")
        if self.temperature is not None and not 0.0 <= self.temperature <= MAX_TEMPERATURE:
            raise RequestError(
                f"temperature must be in [0, {MAX_TEMPERATURE:g}], got {self.temperature}", param="temperature"
            )
        if len(self.stops) > MAX_STOPS:
            raise RequestError(f"stop takes at most {MAX_STOPS} strings, got {len(self.stops)}", param="stop")
        if any(not stop for stop in self.stops):
            raise RequestError("stop must not hold an empty string", param="stop")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed with stream=true", param="stream_options")
        for name in ("priority", "top_k"):
            value = getattr(self, name)
            if value is not None and not -(2**31) <= value < 2**31:
                raise RequestError(f"{name} must fit 32 bits, got {value}", param=name)
        if any(token_id < 0 for token_id in self.stop_token_ids or []):
            raise RequestError("stop_token_ids must not be negative", param="stop_token_ids")

    def sampling_params(self, *, seed: int, max_tokens: int) -> SamplingParams:
        """What one sequence of this request asks of the engine.

        Raises:
            RequestError: a bound of SamplingParams is broken; `param` is the field.
        """
        params = SamplingParams(
            temperature=_default(self.temperature, 1.0),
            top_p=_default(self.top_p, 1.0),
            top_k=_default(self.top_k, 0),
            min_p=_default(self.min_p, 0.0),
            seed=seed,
            max_tokens=max_tokens,
            min_tokens=_default(self.min_tokens, 0),
            stop_token_ids=list(self.stop_token_ids or []),
            ignore_eos=bool(self.ignore_eos),
            presence_penalty=_default(self.presence_penalty, 0.0),
            frequency_penalty=_default(self.frequency_penalty, 0.0),
            repetition_penalty=_default(self.repetition_penalty, 1.0),
            logit_bias=self._logit_bias(),
            logprobs=self.requested_logprobs(),
        )
        try:
            params.validate()
        except ValueError as error:
            message = str(error)
            raise RequestError(message, param=message.split(" ", 1)[0]) from error
        return params

    def _logit_bias(self) -> dict[int, float] | None:
        if not self.logit_bias:
            return None
        try:
            return {int(token_id): bias for token_id, bias in self.logit_bias.items()}
        except ValueError as error:
            raise RequestError(f"logit_bias keys must be token ids: {error}", param="logit_bias") from error

    def _refuse_unsupported(self) -> None:
        for name in self._unsupported():
            if getattr(self, name):
                raise RequestError(f"{name} is not supported by this server", param=name, code="unsupported_parameter")
        kind = self.response_format.get("type") if isinstance(self.response_format, dict) else self.response_format
        if kind not in (None, "text"):
            raise RequestError(
                f"response_format of type {kind!r} is not supported by this server; use 'text'",
                param="response_format",
                code="unsupported_parameter",
            )

    def _unsupported(self) -> tuple[str, ...]:
        return (
            "prompt_logprobs",
            "use_beam_search",
            "bad_words",
            "allowed_token_ids",
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
        )


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the template, such as enable_thinking."""
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    continue_final_message: Any = None

    def requested_max_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def requested_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def validate(self) -> None:
        super().validate()
        field = "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens"
        _check_max_tokens(field, self.requested_max_tokens())
        if self.top_logprobs is not None:
            if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
                raise RequestError(
                    f"top_logprobs must be in [0, {MAX_LOGPROBS}], got {self.top_logprobs}", param="top_logprobs"
                )
            if not self.logprobs:
                raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
        if not self.messages:
            raise RequestError("messages must not be empty", param="messages")
        for index, message in enumerate(self.messages):
            _check_message(message, f"messages[{index}]")

    def template_messages(self) -> list[dict[str, Any]]:
        """Messages as chat templates take them: text parts become one text."""
        return [_template_message(message) for message in self.messages]

    def _refuse_unsupported(self) -> None:
        super()._refuse_unsupported()
        if self.tool_choice not in (None, "none", "auto"):
            raise RequestError(
                "tool_choice is not supported by this server", param="tool_choice", code="unsupported_parameter"
            )
        if self.modalities not in (None, ["text"]):
            raise RequestError(
                'modalities other than ["text"] are not supported by this server',
                param="modalities",
                code="unsupported_parameter",
            )

    def _unsupported(self) -> tuple[str, ...]:
        chat_only = ("tools", "functions", "function_call", "audio", "prediction", "web_search_options")
        return (*super()._unsupported(), *chat_only, "chat_template", "continue_final_message")


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    best_of: int | None = None
    suffix: Any = None

    @property
    def num_sequences(self) -> int:
        return self.num_samples * len(self.prompts())

    def requested_max_tokens(self) -> int | None:
        return COMPLETION_DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def requested_logprobs(self) -> int | None:
        return self.logprobs

    def validate(self) -> None:
        super().validate()
        _check_max_tokens("max_tokens", self.max_tokens)
        if self.best_of is not None and self.best_of != self.num_samples:
            raise RequestError(
                "best_of other than n is not supported by this server", param="best_of", code="unsupported_parameter"
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise RequestError(f"logprobs must be in [0, {MAX_LOGPROBS}], got {self.logprobs}", param="logprobs")
        if self.echo and self.logprobs is not None:
            raise RequestError(
                "echo with logprobs is not supported by this server: prompt tokens have no logprobs here",
                param="echo",
                code="unsupported_parameter",
            )
        self.prompts()

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            prompts: list[str | list[int]] = [prompt]
        elif prompt and all(isinstance(item, int) for item in prompt):
            prompts = [[item for item in prompt if isinstance(item, int)]]
        elif all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt):
            prompts = [item for item in prompt if not isinstance(item, int)]
        else:
            raise RequestError(
                "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids",
                param="prompt",
            )
        if not prompts or any(len(item) == 0 for item in prompts if isinstance(item, list)):
            raise RequestError("prompt must not be empty", param="prompt")
        return prompts

    def _unsupported(self) -> tuple[str, ...]:
        return (*super()._unsupported(), "suffix")


_Request = TypeVar("_Request", bound=GenerationRequest)

_MSGSPEC_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>.*)`)?$", re.DOTALL)
_MISSING_FIELD = re.compile(r"missing required field `(\w+)`")


def parse_request(body: bytes, kind: type[_Request]) -> _Request:
    """A request from its JSON body, fully checked.

    Raises:
        RequestError: malformed JSON, a wrong type, or a value out of bounds, with the field's name.
    """
    try:
        request = msgspec.json.decode(body, type=kind)
    except RecursionError as error:
        raise RequestError("The body is nested too deeply", code="invalid_json") from error
    except msgspec.ValidationError as error:
        raise _validation_error(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"The body is not valid JSON: {error}", code="invalid_json") from error
    request.validate()
    return request


def _validation_error(text: str) -> RequestError:
    """`Expected `int`, got `str` - at `$.n`` -> n, and a sentence that begins with it."""
    match = _MSGSPEC_PATH.match(text)
    assert match is not None  # the pattern matches every text
    what = match["what"].replace("`", "")
    path = (match["path"] or "$").split("` in `")[-1].removeprefix("$").removeprefix(".")
    missing = _MISSING_FIELD.search(match["what"])
    if missing is not None:
        name = f"{path}.{missing[1]}" if path else missing[1]
        return RequestError(f"{name} is required", param=name, code="missing_required_parameter")
    if not path:
        return RequestError(f"The body must be a JSON object: {what}", code="invalid_type")
    path = path.replace("[...]", "")
    return RequestError(f"{path}: {what[:1].lower()}{what[1:]}", param=path, code="invalid_type")


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _check_max_tokens(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise RequestError(f"{name} must be at least 1, got {value}", param=name)


def _check_message(message: ChatMessage, where: str) -> None:
    if message.role not in ROLES:
        raise RequestError(
            f"{where}.role must be one of {', '.join(sorted(ROLES))}, got {message.role!r}", param=f"{where}.role"
        )
    for name in ("tool_calls", "function_call"):
        if getattr(message, name):
            raise RequestError(
                f"{where}.{name} is not supported by this server", param=f"{where}.{name}", code="unsupported_parameter"
            )
    if message.content is None:
        raise RequestError(f"{where}.content is required", param=f"{where}.content")
    if isinstance(message.content, str):
        return
    for index, part in enumerate(message.content):
        if part.type != "text":
            raise RequestError(
                f"{where}.content[{index}].type {part.type!r} is not supported by this server; use 'text'",
                param=f"{where}.content[{index}].type",
                code="unsupported_parameter",
            )
        if part.text is None:
            raise RequestError(f"{where}.content[{index}].text is required", param=f"{where}.content[{index}].text")


def _template_message(message: ChatMessage) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text or "" for part in content)
    optional = {
        "name": message.name,
        "reasoning_content": message.reasoning_content,
        "tool_call_id": message.tool_call_id,
    }
    return {"role": message.role, "content": content} | {k: v for k, v in optional.items() if v is not None}
