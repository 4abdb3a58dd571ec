"""Structured output: restricts generated text to a JSON schema, regex, choice or grammar.

The scheduler compiles a request's specification when the request arrives. For every step that
samples for the request, the scheduler gets a bitmask of the allowed tokens. After sampling, the
scheduler passes the token to the grammar.

`llguidance` compiles the grammars and computes the bitmasks. The first structured request imports
`llguidance` and reads the tokenizer.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from baton_engine.grammar.compiler import NUM_THREADS, GrammarCompiler, reason_of
from baton_engine.grammar.sandboxed_compile import GrammarTrial
from baton_protocol.engine_messages import CLIENT_CHARS
from baton_protocol.process.fair_thread_pool import FairThreadPool
from baton_protocol.sampling_params import StructuredOutput, StructuredOutputKind

if TYPE_CHECKING:
    from llguidance import LLMatcher

#: Maximum number of compiled grammars that are kept for requests with the same specification.
MAX_COMPILED = 128
#: Limit on the total bytes of kept grammars, as `GrammarTrial` measures them. A character of a
#: schema takes about 120 bytes, and a character of a regular expression up to 4 KB.
MAX_COMPILED_BYTES = 2**28
#: Processor time in which the grammars of a client may accept tokens: an initial amount, and an
#: amount that each token adds. A token of JSON takes less than 0.1 ms. An ambiguous grammar of a
#: few lines takes seconds, while all requests of the engine wait.
FREE_S = 0.1
S_PER_TOKEN = 0.0003
#: The same amounts for bitmasks, which are computed while the model runs. The first bitmasks of a
#: large schema take longer than later ones.
FREE_BITMASK_S = 1.0
S_PER_BITMASK = 0.001
#: When a client has used up its time, its slow grammars end. A grammar is slow if it has used more
#: than this fraction of the initial amount, plus the amounts that its own tokens add.
SHARE = 0.1
#: If the bitmasks of a step take longer than SLOW_S plus SLOW_ROW_S per grammar, the next step
#: measures the time of each grammar.
SLOW_S = 0.01
SLOW_ROW_S = 0.00025


#: Cache salt, kind and text of a specification.
_Key = tuple[str, StructuredOutputKind, str]


class Allowance:
    """The processor time that the running grammars of one client may still use.

    Args:
        free_s: initial amount and upper limit of the unused time, in seconds.
        s_per_token: seconds that each token (or bitmask) adds.
    """

    def __init__(self, free_s: float, s_per_token: float) -> None:
        self._free_s = free_s
        self._s_per_token = s_per_token
        self._left_s = free_s

    def spend(self, seconds: float, num_tokens: int) -> None:
        saved_s = min(self._free_s, self._left_s + self._s_per_token * num_tokens)
        self._left_s = max(-self._free_s, saved_s - seconds)

    def is_exceeded_by(self, seconds: float, num_tokens: int) -> bool:
        """Return whether the client has used up its time and the given grammar is slow.

        SHARE defines when a grammar is slow.

        Args:
            seconds: processor time that the grammar has used since its start.
            num_tokens: number of tokens (or bitmasks) for which it has used this time.
        """
        own_s = SHARE * self._free_s + self._s_per_token * num_tokens
        return self._left_s < 0 and seconds > own_s


class GrammarClient:
    """The processor time that all running grammars of one client share.

    Accepting tokens and computing bitmasks have separate allowances.
    """

    def __init__(self) -> None:
        self.tokens = Allowance(FREE_S, S_PER_TOKEN)
        self.bitmasks = Allowance(FREE_BITMASK_S, S_PER_BITMASK)


class Grammar:
    """The state of one request in its compiled grammar. Not thread-safe."""

    def __init__(
        self, matcher: LLMatcher, eos_token_ids: frozenset[int], client: GrammarClient
    ) -> None:
        self.matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._client = client
        self._ended = False
        self._is_slow = False
        self._num_tokens = 0
        self._num_bitmasks = 0
        self._accept_s = 0.0
        self._bitmask_s = 0.0

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advance the grammar by sampled tokens.

        An EOS token is accepted only where the text may end. After an EOS token, only EOS tokens
        are accepted.

        Returns:
            True on success. False if a token is not allowed, or if the grammar takes too much of
            its client's time. After False, the grammar cannot be used any more.
        """
        started = time.thread_time()
        is_accepted = self._accept(token_ids)
        seconds = time.thread_time() - started
        self._num_tokens += len(token_ids)
        self._accept_s += seconds
        allowance = self._client.tokens
        allowance.spend(seconds, len(token_ids))
        self._is_slow |= allowance.is_exceeded_by(self._accept_s, self._num_tokens)
        return is_accepted and not self._is_slow

    def spend(self, seconds: float) -> None:
        """Subtract the processor time of one bitmask from the client's allowance.

        If the allowance is used up and the grammar is slow, `error` returns the reason.
        """
        self._num_bitmasks += 1
        self._bitmask_s += seconds
        allowance = self._client.bitmasks
        allowance.spend(seconds, 1)
        self._is_slow |= allowance.is_exceeded_by(self._bitmask_s, self._num_bitmasks)

    def _accept(self, token_ids: Sequence[int]) -> bool:
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
        if self._is_slow:
            return "it takes too much processor time; make it less ambiguous"
        return reason_of(self.matcher)


class StructuredOutputManager:
    """Compiles specifications of structured output and computes bitmasks of allowed tokens.

    Args:
        model_path: the folder of the checkpoint. The first structured request reads
            `tokenizer.json` in this folder.
        vocab_size: width of the logits. Ids that the tokenizer does not have (padding of the
            embedding) are never allowed.
        eos_token_ids: the model's EOS tokens, which are allowed only where the text may end.
        wakeup: called when a Future of `compile` is done. Any thread may call this function.
    """

    def __init__(
        self,
        model_path: Path,
        vocab_size: int,
        eos_token_ids: Collection[int],
        wakeup: Callable[[], None],
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._wakeup = wakeup
        self._compiler = GrammarCompiler(model_path, vocab_size, self._eos_token_ids)
        self._trial = GrammarTrial(model_path, vocab_size, self._eos_token_ids)
        self._lock = threading.Lock()
        #: Whether the bitmasks of the last step took long.
        self._was_slow = False
        self._compiled: OrderedDict[_Key, tuple[LLMatcher, int]] = OrderedDict()
        self._pool = FairThreadPool(NUM_THREADS, "grammar")
        #: By the start of the cache salt, which identifies the client. A client without running
        #: grammars is removed.
        self._clients: WeakValueDictionary[str, GrammarClient] = WeakValueDictionary()

    def compile(self, spec: StructuredOutput, cache_salt: str = "") -> Future[Grammar]:
        """Compile a specification in another thread, unless its compiled grammar is cached.

        Args:
            spec: the specification.
            cache_salt: only requests with the same salt share compiled grammars. Otherwise the time
                to the first token would show whether another client has used this specification.

        Returns:
            A Future of the grammar. The Future raises ValueError if the specification is invalid.
        """
        key = (cache_salt, spec.kind, spec.spec)
        name = cache_salt[:CLIENT_CHARS]
        client = self._clients.setdefault(name, GrammarClient())
        if (matcher := self._find(key)) is None:
            future = self._pool.submit(name, lambda: self._compile(spec, key, client))
        else:  # a compiled grammar need not wait for other compilations
            future = Future()
            future.set_result(self._grammar(matcher, client))
        future.add_done_callback(lambda _: self._wakeup())
        return future

    def bitmask(self, grammars: Sequence[Grammar]) -> npt.NDArray[np.int32]:
        """Compute the tokens that each grammar allows next.

        Returns:
            One row per grammar, in the layout of `GrammarOutput.bitmask`.
        """
        words = -(-self._vocab_size // 32)
        if not grammars:
            return np.zeros((0, words), dtype=np.int32)
        # The mask is as wide as the tokenizer, whose ids may exceed the vocabulary. A grammar that
        # cannot continue allows only EOS; `error` has the reason.
        started = time.monotonic()
        if self._was_slow:
            bitmask = np.concatenate([self._measured_bitmask(grammar) for grammar in grammars])
        else:  # all rows at once, in threads and without the GIL
            bitmask = self._compiler.bitmask([grammar.matcher for grammar in grammars])
        self._was_slow = time.monotonic() - started > SLOW_S + SLOW_ROW_S * len(grammars)
        return np.ascontiguousarray(bitmask[:, :words])

    def shutdown(self) -> None:
        """End the child process, and cancel waiting compilations. Do not wait for running ones."""
        self._trial.close()
        self._pool.shutdown()

    def _measured_bitmask(self, grammar: Grammar) -> npt.NDArray[np.int32]:
        started = time.thread_time()
        bitmask = self._compiler.bitmask([grammar.matcher])  # in this thread
        grammar.spend(time.thread_time() - started)
        return bitmask

    def _compile(self, spec: StructuredOutput, key: _Key, client: GrammarClient) -> Grammar:
        matcher = self._find(key)  # another sample of the request may have compiled it
        if matcher is None:
            num_bytes = self._trial.check(spec) + len(spec.spec)
            matcher = self._compiler.compile(spec)
            with self._lock:
                self._compiled[key] = matcher, num_bytes
                while len(self._compiled) > MAX_COMPILED or (
                    sum(size for _, size in self._compiled.values()) > MAX_COMPILED_BYTES
                ):
                    self._compiled.popitem(last=False)
        return self._grammar(matcher, client)

    def _find(self, key: _Key) -> LLMatcher | None:
        with self._lock:
            if key not in self._compiled:
                return None
            self._compiled.move_to_end(key)
            return self._compiled[key][0]

    def _grammar(self, matcher: LLMatcher, client: GrammarClient) -> Grammar:
        return Grammar(matcher.deep_copy(), self._eos_token_ids, client)
