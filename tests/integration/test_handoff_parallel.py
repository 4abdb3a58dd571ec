"""Hand-off between engines of one and of two tensor ranks, in all directions, read and written: the reference's tokens.

Also when a load ends badly on one rank only, when requests are aborted on either side, and when prefixes were evicted meanwhile.
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
from baton_protocol.config import (
    CacheConfig,
    EngineConfig,
    KVRole,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from baton_protocol.messages import (
    EngineCoreRequest,
    FinishReason,
    KVSide,
    KVTransferParams,
    PrefillResult,
)
from baton_protocol.sampling import SamplingParams
from pocketkube.ports import free_ports
from support.parity import assert_greedy, prompts, reference_model
from support.pods import KV_TRANSPORT

VOCAB = 500
MAX_TOKENS = 12
SPOILED = "spoiled"
"""In the ids of transfers that end badly on one of two ranks."""
ENGINES = {
    "one": (1, "push", f"{__name__}.StagedWorker", 128),
    "left": (2, "pull", f"{__name__}.SpoilingWorker", 40),
    "right": (2, "push", f"{__name__}.SpoilingWorker", 128),
}
"""Tensor ranks, how the engine gets its blocks, its workers' class, and its blocks on the device."""
IDLE_S = 0.05
STEPS = 20_000
"""More than any hand-off takes; each waits for a transfer if there is nothing to compute."""


class StagedWorker(Worker):
    """Moves its blocks through slots of host memory, as it would those of a GPU; there are fewer slots than blocks."""

    def make_peer_memory(self, cache: torch.Tensor, layout: KVCacheLayout) -> PeerMemory:
        return PeerMemory(cache, layout, 24 * layout.block_nbytes, staged=True)


class SpoilingWorker(Worker):
    """Its second rank expects blocks that the producer does not have."""

    def execute_model(self, step: SchedulerOutput) -> None:
        if self.rank == 1:
            for load in step.connector.loads:
                if SPOILED in load.transfer_id:
                    load.block_hashes = [bytes(len(block_hash)) for block_hash in load.block_hashes]
        super().execute_model(step)


class Engines:
    """Engine cores that hand requests to each other, stepped in turn as their processes would."""

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
        """Prefills on one engine, decodes on another; returns the generated tokens.

        Args:
            transfers: begins their ids.
            aborts: before which round of steps a prompt's request is aborted, and on which engine.
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
def reference(checkpoints):
    return reference_model(checkpoints["llama"])


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [("one", "left"), ("one", "right"), ("left", "one"), ("left", "right"), ("right", "left")],
)
def test_tokens_are_the_references_whatever_the_sizes_of_the_two_sides(
    engines: Engines, reference, producer: str, consumer: str
) -> None:
    """Greedy, and computed from KV that came from the other engine, all of it, of which nothing is held afterwards."""
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


def test_what_both_ranks_evicted_comes_back_from_host_memory(engines: Engines, reference) -> None:
    asked = prompts(24, VOCAB, longest=150, seed=300)
    stats = engines.cores["left"].get_stats()
    restored, computed = stats.offload_blocks_restored, stats.prompt_tokens_computed
    for turn in ("first-", "second-"):
        outputs = engines.hand_over("one", "left", asked, transfers=turn)
        assert_greedy(reference, asked, outputs, turn)
    stats = engines.cores["left"].get_stats()
    assert stats.offload_blocks_restored > restored
    assert stats.prompt_tokens_computed == computed, "the rest came from the other engine again"


@pytest.mark.parametrize("consumer", ["left", "right"])
def test_what_one_rank_did_not_get_is_computed_on_both(
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
def test_nothing_is_held_after_aborts_at_any_time_on_either_side(
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
