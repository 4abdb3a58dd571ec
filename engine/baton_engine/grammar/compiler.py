"""Compiles specifications of structured output with `llguidance`.

The first compilation imports `llguidance` and reads the tokenizer.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from baton_protocol.checkpoint_files import (
    MAX_TOKEN_ID,
    MAX_TOKENIZER_BYTES,
    parse_object,
    read_file,
)
from baton_protocol.sampling_params import JSON_FORMAT, StructuredOutput, StructuredOutputKind

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

#: Threads for compilation and masks. The model needs the remaining cores.
NUM_THREADS = min(2, os.cpu_count() or 1)
#: Maximum length of an error message, in characters.
MAX_REASON_LENGTH = 300
# These limits are stricter than llguidance's defaults, which suit trusted schemas. A lexer state
# takes 1 to 2 kB, so MAX_LEXER_STATES limits an untrusted schema to about 60 MB.
MAX_GRAMMAR_SIZE = 100_000
MAX_LEXER_STATES = 30_000
# The time for a token grows faster than the cube of the number of parser items in a row. 1000 items
# take up to 25 ms. llguidance's default limit of 2000 items allows a second. An object with 250
# optional properties has 1000 items.
MAX_ROW_ITEMS = 1000
MAX_STEP_ITEMS = 10_000


@dataclass(frozen=True, slots=True)
class _Backend:
    """The `llguidance` objects that the first structured request creates."""

    tokenizer: LLTokenizer
    executor: LLExecutor
    limits: LLParserLimits


class GrammarCompiler:
    """Compiles specifications of structured output, and computes token bitmasks. Thread-safe.

    Args:
        model_path: the folder of the checkpoint, which contains `tokenizer.json`.
        vocab_size: width of the logits.
        eos_token_ids: the model's EOS tokens.
    """

    def __init__(self, model_path: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._model_path = model_path
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._lock = threading.Lock()
        self._backend: _Backend | None = None

    def bitmask(self, matchers: Sequence[LLMatcher]) -> npt.NDArray[np.int32]:
        """Return the tokens that each matcher allows next: one row of bits per matcher.

        A row has a bit for each token of the tokenizer, packed into 32-bit words.
        """
        backend = self._load()
        width = -(-backend.tokenizer.vocab_size // 32)
        mask = np.zeros((len(matchers), width), dtype=np.int32)
        rows = [(matcher, row) for row, matcher in enumerate(matchers)]
        backend.executor.unsafe_compute_mask_ptr(
            rows, mask.ctypes.data, mask.strides[0], len(matchers)
        )
        return mask

    def compile(self, spec: StructuredOutput) -> LLMatcher:
        """Compile a specification, and return its matcher.

        Raises:
            ValueError: the specification is invalid or exceeds a limit, or the tokenizer cannot be
                used.
        """
        backend = self._load()
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(
                backend.tokenizer, _to_llguidance(spec), log_level=0, limits=backend.limits
            )
            if matcher.is_error():
                raise ValueError(reason_of(matcher))
            self._check_start(matcher.deep_copy())
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"structured_output.spec is not a valid {spec.kind.value}: {error}"
            ) from error
        return matcher

    def _check_start(self, matcher: LLMatcher) -> None:
        """Raise ValueError if no text matches the grammar or its first bitmask exceeds a limit."""
        mask = self.bitmask([matcher])
        if matcher.is_error():
            raise ValueError(reason_of(matcher))
        if not mask.any():
            raise ValueError("no text matches it")

    def _load(self) -> _Backend:
        with self._lock:
            if self._backend is None:
                self._backend = self._read_tokenizer()
            return self._backend

    def _read_tokenizer(self) -> _Backend:
        from llguidance import LLExecutor, LLParserLimits, LLTokenizer

        if not self._eos_token_ids:
            raise ValueError(
                "structured_output needs a model with an eos_token_id: "
                "no other token ends a structured text"
            )
        file = self._model_path / "tokenizer.json"
        if not file.is_file():
            raise ValueError(
                f"structured_output needs the model's tokenizer: {file} does not exist; "
                "serve a checkpoint folder that has it"
            )
        eos_token_ids = sorted(self._eos_token_ids)
        try:
            content = read_file(self._model_path, file.name, MAX_TOKENIZER_BYTES).decode()
            try:
                tokenizer = LLTokenizer(content, n_vocab=self._vocab_size, eos_token=eos_token_ids)
            except ValueError:
                # Some tokenizers have more ids than the model has logits.
                # `StructuredOutputManager.bitmask` cuts off these ids.
                _check_ids(content)
                tokenizer = LLTokenizer(content, eos_token=eos_token_ids)
        except BaseException as error:  # a panic of the library's Rust code is not an Exception
            raise ValueError(f"structured_output cannot use {file}: {error}") from error
        limits = LLParserLimits(
            max_grammar_size=MAX_GRAMMAR_SIZE,
            max_lexer_states=MAX_LEXER_STATES,
            max_items_in_row=MAX_ROW_ITEMS,
            step_max_items=MAX_STEP_ITEMS,
            verbose_errors=False,
        )
        return _Backend(tokenizer, LLExecutor(num_threads=NUM_THREADS), limits)


def _check_ids(content: str) -> None:
    """Raise ValueError if a token id in tokenizer.json is larger than MAX_TOKEN_ID.

    llguidance allocates one table entry per id up to the largest id, also for unused ids.
    """
    data = parse_object(content.encode())
    vocab = data["model"]["vocab"]
    ids = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab)]
    ids += [token["id"] for token in data.get("added_tokens") or []]
    if (largest := max(ids, default=0)) > MAX_TOKEN_ID:
        raise ValueError(f"its largest token id is {largest}; at most {MAX_TOKEN_ID} is supported")


def reason_of(matcher: LLMatcher) -> str:
    """Return the matcher's error message without the parser state and the text of the grammar."""
    reason = matcher.get_error().partition("\n<")[0].strip()[:MAX_REASON_LENGTH]
    return "no text matches it" if reason == "NoExtensionBias" else reason


def _to_llguidance(spec: StructuredOutput) -> str:
    """Convert a specification to a grammar in llguidance's format.

    Raises:
        ValueError: a JSON schema or a choice is not valid JSON.
    """
    from llguidance import LLMatcher, grammar_from

    match spec.kind:
        case StructuredOutputKind.JSON:
            # Parse the client's own text, so that an error gives a position in it.
            is_object = isinstance(json.loads(spec.spec), dict)
            # Overrides need a schema that is an object, but true and false are also schemas.
            schema = spec.spec if is_object else f'{{"allOf": [{spec.spec}]}}'
            # Overrides also replace the settings in the schema's own x-guidance.
            return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_FORMAT)
        case StructuredOutputKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=JSON_FORMAT)
        case StructuredOutputKind.REGEX:
            return LLMatcher.grammar_from_regex(spec.spec)
        case StructuredOutputKind.CHOICE:
            # One terminal holds all choices. The parser cannot handle thousands of alternatives.
            texts = " | ".join(json.dumps(text) for text in json.loads(spec.spec))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
        case StructuredOutputKind.GRAMMAR:
            return grammar_from("grammar", spec.spec)
