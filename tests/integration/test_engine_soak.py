"""Random requests to small engines, with the responses of an idle engine as the reference.

Requests are added and aborted, and the engine pauses, sleeps and resets its caches. At the end no
block, batch row or table entry of a request may be left. The seed alone decides what runs, never a
clock.

A few seeds always run. More run with
`BATON_SOAK_SECONDS=600 pytest tests/integration/test_engine_soak.py -k long -s`.
"""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_engine.core.engine_core import EngineCore
from baton_engine.executor.uniproc import UniProcExecutor
from baton_engine.llm.engine_args import engine_config
from baton_protocol.engine_messages import (
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    ErrorCode,
    FinishReason,
    TokenLogprobs,
)
from baton_protocol.sampling_params import (
    RepetitionDetection,
    SamplingParams,
    StructuredOutput,
    StructuredOutputKind,
)

VOCAB_SIZE = 1024
MAX_MODEL_LEN = 96
#: Log-probabilities closer than this may be ordered differently in another batch.
TIE = 1e-3
#: Steps without progress after which the engine counts as stuck. Each step waits briefly.
IDLE_STEPS = 20_000


def make_core(checkpoint: Path, **options: Any) -> EngineCore:
    """Create an engine core with one worker in this process. `options` are those of `LLM`."""
    config = engine_config(
        checkpoint,
        {"max_model_len": MAX_MODEL_LEN, "num_threads": 1, "dtype": "float32", **options},
    )
    return EngineCore(config, UniProcExecutor(config, uuid.uuid4().hex, lambda: None))


def random_options(rng: random.Random) -> dict[str, Any]:
    """Return random options of an engine, many of which make a resource scarce."""
    block_size = rng.choice([4, 8, 16])
    least = -(-MAX_MODEL_LEN // block_size)
    chunked = rng.random() < 0.85
    return {
        "block_size": block_size,
        "num_blocks": least + rng.choice([0, 0, 1, 3, least, 4 * least]),
        "enable_prefix_caching": rng.random() < 0.7,
        "swap_memory_bytes": rng.choice([0, 2**18, 2**24, 2**24]),
        "watermark": rng.choice([0.0, 0.01, 0.1]),
        "max_num_seqs": rng.choice([4, 8, 16, 16]),
        "max_num_batched_tokens": rng.choice([4, 7, 16, 33, 128])
        if chunked
        else rng.choice([MAX_MODEL_LEN, 128]),
        "enable_chunked_prefill": chunked,
        "long_prefill_token_threshold": rng.choice([0, 0, 3, 16]),
        "scheduling_policy": rng.choice(["priority", "fcfs"]),
        "preemption_mode": rng.choice(["auto", "recompute", "swap", "swap"]),
        "async_scheduling": rng.random() < 0.5,
        "offload_memory_bytes": rng.choice([0, 2**15, 2**17, 2**24]),
    }


def random_request(rng: random.Random, request_id: str) -> EngineCoreRequest:
    """Return one of 400 different requests. Their reference responses can all be cached."""
    kind = random.Random(rng.randrange(400))
    if kind.random() < 0.6:  # prompts with a common prefix
        base = random.Random(kind.randrange(3))
        prompt = [base.randrange(3, VOCAB_SIZE) for _ in range(64)][: kind.randint(1, 64)]
        prompt += [kind.randrange(3, VOCAB_SIZE) for _ in range(kind.randint(0, 8))]
    else:
        prompt = [kind.randrange(3, VOCAB_SIZE) for _ in range(kind.randint(1, 70))]
    params = SamplingParams(
        temperature=0.0, max_tokens=kind.choice([1, 2, 5, 12, 24, None]), ignore_eos=True
    )
    fields: dict[str, Any] = {}
    match kind.choice(
        ["plain", "plain", "plain", "stop", "regex", "choice", "beams", "prompt", "sampled", "more"]
    ):
        case "stop":
            params.stop_token_ids = [kind.randrange(VOCAB_SIZE) for _ in range(200)]
            params.min_tokens = kind.randint(0, params.max_tokens or 3)
        case "regex":
            spec = kind.choice(
                [r"[0-9]{3,12}", r"(ab|cd)+x", r"[a-z]{1,30}", r"a", r"-?[0-9]+(\.[0-9]+)?"]
            )
            params.structured_output = StructuredOutput(StructuredOutputKind.REGEX, spec)
            params.ignore_eos = False
        case "choice":
            params.structured_output = StructuredOutput(
                StructuredOutputKind.CHOICE, '["yes", "no", "perhaps"]'
            )
            params.ignore_eos = False
        case "beams":
            params.beam_width = kind.randint(1, 4)
            params.max_tokens = kind.choice([1, 3, 8, 16])
            params.ignore_eos = kind.random() < 0.5
            params.logprobs = kind.choice([None, 2])
        case "prompt":
            params.prompt_logprobs = kind.randint(0, 3)
        case "sampled":
            params.temperature, params.seed, params.top_p = (
                1.0,
                kind.randrange(2**32),
                kind.choice([1.0, 0.9]),
            )
        case "more":
            params.repetition_penalty = 1.3
            params.repetition_detection = RepetitionDetection(8, min_count=3)
            fields["generated_token_ids"] = [
                kind.randrange(3, VOCAB_SIZE) for _ in range(kind.randint(0, 5))
            ]
            if params.max_tokens is not None:
                params.max_tokens += len(fields["generated_token_ids"])
    return EngineCoreRequest(request_id, prompt, params, **fields)


class ReferenceEngine:
    """An engine that computes the expected responses, one request at a time, and caches them."""

    def __init__(self, checkpoint: Path) -> None:
        self._core = make_core(checkpoint, num_blocks=64, enable_prefix_caching=False)
        self._outputs: dict[bytes, EngineCoreOutput] = {}

    def run(self, request: EngineCoreRequest) -> EngineCoreOutput:
        """Return the expected response to `request`, with all outputs joined."""
        params = msgspec.convert(msgspec.to_builtins(request.sampling_params), SamplingParams)
        params.logprobs = params.logprobs or 20  # for near-ties
        alone = EngineCoreRequest(
            "alone",
            request.prompt_token_ids,
            params,
            request.generated_token_ids,
            request.sample_index,
        )
        key = msgspec.msgpack.encode(alone)
        if key not in self._outputs:
            refusal = self._core.add_request(alone)
            assert refusal is None, refusal
            parts: list[EngineCoreOutput] = []
            while not parts or not parts[-1].finished:
                parts += self._core.step_fn()
            self._outputs[key] = join(parts)
        return self._outputs[key]

    def close(self) -> None:
        self._core.shutdown()


def join(parts: Iterable[EngineCoreOutput]) -> EngineCoreOutput:
    """Join the outputs of one request into one. Check that no token is missing or repeated."""
    first, *rest = parts
    whole = EngineCoreOutput(first.request_id, list(first.new_token_ids), first.token_offset)
    whole.new_logprobs = list(first.new_logprobs or [])
    whole.prompt_logprobs, whole.beams = first.prompt_logprobs, first.beams
    last = first
    for part in rest:
        assert not last.finished, f"{part} after the last output of the request"
        assert part.token_offset == whole.token_offset + len(whole.new_token_ids), (
            f"a missing or repeated token: {part}"
        )
        whole.new_token_ids += part.new_token_ids
        whole.new_logprobs += part.new_logprobs or []
        whole.prompt_logprobs = whole.prompt_logprobs or part.prompt_logprobs
        last = part
    whole.finish_reason, whole.error, whole.error_code = (
        last.finish_reason,
        last.error,
        last.error_code,
    )
    whole.beams = last.beams
    return whole


class Soak:
    """One engine with random traffic."""

    def __init__(
        self, checkpoint: Path, reference: ReferenceEngine, seed: int, num_actions: int
    ) -> None:
        self._rng = random.Random(seed)
        self._reference = reference
        self.options = random_options(self._rng)
        self._core = make_core(checkpoint, **self.options)
        self._num_actions = num_actions
        self._requests: dict[str, EngineCoreRequest] = {}
        self._outputs: dict[str, list[EngineCoreOutput]] = {}
        self._aborted: set[str] = set()
        self._futures: list[Future[None]] = []
        self.num_compared = 0
        self.num_near_ties = 0

    def run(self) -> None:
        """Run all actions, then check the responses and that no state is left.

        Raises:
            AssertionError: a response is wrong, the engine is stuck, or state is left over.
        """
        try:
            while len(self._requests) < self._num_actions:
                self._act()
                for _ in range(self._rng.choice([0, 0, 1, 1, 3])):
                    self._step()
            self._resume()
            self._drain()
            self._compare()
            self._check_nothing_left()
        finally:
            self._core.shutdown()

    def stats(self) -> dict[str, int]:
        """Return how often the tested features were used."""
        stats = self._core.scheduler.stats()
        return {
            "compared": self.num_compared,
            "near_ties": self.num_near_ties,
            "preemptions": stats.num_preemptions,
            "swapped_out_blocks": stats.num_swapped_out_blocks,
            "prefix_cache_hits": stats.prefix_cache_hits,
            "offloaded_blocks": stats.offload_blocks_stored,
            "restored_blocks": stats.offload_blocks_restored,
        }

    # Actions

    def _act(self) -> None:
        core, rng = self._core, self._rng
        roll = rng.random()
        if roll < 0.72:
            self._add()
        elif roll < 0.85:
            if unfinished := list(core.scheduler.state.requests):
                chosen = rng.sample(unfinished, min(len(unfinished), rng.randint(1, 3)))
                self._aborted.update(chosen)
                core.abort_requests(chosen)
        elif roll < 0.88:
            core.reset_prefix_cache(rng.random() < 0.5)
        elif roll < 0.92:
            mode = rng.choice(["wait", "keep", "keep", "abort"])
            if mode == "abort":
                self._aborted.update(core.scheduler.state.requests)
            self._remember(core.pause(mode))  # type: ignore[arg-type]
        elif roll < 0.95:
            self._resume()
        elif roll < 0.975 and not core.is_sleeping():
            mode = rng.choice(["wait", "keep", "keep"])
            self._remember(core.sleep(rng.choice([0, 1, 1, 2]), mode))  # type: ignore[arg-type]
        else:
            core.wake_up(rng.choice([None, ["weights"], ["kv_cache"], ["scheduling"]]))

    def _add(self) -> None:
        rng = self._rng
        request_id = f"r{len(self._requests)}"
        request = random_request(rng, request_id)
        request.priority = rng.choice([0, 0, 0, -1, 5])
        request.arrival_time = float(len(self._requests))
        params = request.sampling_params
        group = [request]
        if not params.beam_width and not request.generated_token_ids and rng.random() < 0.3:
            request.group_id = request_id
            for index in range(1, rng.randint(2, 4)):
                sample = msgspec.convert(msgspec.to_builtins(request), EngineCoreRequest)
                sample.request_id, sample.sample_index = f"{request_id}-{index}", index
                group.append(sample)
        for request in group:
            self._requests[request.request_id] = request
            refusal = self._core.add_request(request)
            if refusal is not None:
                self._outputs[request.request_id] = [refusal]

    def _step(self) -> bool:
        outputs = self._core.step_fn()
        for output in outputs:
            self._outputs.setdefault(output.request_id, []).append(output)
        return bool(outputs) or self._core.made_progress

    def _remember(self, future: Future[None] | None) -> None:
        if future is not None:
            self._futures.append(future)

    def _resume(self) -> None:
        self._core.wake_up()
        self._core.resume()

    def _drain(self) -> None:
        idle = 0
        while self._core.has_requests:
            if self._step():
                idle = 0
                continue
            idle += 1
            left = list(self._core.scheduler.state.requests.values())
            # Only a compiling grammar may delay a step here.
            limit = (
                IDLE_STEPS
                if any(request.sampling_params.structured_output for request in left)
                else 3
            )
            assert idle < limit, f"stuck: {left}, {self._core.scheduler.stats()}"
        assert all(future.done() for future in self._futures), "a pause or sleep has not completed"

    # Checks

    def _compare(self) -> None:
        for request_id, request in self._requests.items():
            parts = self._outputs.get(request_id)
            assert parts, f"{request_id} has no output"
            assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True], (
                request_id,
                parts,
            )
            events = [event.type for part in parts for event in part.events or []]
            assert [event is EngineCoreEventType.QUEUED for event in events[:2]] in (
                [],
                [True],
                [True, False],
            ), events
            got = join(parts)
            if got.error:
                assert got.error_code is ErrorCode.LENGTH, (request, got)
                continue
            aborted = got.finish_reason is FinishReason.ABORT
            assert not aborted or request_id in self._aborted, (
                f"{request_id} was aborted without a request"
            )
            self._compare_one(request, got, self._reference.run(request), aborted=aborted)
            self.num_compared += 1

    def _compare_one(
        self,
        request: EngineCoreRequest,
        got: EngineCoreOutput,
        wanted: EngineCoreOutput,
        *,
        aborted: bool,
    ) -> None:
        where = f"{request}\n got {got}\n wanted {wanted}\n options {self.options}"
        if request.sampling_params.prompt_logprobs is not None and got.new_token_ids:
            assert len(got.prompt_logprobs) == len(request.prompt_token_ids) - 1, where
            for ours, theirs in zip(got.prompt_logprobs, wanted.prompt_logprobs, strict=True):
                assert ours.token_id == theirs.token_id, where
                assert abs(ours.logprob - theirs.logprob) < TIE, where
        if request.sampling_params.beam_width:
            if not aborted:
                assert got.beams, where
                assert wanted.beams, where
                for ours, theirs in zip(got.beams, wanted.beams, strict=True):
                    assert abs(ours.score - theirs.score) < TIE, where
            return
        for index, token_id in enumerate(got.new_token_ids):
            assert index < len(wanted.new_token_ids), where
            if token_id != wanted.new_token_ids[index]:
                self.num_near_ties += 1
                assert _is_near_tie(token_id, wanted.new_logprobs[index]), (
                    f"token {index} differs: {where}"
                )
                return  # later tokens continue another text
        if not aborted:
            assert (len(got.new_token_ids), got.finish_reason) == (
                len(wanted.new_token_ids),
                wanted.finish_reason,
            ), where

    def _check_nothing_left(self) -> None:
        scheduler = self._core.scheduler
        state = scheduler.state
        kv, queues = state.kv, state.queues
        kv.reset_prefix_cache()
        leftovers = {
            "blocks": [block for block in kv.pool.blocks if block.ref_count],
            "used blocks": kv.pool.num_blocks - kv.num_free_blocks,
            "used host blocks": kv.swap_pool.num_blocks - kv.swap_pool.num_free_blocks,
            "offloaded blocks": kv.offload and kv.offload._slots,
            "requests": state.requests,
            "running": state.running.in_order,
            "places": state.running.num_seqs,
            "queues": [*queues.waiting, *queues.loaded, *queues.waiting_to_load, *queues.loading],
            "swapped": state.swapped,
            "groups": state.groups._groups,
            "grammars": [*state.grammars._futures, *state.grammars._waiting],
            "steps": [*scheduler._in_flight, *state.awaiting_steps, *self._core._in_flight],
            "latencies": self._core.request_metrics._unfinished,
        }
        left = {name: value for name, value in leftovers.items() if value}
        assert not left, f"left over: {left}\n options {self.options}"
        runner = self._core.executor._worker._runner  # type: ignore[attr-defined]
        rows = set(runner._input_batch._row_of)
        assert rows <= set(state.worker.take_forgotten_ids()), (
            f"no step makes the worker remove {rows}"
        )


def _is_near_tie(token_id: int, wanted: TokenLogprobs) -> bool:
    logprobs = dict(wanted.top)
    return token_id in logprobs and abs(wanted.logprob - logprobs[token_id]) < TIE


NUM_REQUESTS = 40
SOAK_SECONDS = float(os.environ.get("BATON_SOAK_SECONDS", "0"))


@pytest.fixture(scope="module")
def reference(checkpoint) -> Iterator[ReferenceEngine]:
    engine = ReferenceEngine(checkpoint)
    yield engine
    engine.close()


@pytest.mark.parametrize("seed", [1, 3, 9, 11, 13, 15, 16, 17])
def test_soak(checkpoint, reference, seed) -> None:
    soak = Soak(checkpoint, reference, seed, NUM_REQUESTS)
    soak.run()
    assert soak.num_compared > 0


@pytest.mark.skipif(not SOAK_SECONDS, reason="set BATON_SOAK_SECONDS to run it")
@pytest.mark.timeout(SOAK_SECONDS + 600)
def test_long_soak(checkpoint, reference) -> None:
    end = time.monotonic() + SOAK_SECONDS
    seed = first = int(os.environ.get("BATON_SOAK_SEED", "1000"))
    while time.monotonic() < end:
        soak = Soak(checkpoint, reference, seed, NUM_REQUESTS)
        try:
            soak.run()
        except BaseException:
            print(f"seed {seed} fails; repeat it with BATON_SOAK_SECONDS=1 BATON_SOAK_SEED={seed}")
            raise
        print(f"seed {seed}: {soak.stats()}", flush=True)
        seed += 1
    print(f"{seed - first} seeds")
