"""Sampling parameters of one sequence. Gateway, offline API and engine validate them."""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Annotated

import msgspec
from msgspec import Meta

MAX_LOGPROBS = 20
MAX_BEAM_WIDTH = 64
#: Maximum length of a list of token ids and of logit_bias, which is the size of a large vocabulary.
MAX_TOKEN_IDS = 2**18
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_LENGTH = 256
MAX_PATTERN_SIZE = 256
MAX_PATTERN_COUNT = 1024
#: Maximum length of a structured output's specification, in characters.
MAX_SPEC_LENGTH = 2**17
#: llguidance's options for JSON. Between two JSON tokens, the pattern matches at most once. Without
#: a bound, a model can spend all its tokens on white space.
JSON_FORMAT = {
    "whitespace_pattern": r"[ \t]{1,2}|\r?\n[ \t]{0,64}",
    "item_separator": ",",
    "key_separator": ":",
}


class _Params(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Base of the parameter structs. New fields go last and have a default."""


class RepetitionDetection(_Params):
    """Ends a request whose last tokens repeat one pattern `min_count` times."""

    #: Length of the longest pattern to detect, in tokens.
    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def validate(self) -> None:
        """Validate the parameters.

        Raises:
            ValueError: a value is out of bounds. The message names the field and the bound.
        """
        _bound("repetition_detection.max_pattern_size", self.max_pattern_size, 1, MAX_PATTERN_SIZE)
        if not 1 <= self.min_pattern_size <= self.max_pattern_size:
            raise ValueError(
                "repetition_detection.min_pattern_size must be in [1, "
                f"max_pattern_size={self.max_pattern_size}], got {self.min_pattern_size}"
            )
        _bound("repetition_detection.min_count", self.min_count, 2, MAX_PATTERN_COUNT)


class StructuredOutputKind(enum.StrEnum):
    #: `spec` is a JSON schema.
    JSON = "json"
    #: Any JSON object; `spec` is empty.
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    #: `spec` is a JSON list of strings.
    CHOICE = "choice"
    #: `spec` is a context-free grammar in Lark's or GBNF's notation.
    GRAMMAR = "grammar"


class StructuredOutput(_Params):
    """A format that the output text must follow."""

    kind: StructuredOutputKind
    spec: str = ""

    def validate(self) -> None:
        """Validate the length of `spec`. For kind CHOICE, also validate the list of choices.

        Schemas, regular expressions and grammars are checked later, when they are compiled.

        Raises:
            ValueError: a value is out of bounds. The message names the field and the bound.
        """
        if self.kind is StructuredOutputKind.JSON_OBJECT:
            if self.spec:
                raise ValueError(
                    "structured_output.spec must be empty for json_object; kind json has a schema"
                )
            return
        if not 1 <= len(self.spec) <= MAX_SPEC_LENGTH:
            raise ValueError(
                f"structured_output.spec of kind {self.kind.value} must have "
                f"1 to {MAX_SPEC_LENGTH} characters, got {len(self.spec)}"
            )
        if self.kind is StructuredOutputKind.CHOICE:
            try:
                choices = msgspec.json.decode(self.spec, type=list[str])
            except msgspec.MsgspecError as error:
                raise ValueError(
                    f"structured_output.spec must be a JSON list of strings (kind choice): {error}"
                ) from error
            if not choices or "" in choices:
                raise ValueError(
                    "structured_output.spec must be a list of one or more non-empty strings (kind "
                    "choice)"
                )


class SamplingParams(_Params):
    """Sampling parameters, with OpenAI's and vLLM's names and meanings.

    Sampling is a pure function of the logits, these parameters, the prompt ids, the generated ids,
    the seed and the sample index.
    """

    #: 0 is greedy.
    temperature: float = 1.0
    top_p: float = 1.0
    #: Number of most likely tokens to keep. 0 or -1 keeps all.
    top_k: int = 0
    #: Tokens less likely than min_p times the most likely token are left out.
    min_p: float = 0.0
    #: Key of the sampling noise. If the client gives no seed, the gateway draws one, so that any
    #: pod can continue the request.
    seed: int = 0
    #: Maximum number of generated tokens, including generated_token_ids. None: up to max_model_len.
    max_tokens: int | None = None
    #: EOS and stop tokens are not sampled before this number of tokens.
    min_tokens: int = 0
    #: Tokens that end the output, in addition to the model's EOS.
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    #: Number of most likely tokens to report per position. 0: only the sampled token. None: no
    #: logprobs.
    logprobs: int | None = None
    #: Like logprobs, for the prompt's tokens from the second on. Such a request does not read the
    #: prefix cache, because every position must be computed.
    prompt_logprobs: int | None = None
    #: Only these tokens are sampled.
    allowed_token_ids: list[int] | None = None
    #: Token sequences that are never generated. The last token of a sequence is masked after its
    #: other tokens. Decoding checks the length before it allocates memory.
    bad_words_token_ids: Annotated[list[list[int]], Meta(max_length=MAX_BAD_WORDS)] | None = None
    repetition_detection: RepetitionDetection | None = None
    structured_output: StructuredOutput | None = None
    #: Above 0: beam search with this many beams instead of sampling, and one output at the end.
    beam_width: int = 0
    #: Beam search: cumulative log-probabilities are divided by length ** length_penalty.
    length_penalty: float = 1.0
    #: Beam search: end with the first `beam_width` finished beams, even if a running beam could
    #: reach a higher score.
    early_stopping: bool = False
    return_routed_experts: bool = False

    def validate(self) -> None:
        """Validate the parameters.

        Raises:
            ValueError: a value is out of bounds. The message names the field and the bound.
        """
        _bound("temperature", self.temperature, 0.0, 1e6)
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be -1, 0 or positive, got {self.top_k}")
        _bound("min_p", self.min_p, 0.0, 1.0)
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must fit 64 bits, got {self.seed}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must not be negative, got {self.min_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}"
            )
        _bound("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _bound("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not 0.0 < self.repetition_penalty <= 1e3:
            raise ValueError(f"repetition_penalty must be positive, got {self.repetition_penalty}")
        self._validate_token_ids()
        if self.repetition_detection is not None:
            self.repetition_detection.validate()
        if self.structured_output is not None:
            self.structured_output.validate()
        self._validate_beam_search()

    def _validate_token_ids(self) -> None:
        """Validate `logprobs`, `prompt_logprobs` and the fields of token ids. Raises ValueError."""
        _bound_size("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        _bound_size("logit_bias", self.logit_bias or (), MAX_TOKEN_IDS)
        for token_id, bias in (self.logit_bias or {}).items():
            if token_id < 0:
                raise ValueError(f"logit_bias keys must be token ids, got {token_id}")
            _bound("logit_bias", bias, -100.0, 100.0)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _bound(name, count, 0, MAX_LOGPROBS)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise ValueError(
                    "allowed_token_ids must not be empty; leave it out to allow all tokens"
                )
            _bound_size("allowed_token_ids", self.allowed_token_ids, MAX_TOKEN_IDS)
        _bound_size("bad_words_token_ids", self.bad_words_token_ids or (), MAX_BAD_WORDS)
        for word in self.bad_words_token_ids or ():
            if not 1 <= len(word) <= MAX_BAD_WORD_LENGTH:
                raise ValueError(
                    f"bad_words_token_ids must be words of 1 to {MAX_BAD_WORD_LENGTH} token ids, "
                    f"got a word of {len(word)}"
                )

    def _validate_beam_search(self) -> None:
        """Validate the options of beam search. Raises ValueError."""
        _bound("beam_width", self.beam_width, 0, MAX_BEAM_WIDTH)
        _bound("length_penalty", self.length_penalty, -10.0, 10.0)
        for name in ("repetition_detection", "return_routed_experts", "structured_output"):
            if self.beam_width and getattr(self, name):
                raise ValueError(f"{name} cannot be combined with beam_width")


def _bound_size(name: str, values: Collection[object], most: int) -> None:
    if len(values) > most:
        raise ValueError(f"{name} must have at most {most} entries, got {len(values)}")


def _bound(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # refuses NaN as well
        raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {value}")
