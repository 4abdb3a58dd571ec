"""The offload tier: its slots, its effect on requests, and the order of the worker's copies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from baton_engine.executor.step import BlockCopy, SchedulerOutput
from baton_engine.kv_cache.offload import OffloadTier
from baton_engine.scheduling.request import Request
from baton_engine.worker.memory.kv_memory import KVMemory
from baton_engine.worker.worker import Worker
from baton_kv_transfer.connector import ConnectorMetadata, LoadRequest
from baton_kv_transfer.memory.layout import KVCacheLayout
from baton_protocol.engine_messages import (
    EngineCoreRequest,
    KVSide,
    KVTransferParams,
    PrefillResult,
)
from baton_protocol.options.config import EngineConfig, ModelConfig
from baton_protocol.sampling_params import SamplingParams
from support.engine.scheduling.fake_runner import continuation
from support.engine.scheduling.scheduler_engine import BLOCK, Engine


def test_the_least_recently_used_block_is_evicted() -> None:
    tier = OffloadTier(2)
    assert [tier.store(name, block) for block, name in enumerate([b"a", b"b"])] == [None, None]
    tier.take_copies()
    assert tier.store(b"a", 7) is None, "the block is already stored"
    assert tier.take_copies() == ([], []), "a stored block is not copied again"
    assert tier.store(b"c", 9) == b"b"
    assert tier._slots.keys() == {b"a", b"c"}
    assert tier.take_copies() == ([BlockCopy(9, 1)], [])
    assert (tier.num_stored, len(tier)) == (3, 2)


def test_a_slot_that_a_step_reads_or_writes_is_not_reused_in_that_step() -> None:
    tier = OffloadTier(2)
    tier.store(b"a", 0)
    tier.store(b"b", 1)
    tier.take_copies()
    found = tier.find(b"a")
    tier.hold([found])
    tier.restore(found, 5)
    assert tier.store(b"c", 2) == b"b"
    assert tier.store(b"d", 3) == b"d", "both slots are in use"
    assert tier.take_copies() == ([BlockCopy(2, 1)], [BlockCopy(0, 5)])
    assert tier.store(b"d", 3) == b"a", "the next step can reuse the slot"


def test_a_step_can_restore_a_block_that_it_stores() -> None:
    tier = OffloadTier(1)
    tier.store(b"a", 4)
    found = tier.find(b"a")
    tier.hold([found])
    tier.restore(found, 6)
    assert tier.take_copies() == ([BlockCopy(4, 0)], [BlockCopy(0, 6)])


def test_the_tail_of_a_restored_prefix_is_evicted_before_its_head() -> None:
    tier = OffloadTier(2)
    tier.store(b"head", 0)
    tier.store(b"tail", 1)
    tier.take_copies()
    tier.hold([block for name in (b"head", b"tail") if (block := tier.find(name)) is not None])
    tier.take_copies()
    assert tier.store(b"other", 2) == b"tail"


def test_an_evicted_prefix_is_restored_instead_of_recomputed() -> None:
    engine = Engine(num_blocks=8, budget=64, num_offload_blocks=16)
    first, other = list(range(100, 120)), list(range(200, 228))
    engine.add("a", first)
    engine.run()
    engine.add("b", other)
    engine.run()
    computed = engine.scheduler.stats().prompt_tokens_computed
    engine.add("a again", first)
    step = engine.step()
    assert [copy.target for copy in step.restore] == step.new_requests[0].block_ids[
        : len(step.restore)
    ]
    engine.run()
    assert engine.text("a again") == continuation(first, 4, ignore_eos=True)
    stats = engine.scheduler.stats()
    assert stats.offload_blocks_restored == len(step.restore) == 4, (
        "only the block of the last token is computed"
    )
    assert stats.prompt_tokens_computed - computed == len(first) - 4 * BLOCK
    assert stats.prompt_tokens_cached == 4 * BLOCK
    assert stats.offload_blocks_stored >= 4
    salted = Request(EngineCoreRequest("salted", other, SamplingParams(), cache_salt="x"))
    assert engine.kv.find_cached_prefix(salted, len(other)) == []


def test_a_kv_load_restores_its_offloaded_prefix_in_a_step_without_tokens() -> None:
    engine = Engine(num_blocks=8, budget=64, num_offload_blocks=16)
    prompt, other = list(range(100, 118)), list(range(200, 228))
    for request_id, tokens in (("a", prompt[: 2 * BLOCK]), ("b", other)):
        engine.add(request_id, tokens)
        engine.run()
    engine.add(
        "c", prompt, kv_transfer=KVTransferParams(KVSide.CONSUME, "t", "peer", "127.0.0.1", 1)
    )
    step = engine.step()
    (load,) = step.connector.loads
    assert (len(step.restore), load.first_block_index, step.num_scheduled_tokens) == (2, 2, {})
    engine.load("t", prompt)
    expected = continuation(prompt, 4, ignore_eos=True)
    engine.scheduler.add_prefill_result(PrefillResult("c", expected[:1]))
    engine.run()
    assert [*expected[:1], *engine.text("c")] == expected
    stats = engine.scheduler.stats()
    assert (stats.prompt_tokens_remote, stats.kv_transfer_recomputed_tokens) == (
        len(prompt) - 2 * BLOCK,
        0,
    )


def test_a_worker_stores_evicted_blocks_before_transfers_start() -> None:
    calls: list[str] = []
    worker = Worker(EngineConfig(model=ModelConfig(path="/no/model")), "instance")
    worker._runner = SimpleNamespace(  # type: ignore[assignment]
        store_evicted=lambda step: calls.append("store"),
        execute_model=lambda step, kv_written: calls.append("run"),
    )
    worker.connector = SimpleNamespace(  # type: ignore[assignment]
        start=lambda metadata: calls.append("transfer")
    )
    load = LoadRequest("t", "127.0.0.1", 1, "peer", 0, [3], [b"h"])
    worker.execute_model(
        SchedulerOutput(
            [], [], {}, [], connector=ConnectorMetadata(loads=[load]), store=[BlockCopy(3, 0)]
        )
    )
    assert calls == ["store", "transfer", "run"]


def test_memory_of_the_tier_is_freed_by_drop_and_allocated_by_restore() -> None:
    layout = KVCacheLayout(
        num_blocks=4, num_kv_heads=2, num_layers=1, block_size=2, head_dim=4, dtype="float32"
    )
    kv = KVMemory(layout, 0, torch.device("cpu"), num_offload_blocks=3)
    kv.cache.copy_(torch.arange(4.0).view(4, 1, 1, 1, 1, 1).expand_as(kv.cache))
    step = SchedulerOutput([], [], {}, [], store=[BlockCopy(3, 2), BlockCopy(1, 0)])
    step.restore = [BlockCopy(2, 0)]
    step.block_copies = [BlockCopy(0, 1)]
    assert step.reaches_model_runner
    kv.store_evicted(step)
    kv.move_blocks(step)
    assert kv.cache[:, 0, 0, 0, 0, 0].tolist() == [3.0, 3.0, 2.0, 3.0], (
        "block copies must run after restores"
    )
    assert kv._offloaded[0].eq(1.0).all()
    kv.drop()
    assert kv._offloaded.numel() == 0
    kv.restore()
    kv.store_evicted(step)


def test_a_tier_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="one slot at least, got 0"):
        OffloadTier(0)
