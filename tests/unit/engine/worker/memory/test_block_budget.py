"""How many blocks the memory of a CPU or a GPU holds, and how many its host memory swaps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from baton_engine.models.errors import ConfigurationError
from baton_engine.worker.memory import block_budget
from baton_engine.worker.memory.block_budget import BlockSize, blocks_on_cpu, blocks_on_gpu
from baton_engine.worker.memory_profiling import profile_num_blocks
from baton_engine.worker.model_runner import ModelRunner
from baton_operator.builders.engine_settings import name_fields
from baton_protocol.options.config import CacheConfig, EngineConfig
from support.engine.step_driver import runner_config

MIB = 2**20


def with_cache(config: EngineConfig, cache: CacheConfig) -> EngineConfig:
    return msgspec.structs.replace(config, cache=cache)


def test_a_cpu_gets_the_configured_blocks_or_as_many_as_its_budgets_hold(checkpoint: Path) -> None:
    runner = ModelRunner(runner_config(checkpoint))
    block_nbytes = runner.spec.kv_cache_layout(1).block_nbytes
    cache = CacheConfig(memory_bytes=10 * block_nbytes + 1, swap_memory_bytes=4 * block_nbytes - 1)
    assert profile_num_blocks(ModelRunner(with_cache(runner.config, cache))) == (10, 3)
    unset = with_cache(runner.config, CacheConfig())
    assert profile_num_blocks(ModelRunner(unset))[0] == 256 * MIB // block_nbytes
    configured = CacheConfig(num_blocks=7, swap_memory_bytes=0)
    assert profile_num_blocks(ModelRunner(with_cache(runner.config, configured))) == (7, 0)


def test_budgets_below_one_block_or_above_the_available_memory_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = BlockSize(rank=MIB, engine=2 * MIB)
    with pytest.raises(
        ConfigurationError,
        match=r"memory_bytes=2097151 does not hold one KV block of 2097152 bytes",
    ):
        blocks_on_cpu(CacheConfig(memory_bytes=2 * MIB - 1), size)
    monkeypatch.setattr(block_budget, "available_host_memory", lambda: 100 * MIB)
    fitting = CacheConfig(memory_bytes=180 * MIB, swap_memory_bytes=20 * MIB)
    assert blocks_on_cpu(fitting, size) == (90, 10)
    with pytest.raises(
        ConfigurationError, match=r"0.10 GiB are available; lower cache.memory_bytes"
    ) as refused:
        blocks_on_cpu(CacheConfig(memory_bytes=182 * MIB, swap_memory_bytes=20 * MIB), size)
    assert refused.value.reason == "InsufficientMemory"
    assert str(refused.value).endswith("lower cache.memory_bytes or cache.swap_memory_bytes")
    with pytest.raises(
        ConfigurationError, match=r"101 KV blocks, 0 swap blocks .* lower cache.mem\w+$"
    ):
        blocks_on_cpu(CacheConfig(memory_bytes=202 * MIB), size)


@pytest.mark.parametrize(
    ("host", "cache", "blocks"),
    [
        (100 + 400, CacheConfig(memory_bytes=100 * MIB), (50, 10)),  # 5 % of 400 MiB
        (
            100 + 64 + 400,
            CacheConfig(memory_bytes=100 * MIB, offload_memory_bytes=64 * MIB),
            (50, 10),
        ),
        (100 + 399, CacheConfig(num_blocks=50), (50, 9)),
        (99_999, CacheConfig(num_blocks=50), (50, 50)),  # as many as the cache has
        (80, CacheConfig(num_blocks=50), (50, 0)),  # the other rank runs on another host
        (99_999, CacheConfig(num_blocks=50, swap_memory_bytes=0), (50, 0)),
    ],
)
def test_swap_memory_on_a_cpu_is_a_part_of_the_memory_that_other_blocks_leave(
    monkeypatch: pytest.MonkeyPatch, host: int, cache: CacheConfig, blocks: tuple[int, int]
) -> None:
    monkeypatch.setattr(block_budget, "available_host_memory", lambda: host * MIB)
    assert blocks_on_cpu(cache, BlockSize(rank=MIB, engine=2 * MIB)) == blocks


def test_an_engine_that_never_swaps_has_no_swap_memory(checkpoint: Path) -> None:
    config = runner_config(checkpoint)
    assert profile_num_blocks(ModelRunner(config))[1] > 0
    scheduler = msgspec.structs.replace(config.scheduler, preemption_mode="recompute")
    never = msgspec.structs.replace(config, scheduler=scheduler)
    assert profile_num_blocks(ModelRunner(never))[1] == 0


class FakeGpu:
    """A stand-in for `torch.cuda`: a GPU of 1000 MiB with PyTorch's caching allocator."""

    def __init__(self, others: int, weights: int, num_gpus: int) -> None:
        self.num_gpus = num_gpus
        self.others = others * MIB
        self.allocated = self.peak = self.reserved = 0
        self.allocate(weights + 200)
        self.allocate(-200)  # loading the weights takes more memory than the weights

    def allocate(self, mib: int) -> None:
        self.allocated += mib * MIB
        self.peak = max(self.peak, self.allocated)
        self.reserved = max(self.reserved, self.allocated)

    def run_step(self, activations: int) -> None:
        self.allocate(activations)
        self.allocate(-activations)

    def device_count(self) -> int:
        return self.num_gpus

    def empty_cache(self) -> None:
        self.reserved = self.allocated

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.allocated

    def synchronize(self, device: torch.device) -> None:
        """Nothing runs asynchronously here."""

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 1000 * MIB - self.others - self.reserved, 1000 * MIB


@pytest.fixture
def profile_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, int]]:
    """A call of `blocks_on_gpu` with blocks of 4 MiB on each of two ranks."""

    def profile(
        cache: CacheConfig,
        others: int = 50,
        weights: int = 300,
        step: int = 150,
        graphs: int = 30,
        host: int = 1000,
        num_gpus: int = 2,
    ) -> tuple[int, int]:
        gpu = FakeGpu(others, weights, num_gpus)
        monkeypatch.setattr(block_budget, "available_host_memory", lambda: host * MIB)
        monkeypatch.setattr(block_budget, "torch", SimpleNamespace(cuda=gpu))
        size = BlockSize(rank=4 * MIB, engine=8 * MIB)
        device = torch.device("cuda", 0)
        return blocks_on_gpu(cache, size, device, lambda: gpu.run_step(step), graphs * MIB)

    return profile


@pytest.mark.parametrize(
    ("use", "num_blocks"),
    [
        ({}, 92),  # 900 - (300 + 150) - 50 - 30 = 370 MiB
        ({"weights": 304}, 91),
        ({"step": 154}, 91),
        ({"others": 54}, 91),
        ({"graphs": 34}, 91),
        ({"graphs": 396}, 1),
    ],
)
def test_a_gpu_has_blocks_in_what_a_step_graphs_and_other_processes_leave(
    profile_gpu: Callable[..., tuple[int, int]], use: dict[str, int], num_blocks: int
) -> None:
    cache = CacheConfig(gpu_memory_utilization=0.9, swap_memory_bytes=31 * MIB)
    assert profile_gpu(cache, **use) == (num_blocks, 3)


def test_configured_blocks_and_bytes_count_on_a_gpu(
    profile_gpu: Callable[..., tuple[int, int]],
) -> None:
    half = CacheConfig(num_blocks=7, memory_bytes=8 * MIB, swap_memory_bytes=0)
    assert profile_gpu(half) == (7, 0)
    # Without the limit of 0.9: 1000 - 450 - 50 - 30 = 470 MiB, which are 117 blocks.
    for num_blocks in (1, 92, 117):
        cache = CacheConfig(memory_bytes=(num_blocks + 1) * 8 * MIB - 1, swap_memory_bytes=0)
        assert profile_gpu(cache) == (num_blocks, 0)


@pytest.mark.parametrize(
    ("cache", "use", "message"),
    [
        (
            CacheConfig(),
            {"graphs": 397},
            r"no room for 1 KV blocks of 4194304 bytes: of 0\.98 GiB, the fraction 0\.9 may be "
            r"used, weights and activations take 0\.44 GiB, CUDA graphs 0\.39 GiB and other "
            r"processes 0\.05 GiB; lower scheduler\.max_num_batched_tokens, or raise "
            r"cache\.gpu_memory_utilization$",
        ),
        (CacheConfig(), {"weights": 800}, "no room for 1 KV blocks"),
        (
            CacheConfig(num_blocks=93),
            {},
            r"no room for 93 KV blocks .* or cache\.num_blocks, or raise cache\.gpu",
        ),
        (
            CacheConfig(memory_bytes=118 * 8 * MIB),
            {},
            r"no room for 118 KV blocks .* fraction 1\.0 .* or cache\.memory_bytes$",
        ),
        (
            CacheConfig(memory_bytes=8 * MIB - 1),
            {},
            r"memory_bytes=8388607 does not hold one KV block of 8388608 bytes",
        ),
    ],
)
def test_a_gpu_without_room_for_the_blocks_is_refused(
    profile_gpu: Callable[..., tuple[int, int]],
    cache: CacheConfig,
    use: dict[str, int],
    message: str,
) -> None:
    with pytest.raises(ConfigurationError, match=message) as refused:
        profile_gpu(cache, **use)
    assert refused.value.reason == "InsufficientMemory"


HOST_BLOCKS = CacheConfig(swap_memory_bytes=8 * 5 * MIB, offload_memory_bytes=8 * 33 * MIB)


@pytest.mark.parametrize(
    ("num_gpus", "pinned"),
    [
        (2, 2 * (32 + 256)),  # per rank, 5 blocks of 4 MiB for swap and 33 for the offload tier
        (8, 2 * (32 + 256)),
        (1, 32 + 256),  # the other rank runs on another host
    ],
)
def test_a_gpu_engine_is_refused_if_its_pinned_memory_exceeds_the_host_memory(
    profile_gpu: Callable[..., tuple[int, int]], num_gpus: int, pinned: int
) -> None:
    assert profile_gpu(HOST_BLOCKS, host=pinned, num_gpus=num_gpus) == (92, 5)
    with pytest.raises(ConfigurationError) as refused:
        profile_gpu(HOST_BLOCKS, host=pinned - 1, num_gpus=num_gpus)
    assert refused.value.reason == "InsufficientMemory"
    text = name_fields(str(refused.value))
    needed = f"{pinned / 1024:.2f} GiB of pinned host memory"
    assert f"5 swap blocks and 33 offload blocks need {needed}" in text
    assert "cache.swap_memory_bytes (engine.swapMemory)" in text
    assert "cache.offload_memory_bytes (engine.offloadMemory)" in text


@pytest.mark.parametrize(
    ("host", "use", "num_swap_blocks"),
    [
        (2 * 20 * 64, {}, 16),  # 5 % are 64 MiB per rank
        (2 * 20 * 64 - 1, {}, 8),  # 63.98 MiB per rank, of which a power of two is pinned
        (1 * 20 * 64, {"num_gpus": 1}, 16),
        (2 * 20 * 4 - 1, {}, 0),  # less than a block per rank
        (99_999, {}, 92),  # as many as the cache has
        (99_999, {"weights": 304}, 91),
        (0, {}, 0),
    ],
)
@pytest.mark.parametrize(
    ("offload", "pinned_per_rank"), [(0, 0), (8 * 33 * MIB, 256)], ids=["no offload", "offload"]
)
def test_default_swap_memory_on_a_gpu_is_a_part_of_the_host_memory_after_the_offload_tier(
    profile_gpu: Callable[..., tuple[int, int]],
    host: int,
    use: dict[str, int],
    num_swap_blocks: int,
    offload: int,
    pinned_per_rank: int,
) -> None:
    host += use.get("num_gpus", 2) * pinned_per_rank
    cache = CacheConfig(offload_memory_bytes=offload)
    assert profile_gpu(cache, host=host, **use)[1] == num_swap_blocks


def test_default_swap_memory_is_not_named_where_the_offload_tier_exceeds_the_memory(
    profile_gpu: Callable[..., tuple[int, int]],
) -> None:
    cache = CacheConfig(offload_memory_bytes=8 * 33 * MIB)
    with pytest.raises(ConfigurationError, match="0 swap blocks and 33 offload blocks") as refused:
        profile_gpu(cache, host=2 * 256 - 1)
    assert "lower cache.offload_memory_bytes, or give the pod more memory" in str(refused.value)


def test_a_gpu_without_host_blocks_pins_nothing(
    profile_gpu: Callable[..., tuple[int, int]],
) -> None:
    assert profile_gpu(CacheConfig(swap_memory_bytes=0), host=0) == (92, 0)
