"""The memory of the runner: the KV cache, swap blocks and warm-up."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from baton_engine.distributed.group import ParallelContext
from baton_engine.random_checkpoint import create_checkpoint
from baton_engine.worker import model_runner
from baton_engine.worker.model_runner import ModelRunner
from baton_protocol.options.config import CacheConfig
from support.engine.model_cases import run_ranks
from support.engine.step_driver import (
    VOCAB_SIZE,
    make_runner,
    runner_config,
)

MIB = 2**20
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "vocab_size": VOCAB_SIZE}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_checkpoint(tmp_path_factory.mktemp("memory") / "llama", "llama", **SIZES)


def test_ranks_keep_freed_memory_of_what_the_host_blocks_leave_of_their_share(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CacheConfig(offload_memory_bytes=20 * MIB)
    config = msgspec.structs.replace(runner_config(checkpoint), cache=cache)
    kept: list[int] = []
    monkeypatch.setattr(model_runner, "available_host_memory", lambda: 100 * MIB)
    monkeypatch.setattr(model_runner, "keep_freed_memory", kept.append)

    def allocate(parallel: ParallelContext) -> None:
        runner = ModelRunner(config, parallel)
        swap = 10 * MIB // runner.spec.kv_cache_layout(1).block_nbytes  # on each rank
        runner.allocate_kv_cache(4, swap)

    run_ranks(allocate, tensor_size=1)
    run_ranks(allocate, tensor_size=2)
    assert kept == [70 * MIB] + 2 * [30 * MIB]


#: Prints by how many bytes the process grows when 64 MiB of swap memory are allocated, and when
#: every block of them is written.
SWAP_PROGRAM = """
import mmap, sys
from pathlib import Path
from baton_engine.executor.step import BlockCopy, SchedulerOutput
from baton_engine.worker.model_runner import ModelRunner
from support.engine.step_driver import runner_config

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

runner = ModelRunner(runner_config(Path(sys.argv[1])))
runner.load_model()
num_swap_blocks = (64 << 20) // runner.spec.kv_cache_layout(1).block_nbytes
before = resident_bytes()
runner.allocate_kv_cache(4, num_swap_blocks)
allocated = resident_bytes()
every_block = [BlockCopy(n % 4, n) for n in range(num_swap_blocks)]
runner.execute_model(SchedulerOutput([], [], {}, [], swap_out=every_block))
print(allocated - before, resident_bytes() - before)
"""


def test_swap_memory_becomes_resident_at_its_first_use(checkpoint: Path) -> None:
    """The test measures a new process. In this process, garbage of earlier tests may be freed."""
    done = subprocess.run(
        [sys.executable, "-c", SWAP_PROGRAM, str(checkpoint)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    allocated, written = map(int, done.stdout.split())
    assert allocated < 32 * MIB
    assert written > 56 * MIB


@pytest.mark.parametrize("num_blocks", [1, 3, 1000])
def test_the_kv_cache_is_page_aligned_and_zero(checkpoint: Path, num_blocks: int) -> None:
    runner = ModelRunner(runner_config(checkpoint))
    runner.load_model()
    cache = runner.allocate_kv_cache(num_blocks)
    assert cache.data_ptr() % mmap.PAGESIZE == 0
    assert cache.is_contiguous()
    assert not cache.any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_warm_up_works_in_every_dtype_and_writes_no_kv(checkpoint: Path, dtype: str) -> None:
    runner = make_runner(checkpoint, num_blocks=2, dtype=dtype)
    runner.warm_up()
    _, kv = runner._ready()
    assert bool(torch.isnan(kv.cache).all()), "warm_up wrote KV"
