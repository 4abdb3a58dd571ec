"""The fields that chat completions and completions of the OpenAI API share, and their checks.

Unknown fields are ignored, as in other OpenAI-compatible servers, so that clients of all versions
work. The gateway counts and logs unknown fields at the top level of a body. A known field that is
not supported and would change the response is refused. The error names the field.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import msgspec

from baton_protocol.sampling_params import (
    MAX_BEAM_WIDTH,
    RepetitionDetection,
    SamplingParams,
    StructuredOutput,
)
from baton_text.request_error import RequestError, quote
from baton_text.requests.structured_outputs import StructuredOutputsParams, check_bad_words

MAX_N = 128
MAX_STOPS = 32
#: Limit on the characters of all stop strings. It bounds the cost of comparing each piece of text
#: with them.
MAX_STOP_CHARACTERS = 512
MAX_TEMPERATURE = 2.0
MAX_CACHE_SALT_LENGTH = 1024
#: Limit on the logprobs of prompt tokens in one response: up to 90 MB of JSON.
MAX_LOGPROB_ENTRIES = 2**18
#: Limit on the logprobs of generated tokens in a response that is not streamed: 20 to 130 MB of
#: JSON.
MAX_RESPONSE_LOGPROBS = 2**18
#: Limit on the entries of logit_bias and allowed_token_ids and on the characters of bad_words, over
#: all sequences of a request. The engine keeps a copy for each sequence.
MAX_OPTION_ENTRIES = 2**20
#: MAX_OPTION_ENTRIES does not apply if one sequence has at most this many entries.
FREE_OPTION_ENTRIES = 2**10

#: Exactly one text matches for each id, so two keys of logit_bias never have the same id.
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
#: Fields that may have very many entries.
_LONG_OPTIONS = ("logit_bias", "allowed_token_ids", "bad_words")
#: Matches the name of the field at the start of an engine's error with ErrorCode.INVALID.
_ENGINE_FIELD = re.compile(r"([a-z_]+)(\.[a-z_]+)*")
#: Fields that requests and engines name differently: the engine's name, and the request's name.
_CLIENT_NAMES = {"bad_words_token_ids": "bad_words", "beam_width": "n"}
#: Request fields that are copied to the field of `SamplingParams` with the same name. The defaults
#: are in `SamplingParams`.
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "length_penalty",
    "early_stopping",
)


class StreamOptions(msgspec.Struct, kw_only=True):
    #: Send a last chunk with `usage`.
    include_usage: bool | None = None
    #: With `include_usage`: each chunk has `usage` so far (vLLM's extension).
    continuous_usage_stats: bool | None = None


class JSONSchemaFormat(msgspec.Struct, kw_only=True):
    #: Ignored.
    name: str | None = None
    #: Ignored.
    description: str | None = None
    #: The JSON schema. Type json_schema requires it.
    schema: dict[str, Any] | None = None
    #: Ignored: the text always follows the schema.
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    #: text: any text. json_object: any JSON object. json_schema: see `json_schema`. Bounds: text,
    #: json_object, json_schema.
    type: str
    #: The schema of type json_schema.
    json_schema: JSONSchemaFormat | None = None


class RepetitionDetectionParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Condition that ends an answer: its last tokens repeat one pattern `min_count` times."""

    #: Length of the longest pattern to detect, in tokens. Bounds: 1..MAX_PATTERN_SIZE.
    max_pattern_size: int
    #: Length of the shortest pattern to detect, in tokens. Bounds: 1..max_pattern_size.
    min_pattern_size: int = 1
    #: Number of repetitions that end the answer. Bounds: 2..MAX_PATTERN_COUNT.
    min_count: int = 2


class GenerationRequest(msgspec.Struct, kw_only=True):
    """The fields that completions and chat completions share.

    A field that is null or missing in the JSON is None.
    """

    #: Names of fields that are refused, unless the value is null, false, 0 or empty.
    UNSUPPORTED: ClassVar[tuple[str, ...]] = ()

    #: Name of the served model. It may be left out.
    model: str | None = None
    #: Number of choices for each prompt, at most 64 with `use_beam_search`. Unset: 1. Bounds:
    #: 1..MAX_N.
    n: int | None = None
    #: Send the response as server-sent events.
    stream: bool | None = None
    #: Options of the stream. They need `stream`.
    stream_options: StreamOptions | None = None
    #: Randomness of sampling. 0 selects the most likely token. Bounds: 0..MAX_TEMPERATURE.
    temperature: float | None = None
    #: Sample only from the most likely tokens whose probabilities add up to this value. Bounds:
    #: above 0, at most 1.
    top_p: float | None = None
    #: Sample only from this many most likely tokens. 0 or -1: from all. Bounds: -1 or more.
    top_k: int | None = None
    #: Leave out tokens with less than this fraction of the most likely token's probability. Bounds:
    #: 0..1.
    min_p: float | None = None
    #: Seed of sampling. Unset: the gateway draws one. Bounds: 64 bits.
    seed: int | None = None
    #: Limit on generated tokens. Unset: DEFAULT_MAX_TOKENS for completions, the rest of the context
    #: for chat completions. Bounds: 1 or more, or 0 for completions with `echo`.
    max_tokens: int | None = None
    #: EOS, stop tokens and stop strings do not end the text before this many tokens. Bounds:
    #: 0..max_tokens.
    min_tokens: int | None = None
    #: Strings that end the text. The text does not contain them, unless
    #: `include_stop_str_in_output` is true.
    stop: str | list[str] | None = None
    #: Tokens that end the text, in addition to the model's EOS.
    stop_token_ids: list[int] | None = None
    #: Continue after the model's EOS.
    ignore_eos: bool | None = None
    #: Include the stop string or stop token in the text.
    include_stop_str_in_output: bool | None = None
    #: Leave special tokens out of the text. Unset: true.
    skip_special_tokens: bool | None = None
    #: Subtracted from the logits of tokens that the text contains. Bounds: -2..2.
    presence_penalty: float | None = None
    #: Subtracted from the logits of tokens, once for each occurrence in the text. Bounds: -2..2.
    frequency_penalty: float | None = None
    #: Above 1: tokens of the prompt and the text become less likely. Bounds: above 0, at most 1000.
    repetition_penalty: float | None = None
    #: Numbers to add to logits, by token id. Bounds: -100..100.
    logit_bias: dict[str, float] | None = None
    #: Return the generated token ids, including the id that ended the text (vLLM's extension).
    return_token_ids: bool | None = None
    #: Requests with lower values run first. The gateway refuses values below
    #: `gateway.limits.minPriority`, 0 by default. Bounds: 32 bits.
    priority: int | None = None
    #: The rank that serves the request (vLLM's extension). The header `X-Data-Parallel-Rank` has
    #: the same meaning. Unset: any rank.
    data_parallel_rank: int | None = None
    #: Only requests with the same salt share cached blocks of the prefix. With API keys, they must
    #: also be requests of one client (`gateway.apiKeys.cacheSharing`).
    cache_salt: str | None = None
    #: Number of samples to compute. The n samples with the highest log-probability per token are
    #: returned. Bounds: n..MAX_N.
    best_of: int | None = None
    #: Report the log-probability of each prompt token, and of this many most likely tokens at the
    #: same position. Not available with `stream`. Bounds: 0..MAX_LOGPROBS.
    prompt_logprobs: int | None = None
    #: Words that are never generated.
    bad_words: list[str] | None = None
    #: Sample only these tokens.
    allowed_token_ids: list[int] | None = None
    #: End an answer that repeats itself.
    repetition_detection: RepetitionDetectionParams | None = None
    #: Close the reasoning after this many tokens, if the model reasons. Bounds: 0 or more.
    thinking_budget: int | None = None
    #: Return the n best beams of a search of width n.
    use_beam_search: bool | None = None
    #: Beam search: scores are divided by `length ** length_penalty`. Bounds: -10..10.
    length_penalty: float | None = None
    #: Beam search: end when n beams are finished.
    early_stopping: bool | None = None
    #: OpenAI's form of structured outputs.
    response_format: ResponseFormat | None = None
    #: vLLM's form of structured outputs.
    structured_outputs: StructuredOutputsParams | None = None
    #: Short for `structured_outputs.json`.
    guided_json: dict[str, Any] | str | bool | None = None
    #: Short for `structured_outputs.regex`.
    guided_regex: str | None = None
    #: Short for `structured_outputs.choice`.
    guided_choice: list[str] | None = None
    #: Short for `structured_outputs.grammar`.
    guided_grammar: str | None = None

    @property
    def num_samples(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def num_candidates(self) -> int:
        """Number of sequences to compute for each prompt: the larger of n and best_of."""
        return max(self.num_samples, self.best_of or 0)

    @property
    def num_sequences(self) -> int:
        """Number of sequences to compute for the request, over all prompts."""
        return self.num_candidates

    @property
    def num_options(self) -> int:
        """Number of entries of `logit_bias`, `allowed_token_ids` and `bad_words` in all sequences.

        Each character of `bad_words` is an entry. All sequences have the same entries. If these
        are at most FREE_OPTION_ENTRIES per sequence, the number is 0.
        """
        num_entries = sum(self._num_entries(name) for name in _LONG_OPTIONS)
        return num_entries * self.num_sequences if num_entries > FREE_OPTION_ENTRIES else 0

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def is_prompt_only(self) -> bool:
        """Whether the response has only the prompt and its logprobs, and no generated text."""
        return False

    def requested_max_tokens(self) -> int | None:
        """Return the request's limit on generated tokens. None: the request sets no limit."""
        return self.max_tokens

    def max_tokens_field(self) -> str | None:
        """Return the name of the field that limits the generated tokens; None if none is set."""
        return None if self.max_tokens is None else "max_tokens"

    def requested_logprobs(self) -> int | None:
        """Return how many alternatives to report for each generated token.

        0 means only the token itself. None means no logprobs.
        """
        raise NotImplementedError

    def requested_prompt_logprobs(self) -> int | None:
        """Return how many alternatives to report for each prompt token.

        0 means only the token itself. None means no logprobs.
        """
        return self.prompt_logprobs

    def release_prompt(self) -> None:
        """Drop values that are needed only to build the prompt and the sampling parameters.

        Fields of structured outputs keep a placeholder, so `refusal` can still name them.
        """
        if self.response_format is not None:
            self.response_format.json_schema = None
        if self.structured_outputs is not None and self.structured_outputs.given():
            self.structured_outputs = StructuredOutputsParams(json_object=True)
        for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar"):
            if getattr(self, name) is not None:
                setattr(self, name, "")
        self.logit_bias = self.allowed_token_ids = self.stop_token_ids = self.bad_words = None

    def validate(self) -> None:
        """Check all fields.

        Raises:
            RequestError: a field is invalid. `param` names the first invalid field.
        """
        self._refuse_unsupported()
        if not 1 <= self.num_samples <= MAX_N:
            raise RequestError(f"n must be in [1, {MAX_N}], got {self.n}", param="n")
        if self.temperature is not None and not 0.0 <= self.temperature <= MAX_TEMPERATURE:
            raise RequestError(
                f"temperature must be in [0, {MAX_TEMPERATURE:g}], got {self.temperature}",
                param="temperature",
            )
        self._validate_stops()
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options is only allowed with stream=true", param="stream_options"
            )
        self._validate_search()
        self._validate_long_options()
        self.structured_output()
        check_32_bits("priority", self.priority)
        check_32_bits("top_k", self.top_k)
        check_32_bits("thinking_budget", self.thinking_budget)
        if self.thinking_budget is not None and self.thinking_budget < 0:
            raise RequestError(
                f"thinking_budget must not be negative, got {self.thinking_budget}",
                param="thinking_budget",
            )
        for name in ("stop_token_ids", "allowed_token_ids"):
            if any(token_id < 0 for token_id in getattr(self, name) or []):
                raise RequestError(f"{name} must not be negative", param=name)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids must not be empty: nothing could be sampled",
                param="allowed_token_ids",
            )
        try:
            check_bad_words(self.bad_words or [])
        except ValueError as error:
            raise RequestError(str(error), param="bad_words") from error
        check_cache_salt(self.cache_salt)
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError(
                "prompt_logprobs is not available with stream=true", param="prompt_logprobs"
            )

    def _validate_stops(self) -> None:
        """Raise RequestError if there are too many stop strings, or one is empty or too long."""
        if len(self.stops) > MAX_STOPS:
            raise RequestError(
                f"stop takes at most {MAX_STOPS} strings, got {len(self.stops)}", param="stop"
            )
        if any(not stop for stop in self.stops):
            raise RequestError("stop must not hold an empty string", param="stop")
        num_characters = sum(map(len, self.stops))
        if num_characters > MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop takes strings of at most {MAX_STOP_CHARACTERS} characters together, "
                f"got {num_characters}",
                param="stop",
            )

    def _validate_long_options(self) -> None:
        """Raise RequestError if `num_options` is above its limit."""
        if self.num_options > MAX_OPTION_ENTRIES:
            longest = max(_LONG_OPTIONS, key=self._num_entries)
            raise RequestError(
                f"{', '.join(_LONG_OPTIONS)} have {self.num_options} entries over "
                f"{self.num_sequences} sequences, and at most {MAX_OPTION_ENTRIES} are allowed; "
                "send fewer sequences at once",
                param=longest,
            )

    def _num_entries(self, name: str) -> int:
        value = getattr(self, name) or ()
        return sum(map(len, value)) if name == "bad_words" else len(value)

    def _validate_search(self) -> None:
        """Raise RequestError if best_of or an option of beam search is invalid."""
        if self.best_of is not None:
            if not self.num_samples <= self.best_of <= MAX_N:
                raise RequestError(
                    f"best_of must be in [n={self.num_samples}, {MAX_N}], got {self.best_of}",
                    param="best_of",
                )
            if self.stream and self.best_of > self.num_samples:
                raise RequestError(
                    "best_of greater than n is not available with stream=true",
                    param="best_of",
                )
        if self.use_beam_search:
            if self.num_samples > MAX_BEAM_WIDTH:
                raise RequestError(
                    f"n must be at most {MAX_BEAM_WIDTH} with use_beam_search, got {self.n}: n is "
                    "the width of the search",
                    param="n",
                )
            if self.best_of not in (None, self.num_samples):
                raise RequestError(
                    "best_of must be unset or equal to n with use_beam_search", param="best_of"
                )
            structure = self.structured_output_field()
            if structure is None and self.thinking_budget is not None:
                structure = "thinking_budget"
            if structure is not None:
                raise RequestError(
                    f"{structure} cannot be combined with use_beam_search", param=structure
                )
            return
        for name in ("length_penalty", "early_stopping"):
            if getattr(self, name) is not None:
                raise RequestError(f"{name} needs use_beam_search=true", param=name)

    def sampling_params(
        self, *, seed: int, max_tokens: int, bad_words_token_ids: list[list[int]] | None = None
    ) -> SamplingParams:
        """Return the engine's sampling parameters for one sequence of the request.

        Args:
            seed: seed of the sampling noise.
            max_tokens: limit on generated tokens.
            bad_words_token_ids: token sequences of `bad_words`, none of which is generated. None:
                no bad words.

        Raises:
            RequestError: a value is outside the bounds of SamplingParams. `param` names the field.
        """
        logprobs = self.requested_logprobs()
        params = SamplingParams(
            **{
                name: value
                for name in SAMPLING_FIELDS
                if (value := getattr(self, name)) is not None
            },
            seed=seed,
            max_tokens=max_tokens,
            logit_bias=self._logit_bias(),
            logprobs=0 if logprobs is None and self.num_candidates > self.num_samples else logprobs,
            prompt_logprobs=self.requested_prompt_logprobs(),
            bad_words_token_ids=bad_words_token_ids or None,
            repetition_detection=self._repetition_detection(),
            structured_output=self.structured_output(),
            beam_width=self.num_samples if self.use_beam_search else 0,
        )
        try:
            params.validate()
        except ValueError as error:
            raise self.refusal(str(error)) from error
        return params

    def refusal(self, message: str) -> RequestError:
        """Convert an engine's error with ErrorCode.INVALID to an error for the client.

        Args:
            message: the engine's error message. If the message begins with a field of
                SamplingParams, the returned error names the corresponding field of the request.
        """
        match = _ENGINE_FIELD.match(message)
        path, name = (match[0], match[1]) if match else ("", "")
        field = (
            self.structured_output_field()
            if name == "structured_output"
            else _CLIENT_NAMES.get(name, name)
        )
        if field is None or field not in self.__struct_fields__:
            return RequestError(message)
        # A field with the same name in the engine has the same subfields, so the path is kept.
        return RequestError(field + message[len(name if field == name else path) :], param=field)

    def check_prompt_logprobs(self, num_prompt_tokens: int) -> None:
        """Check that the response would not have too many prompt logprobs.

        Args:
            num_prompt_tokens: number of tokens of all prompts together.

        Raises:
            RequestError: the response would have more than MAX_LOGPROB_ENTRIES prompt logprobs.
        """
        num_top = self.requested_prompt_logprobs()
        if num_top is None:
            return
        num_entries = num_prompt_tokens * self.num_candidates * (num_top + 1)
        if num_entries > MAX_LOGPROB_ENTRIES:
            field = "logprobs" if self.prompt_logprobs is None else "prompt_logprobs"
            raise RequestError(
                f"{field}: {num_prompt_tokens} prompt tokens with {num_top + 1} log-probabilities "
                f"in each of {self.num_candidates} choices (n or best_of) make {num_entries} "
                f"entries, and at most {MAX_LOGPROB_ENTRIES} are allowed; send a smaller n, "
                f"best_of or {field}",
                param=field,
            )

    def check_beam_logprobs(self, max_tokens: int) -> None:
        """Check that a beam search would not have too many logprobs.

        The search returns the logprobs of all tokens in one output at its end.

        Args:
            max_tokens: sum of the limits on generated tokens, over all prompts.

        Raises:
            RequestError: the beams would have more than MAX_RESPONSE_LOGPROBS logprobs.
        """
        num_top = self.requested_logprobs()
        if not self.use_beam_search or num_top is None:
            return
        num_entries = max_tokens * self.num_samples * (num_top + 1)
        if num_entries > MAX_RESPONSE_LOGPROBS:
            raise RequestError(
                f"logprobs: {max_tokens} tokens with {num_top + 1} log-probabilities in each of "
                f"n={self.num_samples} beams make {num_entries} entries, and at most "
                f"{MAX_RESPONSE_LOGPROBS} are allowed; send a smaller max_tokens, n or number of "
                "logprobs",
                param="logprobs",
            )

    def structured_output_field(self) -> str | None:
        """Return the name of the field that sets the structure of the text; None if no field does.

        Raises:
            RequestError: more than one of these fields is set.
        """
        fields = (
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
        )
        given = [name for name in fields if getattr(self, name) is not None]
        if self.structured_outputs is not None and not self.structured_outputs.given():
            given.remove("structured_outputs")
        if self.response_format is not None and self.response_format.type != "text":
            given.insert(0, "response_format")
        if len(given) > 1:
            raise RequestError(f"{given[1]} cannot be combined with {given[0]}", param=given[1])
        return given[0] if given else None

    def structured_output(self) -> StructuredOutput | None:
        """Return the structure that the text must have, or None if any text is allowed.

        Raises:
            RequestError: more than one structure is set, or the structure is invalid.
        """
        field = self.structured_output_field()
        if field is None:
            return None
        if field == "response_format":
            params = self._response_format()
        elif field == "structured_outputs":
            params = self.structured_outputs or StructuredOutputsParams()
        else:
            params = StructuredOutputsParams(
                **{field.removeprefix("guided_"): getattr(self, field)}
            )
        try:
            return params.to_structured_output()
        except ValueError as error:
            raise RequestError(f"{field}: {error}", param=field) from error

    def response_schema(self) -> dict[str, Any] | None:
        """Return the JSON schema that `response_format` requires; None if it requires none.

        Raises:
            RequestError: more than one structure is set, or the structure is invalid.
        """
        if self.structured_output_field() != "response_format":
            return None
        schema = self._response_format().json
        return schema if isinstance(schema, dict) else {"type": "object"}

    def _response_format(self) -> StructuredOutputsParams:
        assert self.response_format is not None
        kind, schema = self.response_format.type, self.response_format.json_schema
        if kind == "json_object":
            return StructuredOutputsParams(json_object=True)
        if kind != "json_schema":
            raise RequestError(
                f"response_format.type must be text, json_object or json_schema, got {quote(kind)}",
                param="response_format",
            )
        if schema is None or schema.schema is None:
            raise RequestError(
                "response_format.json_schema.schema is required", param="response_format"
            )
        return StructuredOutputsParams(json=schema.schema)

    def _repetition_detection(self) -> RepetitionDetection | None:
        params = self.repetition_detection
        if params is None:
            return None
        return RepetitionDetection(
            params.max_pattern_size, params.min_pattern_size, params.min_count
        )

    def _logit_bias(self) -> dict[int, float] | None:
        if not self.logit_bias:
            return None
        for key in self.logit_bias:
            if not _TOKEN_ID.fullmatch(key):
                raise RequestError(
                    f"logit_bias keys must be token ids, got {key[:40]!r}", param="logit_bias"
                )
        return {int(key): bias for key, bias in self.logit_bias.items()}

    def _refuse_unsupported(self) -> None:
        for name in self.UNSUPPORTED:
            if getattr(self, name):
                raise RequestError(
                    f"{name} is not supported by this server",
                    param=name,
                    code="unsupported_parameter",
                )


def check_max_tokens(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise RequestError(f"{name} must be at least 1, got {value}", param=name)


def check_32_bits(name: str, value: int | None) -> None:
    if value is not None and not -(2**31) <= value < 2**31:
        raise RequestError(f"{name} must fit 32 bits, got {value}", param=name)


def check_cache_salt(cache_salt: str | None) -> None:
    if len(cache_salt or "") > MAX_CACHE_SALT_LENGTH:
        raise RequestError(
            f"cache_salt must have at most {MAX_CACHE_SALT_LENGTH} characters", param="cache_salt"
        )
