"""Sampling and beam-search parameters of the offline API.

`SamplingParams` extends the engine's parameters with options that the engine does not implement,
such as stop strings.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from baton_protocol.sampling_params import MAX_BEAM_WIDTH, StructuredOutput
from baton_protocol.sampling_params import SamplingParams as WireSamplingParams
from baton_text.requests.structured_outputs import StructuredOutputsParams, bad_words_token_ids
from baton_text.tokenizer import Tokenizer

_INDEX = re.compile(r"\$\[(\d+)\]")


def check_types(params: msgspec.Struct) -> None:
    """Raise ValueError if a field has a value of the wrong type. The message names the field."""
    kind = type(params)
    for name in kind.__struct_fields__:
        if isinstance(getattr(params, name), set | frozenset):
            raise ValueError(f"{name}: expected a list, got a set")
    try:
        checked = msgspec.convert(msgspec.to_builtins(params), kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).replace("`", "").partition(" - at ")
        # For a struct encoded as an array, the error has an index instead of a field name.
        path = _INDEX.sub(
            lambda match: kind.__struct_fields__[int(match[1])], where, count=1
        ).removeprefix("$.")
        raise ValueError(f"{path}: {what[:1].lower()}{what[1:]}") from error
    except TypeError as error:
        raise ValueError(f"{_unencodable_field(params)}: {error}") from error
    for name in kind.__struct_fields__:
        given, expected = getattr(params, name), type(getattr(checked, name))
        if issubclass(expected, msgspec.Struct) and not isinstance(given, expected):
            raise ValueError(f"{name}: expected {expected.__name__}, got {type(given).__name__}")


def _unencodable_field(params: msgspec.Struct) -> str:
    """Return the name of the first field that msgspec cannot encode.

    If msgspec can encode each field, return the name of the class.
    """
    for name in params.__struct_fields__:
        try:
            msgspec.to_builtins(getattr(params, name))
        except TypeError:
            return name
    return type(params).__name__


class SamplingParams(WireSamplingParams, kw_only=True):
    """Sampling parameters of one prompt, for example `SamplingParams(temperature=0.8)`."""

    #: Limit of generated tokens, as in vLLM. None: up to max_model_len.
    max_tokens: int | None = 16
    #: None: a seed is drawn for each prompt by the LLM's random generator.
    seed: int | None = None  # type: ignore[assignment]  # never None on the wire
    #: Sequences to return for each prompt.
    n: int = 1
    #: Sequences to draw for each prompt. The n with the highest log-probability per token are
    #: returned, best first.
    best_of: int | None = None
    #: Strings that end a sequence. They are not part of the output unless
    #: include_stop_str_in_output is set.
    stop: str | list[str] | None = None
    #: Whether the string or token that ends a sequence is part of its text.
    include_stop_str_in_output: bool = False
    #: Whether special tokens, such as EOS, are left out of the text.
    skip_special_tokens: bool = True
    #: Words that are never generated.
    bad_words: list[str] | None = None
    #: Form that the generated text must have: JSON, a regex, a choice or a grammar.
    structured_outputs: StructuredOutputsParams | None = None

    @property
    def num_candidates(self) -> int:
        """Number of sequences to generate for each prompt: `best_of`, or `n` if unset."""
        return self.n if self.best_of is None else self.best_of

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    def validate(self) -> None:
        """Raise ValueError if a value is invalid. The message names the field and its bound."""
        check_types(self)
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}")
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of must be at least n={self.n}, got {self.best_of}")
        if any(not stop for stop in self.stops):
            raise ValueError("stop must not hold an empty string")
        if self.beam_width:
            raise ValueError(
                "beam_width is set by LLM.beam_search(prompts, BeamSearchParams(beam_width=...))"
            )
        if self.structured_output is not None:
            raise ValueError("structured_output is set by the LLM: set structured_outputs")
        self._wire(seed=self.seed or 0, bad_words=self.bad_words_token_ids).validate()

    def to_wire(self, tokenizer: Tokenizer, *, seed: int) -> WireSamplingParams:
        """Return the parameters in the form that is sent to the engine.

        Args:
            seed: seed to use if the caller set none.

        Raises:
            ValueError: a value is invalid. The message names the field and its bound.
        """
        self.validate()
        bad_words = bad_words_token_ids(tokenizer, self.bad_words or []) + (
            self.bad_words_token_ids or []
        )
        return self._wire(
            seed=seed if self.seed is None else self.seed, bad_words=bad_words or None
        )

    def _wire(self, *, seed: int, bad_words: list[list[int]] | None) -> WireSamplingParams:
        fields: dict[str, Any] = {
            name: getattr(self, name) for name in WireSamplingParams.__struct_fields__
        }
        if self.num_candidates > self.n and self.logprobs is None:
            fields["logprobs"] = 0  # to rank the candidates
        fields |= {
            "seed": seed,
            "bad_words_token_ids": bad_words,
            "structured_output": self._structured_output(),
        }
        return WireSamplingParams(**fields)

    def _structured_output(self) -> StructuredOutput | None:
        if self.structured_outputs is None:
            return None
        if not self.structured_outputs.given():
            raise ValueError(
                "structured_outputs must have one of json, json_object, regex, choice and grammar"
            )
        try:
            return self.structured_outputs.to_structured_output()
        except ValueError as error:
            raise ValueError(f"structured_outputs.{error}") from error


class BeamSearchParams(msgspec.Struct, kw_only=True):
    """Parameters of a beam search."""

    #: Number of beams to keep and to return.
    beam_width: int
    #: Maximum number of generated tokens of each beam.
    max_tokens: int
    #: Whether beams continue after the model's EOS token.
    ignore_eos: bool = False
    #: A beam's score is its cumulative log-probability / length ** length_penalty.
    length_penalty: float = 1.0
    #: Whether the search ends when beam_width beams are finished, even if a better beam could still
    #: be found.
    early_stopping: bool = False

    def to_wire(self) -> WireSamplingParams:
        """Return the parameters in the form that is sent to the engine.

        Raises:
            ValueError: a value is invalid. The message names the field and its bound.
        """
        check_types(self)
        if not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise ValueError(f"beam_width must be in [1, {MAX_BEAM_WIDTH}], got {self.beam_width}")
        params = WireSamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            beam_width=self.beam_width,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
        )
        params.validate()
        return params
