"""Hand-off between engines of one and two tensor ranks gives the reference's tokens.

The tests cover pull and push, loads that fail on one rank, aborted requests and evicted prefixes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from baton_engine.core.engine_core import EngineCore
from baton_engine.executor.base import executor_name, load_executor_class
from baton_engine.executor.step import SchedulerOutput
from baton_engine.worker.memory.peer_memory import PeerMemory
from baton_engine.worker.worker import Worker
from baton_kv_transfer.memory.layout import KVCacheLayout
from baton_protocol.engine_messages import (
    EngineCoreRequest,
    FinishReason,
    KVSide,
    KVTransferParams,
    PrefillResult,
)
from baton_protocol.options.config import (
    CacheConfig,
    EngineConfig,
    KVRole,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from baton_protocol.sampling_params import SamplingParams
from pocketkube.ports import free_ports
from support.parity import assert_greedy, prompts, reference_model
from support.pods import KV_TRANSPORT

VOCAB = 500
MAX_TOKENS = 12
#: Part of the ids of transfers that fail on one of two ranks.
SPOILED = "spoiled"
#: Tensor ranks, KV transfer mode, worker class, and number of device blocks.
ENGINES = {
    "one": (1, "push", f"{__name__}.StagedWorker", 128),
    "left": (2, "pull", f"{__name__}.SpoilingWorker", 40),
    "right": (2, "push", f"{__name__}.SpoilingWorker", 128),
}
IDLE_S = 0.05
#: More rounds of steps than any hand-off takes.
STEPS = 20_000


class StagedWorker(Worker):
    """A worker that stages blocks in host memory, as for a GPU, with fewer slots than blocks."""

    def make_peer_memory(self, cache: torch.Tensor, layout: KVCacheLayout) -> PeerMemory:
        return PeerMemory(cache, layout, 24 * layout.block_nbytes, staged=True)


class SpoilingWorker(Worker):
    """A worker whose second rank requests blocks that the producer does not have."""

    def execute_model(self, step: SchedulerOutput) -> None:
        if self.rank == 1:
            for load in step.connector.loads:
                if SPOILED in load.transfer_id:
                    load.block_hashes = [bytes(len(block_hash)) for block_hash in load.block_hashes]
        super().execute_model(step)


class Engines:
    """Engine cores that hand requests over to each other, stepped in turn."""

    def __init__(self, checkpoint: str) -> None:
        self._awake = threading.Event()
        self._ports = dict(zip(ENGINES, free_ports(len(ENGINES)), strict=True))
        with ThreadPoolExecutor() as starting:
            cores = starting.map(lambda name: self._start(name, checkpoint), ENGINES)
            self.cores = dict(zip(ENGINES, cores, strict=True))

    def _start(self, name: str, checkpoint: str) -> EngineCore:
        ranks, mode, worker, num_blocks = ENGINES[name]
        config = EngineConfig(
            model=ModelConfig(path=checkpoint, dtype="float32"),
            cache=CacheConfig(num_blocks=num_blocks, offload_memory_bytes=2**24),
            scheduler=SchedulerConfig(max_num_batched_tokens=48),  # prompts of several chunks
            parallel=ParallelConfig(tensor_parallel_size=ranks, worker_class=worker),
            kv_transfer=KVTransferConfig(
                role=KVRole.BOTH,
                transport=KV_TRANSPORT,
                mode=mode,
                port=self._ports[name],
                load_timeout_s=20.0,
            ),
            device="cpu",
            num_threads=1,
        )
        return EngineCore(
            config, load_executor_class(executor_name(config))(config, name, self._awake.set)
        )

    def hand_over(
        self,
        producer: str,
        consumer: str,
        asked: list[list[int]],
        *,
        transfers: str = "",
        aborts: dict[int, tuple[int, str]] | None = None,
    ) -> list[list[int]]:
        """Prefill on one engine, decode on another, and return the generated tokens.

        Args:
            transfers: the prefix of the transfer ids.
            aborts: prompt number -> the round before which its request is aborted, and the engine.
        """
        aborts = aborts or {}
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        first = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        texts: dict[str, list[int]] = {}
        for number, prompt in enumerate(asked):
            name = f"{transfers}{producer}-{consumer}-{number}"
            texts[name] = []
            produce = KVTransferParams(KVSide.PRODUCE, name, consumer)
            consume = KVTransferParams(
                KVSide.CONSUME, name, producer, "127.0.0.1", self._ports[producer]
            )
            for engine, given, side in ((producer, first, produce), (consumer, params, consume)):
                request = EngineCoreRequest(name, prompt, given, kv_transfer=side)
                assert self.cores[engine].add_request(request) is None
        names = list(texts)
        for round_number in range(STEPS):
            progress = False
            for number, (when, engine) in aborts.items():
                if when == round_number:
                    self.cores[engine].abort_requests([names[number]])
            for name, core in self.cores.items():
                if not core.has_requests:
                    continue
                for output in core.step_fn():
                    assert not output.error, output.error
                    texts[output.request_id] += output.new_token_ids
                    if name == producer and output.finished:
                        error = "aborted" if output.finish_reason is FinishReason.ABORT else ""
                        result = PrefillResult(output.request_id, output.new_token_ids, error)
                        self.cores[consumer].add_prefill_result(result)
                progress |= core.made_progress
            if not any(core.has_requests for core in self.cores.values()):
                return list(texts.values())
            if not progress:
                self._awake.wait(IDLE_S)
                self._awake.clear()
        raise AssertionError(
            f"unfinished after {STEPS} steps: {[core.get_stats() for core in self.cores.values()]}"
        )

    def close(self) -> None:
        with ThreadPoolExecutor() as ending:
            list(ending.map(EngineCore.shutdown, self.cores.values()))


@pytest.fixture(scope="module")
def engines(checkpoints) -> Iterator[Engines]:
    engines = Engines(str(checkpoints["llama"]))
    yield engines
    engines.close()


@pytest.fixture(scope="module")
def reference(checkpoints) -> torch.nn.Module:
    return reference_model(checkpoints["llama"])


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [("one", "left"), ("one", "right"), ("left", "one"), ("left", "right"), ("right", "left")],
)
def test_a_hand_off_between_engines_of_any_size_keeps_the_tokens(
    engines: Engines, reference, producer: str, consumer: str
) -> None:
    """The consumer computes no prompt token, and no block is held afterwards."""
    asked = prompts(
        6,
        VOCAB,
        longest=150,
        seed=list(ENGINES).index(producer) * 10 + list(ENGINES).index(consumer),
    )
    before = engines.cores[consumer].get_stats()
    received, failures = before.kv_transfer.blocks_received, before.kv_transfer.failures
    computed = before.prompt_tokens_computed
    outputs = engines.hand_over(producer, consumer, asked)
    assert_greedy(reference, asked, outputs, f"{producer} to {consumer}")
    after = engines.cores[consumer].get_stats()
    assert after.prompt_tokens_computed == computed
    assert after.kv_transfer.blocks_received > received
    assert after.kv_transfer.failures == failures
    for core in engines.cores.values():
        assert core.get_stats().kv_cache_usage == 0


def test_blocks_evicted_by_both_ranks_are_restored_from_host_memory(
    engines: Engines, reference
) -> None:
    asked = prompts(24, VOCAB, longest=150, seed=300)
    stats = engines.cores["left"].get_stats()
    restored, computed = stats.offload_blocks_restored, stats.prompt_tokens_computed
    for turn in ("first-", "second-"):
        outputs = engines.hand_over("one", "left", asked, transfers=turn)
        assert_greedy(reference, asked, outputs, turn)
    stats = engines.cores["left"].get_stats()
    assert stats.offload_blocks_restored > restored
    assert stats.prompt_tokens_computed == computed, "the other blocks are transferred again"


@pytest.mark.parametrize("consumer", ["left", "right"])
def test_a_load_that_fails_on_one_rank_is_recomputed_on_both(
    engines: Engines, reference, consumer: str
) -> None:
    asked = prompts(4, VOCAB, longest=90, seed=100 + list(ENGINES).index(consumer))
    computed = engines.cores[consumer].get_stats().prompt_tokens_computed
    outputs = engines.hand_over("one", consumer, asked, transfers=SPOILED)
    assert_greedy(reference, asked, outputs, f"spoiled on one rank of {consumer}")
    assert engines.cores[consumer].get_stats().prompt_tokens_computed == computed + sum(
        map(len, asked)
    )
    for core in engines.cores.values():
        assert core.get_stats().kv_cache_usage == 0


@pytest.mark.parametrize(
    ("producer", "consumer"), [("left", "right"), ("right", "left"), ("one", "left")]
)
@pytest.mark.parametrize("transfers", ["", SPOILED])
def test_an_abort_on_either_side_leaves_no_block(
    engines: Engines, reference, producer: str, consumer: str, transfers: str
) -> None:
    asked = prompts(12, VOCAB, longest=120, seed=200 + list(ENGINES).index(producer))
    aborts = {number: (number, producer if number % 3 else consumer) for number in range(10)}
    outputs = engines.hand_over(
        producer, consumer, asked, transfers=f"{transfers}aborted-", aborts=aborts
    )
    assert_greedy(reference, asked[10:], outputs[10:], f"{producer} to {consumer}")
    for core in engines.cores.values():
        stats = core.get_stats()
        assert (stats.kv_cache_usage, stats.num_transfers_held) == (0, 0)
