"""Structured output: restricts generated text to a JSON schema, regex, choice or grammar.

The scheduler compiles a request's specification when the request arrives. For every step that
samples for the request, the scheduler gets a bitmask of the allowed tokens. After sampling, the
scheduler passes the token to the grammar.

`llguidance` compiles the grammars and computes the bitmasks. The first structured request imports
`llguidance` and reads the tokenizer.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from baton_protocol.sampling import StructuredOutput, StructuredOutputKind

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

#: Compiled grammars kept for later requests with the same specification.
MAX_COMPILED = 128
#: Limit for the sum of the lengths of their specifications. A compiled JSON schema takes about 120
#: bytes per character, so clients with long schemas cannot fill the memory.
MAX_COMPILED_CHARS = 2**20
#: Threads for compilation and masks. The model needs the remaining cores.
NUM_THREADS = min(2, os.cpu_count() or 1)
#: Maximum length of an error message, in characters.
MAX_REASON_LENGTH = 300
# Stricter than llguidance's defaults, which suit trusted schemas. A lexer state takes 1 to 2 kB, so
# these two limits hold an untrusted schema to about 60 MB.
MAX_GRAMMAR_SIZE = 100_000
MAX_LEXER_STATES = 30_000
#: llguidance's options for JSON. Between two JSON tokens, the pattern matches at most once. Without
#: a bound, a model can spend all its tokens on white space.
JSON_FORMAT = {
    "whitespace_pattern": r"[ \t]{1,2}|\r?\n[ \t]{0,64}",
    "item_separator": ",",
    "key_separator": ":",
}


class Grammar:
    """The state of one request in its compiled grammar. Not thread-safe."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self.matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._ended = False

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advance the grammar by sampled tokens.

        An EOS token is accepted only where the text may end. After an EOS token, only EOS tokens
        are accepted.

        Returns:
            False if a token is not allowed. Then the grammar cannot be used any more.
        """
        for token_id in token_ids:
            if self._ended:
                if token_id not in self._eos_token_ids:
                    return False
            elif self.matcher.is_error() or not self.matcher.consume_token(token_id):
                return False
            elif token_id in self._eos_token_ids:
                self._ended = True
        return True

    @property
    def is_terminated(self) -> bool:
        """Whether the text is complete: EOS was accepted, or only EOS may follow."""
        return self._ended or (self.matcher.is_stopped() and not self.matcher.is_error())

    @property
    def error(self) -> str:
        """The reason why the grammar cannot continue, or "" if it can continue.

        The reason is a resource limit or an invalid token.
        """
        return _reason(self.matcher)


@dataclass(frozen=True, slots=True)
class _Backend:
    """The `llguidance` objects that the first structured request creates."""

    tokenizer: LLTokenizer
    executor: LLExecutor
    limits: LLParserLimits


class StructuredOutputManager:
    """Compiles specifications of structured output and computes bitmasks of allowed tokens.

    Args:
        model_path: the folder of the checkpoint. The first structured request reads
            `tokenizer.json` in this folder.
        vocab_size: width of the logits. Ids that the tokenizer does not have (padding of the
            embedding) are never allowed.
        eos_token_ids: the model's EOS tokens, which are allowed only where the text may end.
        wakeup: called, by the compiling thread, when a Future of `compile` is done.
    """

    def __init__(
        self,
        model_path: Path,
        vocab_size: int,
        eos_token_ids: Collection[int],
        wakeup: Callable[[], None],
    ) -> None:
        self._model_path = model_path
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._wakeup = wakeup
        self._lock = threading.Lock()
        self._backend: _Backend | None = None
        self._compiled: OrderedDict[tuple[StructuredOutputKind, str], LLMatcher] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None

    def compile(self, spec: StructuredOutput) -> Future[Grammar]:
        """Start to compile a specification in another thread.

        Returns:
            A Future of the grammar. The Future raises ValueError if the specification is invalid.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        future = self._pool.submit(self._compile, spec)
        future.add_done_callback(lambda _: self._wakeup())
        return future

    def bitmask(self, grammars: Sequence[Grammar]) -> npt.NDArray[np.int32]:
        """Compute the tokens that each grammar allows next.

        Returns:
            One row per grammar, in the layout of `GrammarOutput.bitmask`.
        """
        words = -(-self._vocab_size // 32)
        if self._backend is None or not grammars:
            return np.zeros((len(grammars), words), dtype=np.int32)
        # The mask is as wide as the tokenizer, whose ids may exceed the vocabulary. All rows are
        # computed at once, in threads and without the GIL. A grammar that cannot continue allows
        # only EOS; `error` has the reason.
        bitmask = np.zeros(
            (len(grammars), -(-self._backend.tokenizer.vocab_size // 32)), dtype=np.int32
        )
        matchers = [(grammar.matcher, row) for row, grammar in enumerate(grammars)]
        self._backend.executor.unsafe_compute_mask_ptr(
            matchers, bitmask.ctypes.data, bitmask.strides[0], len(grammars)
        )
        return np.ascontiguousarray(bitmask[:, :words])

    def shutdown(self) -> None:
        """Cancel compilations that have not started. Does not wait for running compilations."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, spec: StructuredOutput) -> Grammar:
        key = (spec.kind, spec.spec)
        with self._lock:
            matcher = self._compiled.get(key)
            if matcher is not None:
                self._compiled.move_to_end(key)
        if matcher is None:
            matcher = self._compile_new(spec)
            with self._lock:
                self._compiled[key] = matcher
                while len(self._compiled) > MAX_COMPILED or (
                    sum(len(text) for _, text in self._compiled) > MAX_COMPILED_CHARS
                ):
                    self._compiled.popitem(last=False)
        return Grammar(matcher.deep_copy(), self._eos_token_ids)

    def _compile_new(self, spec: StructuredOutput) -> LLMatcher:
        backend = self._load()
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(
                backend.tokenizer, _to_llguidance(spec), log_level=0, limits=backend.limits
            )
            if matcher.is_error():
                raise ValueError(_reason(matcher))
            self._check_start(matcher.deep_copy(), backend)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"structured_output.spec is not a valid {spec.kind.value}: {error}"
            ) from error
        return matcher

    def _check_start(self, matcher: LLMatcher, backend: _Backend) -> None:
        """Raise ValueError if the grammar allows no first token or exceeds a resource limit."""
        mask = np.zeros((1, -(-backend.tokenizer.vocab_size // 32)), dtype=np.int32)
        backend.executor.unsafe_compute_mask_ptr(
            [(matcher, 0)], mask.ctypes.data, mask.strides[0], 1
        )
        if matcher.is_error():
            raise ValueError(_reason(matcher))
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
            content = file.read_text(encoding="utf-8")
            try:
                tokenizer = LLTokenizer(content, n_vocab=self._vocab_size, eos_token=eos_token_ids)
            except ValueError:
                # Some tokenizers have more ids than the model has logits. `bitmask` cuts off these
                # ids.
                tokenizer = LLTokenizer(content, eos_token=eos_token_ids)
        except Exception as error:
            raise ValueError(f"structured_output cannot use {file}: {error}") from error
        limits = LLParserLimits(
            max_grammar_size=MAX_GRAMMAR_SIZE,
            max_lexer_states=MAX_LEXER_STATES,
            verbose_errors=False,
        )
        return _Backend(tokenizer, LLExecutor(num_threads=NUM_THREADS), limits)


def _reason(matcher: LLMatcher) -> str:
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
            # An error gives the position in the client's own text.
            is_object = isinstance(json.loads(spec.spec), dict)
            # Overrides need an object, but true and false are also schemas.
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
