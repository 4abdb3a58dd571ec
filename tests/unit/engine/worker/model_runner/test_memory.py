"""The memory of the runner: the KV cache, swap blocks, sleep and wake-up."""

from __future__ import annotations

import gc
import mmap
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import msgspec
import pytest
import torch

from baton_engine.distributed.group import ParallelContext
from baton_engine.executor.step import SchedulerOutput
from baton_engine.random_checkpoint import create_checkpoint
from baton_engine.worker import model_runner
from baton_engine.worker.model_runner import ModelRunner
from baton_engine.worker.sleep import sleep, wake_up
from baton_protocol.options.config import CacheConfig
from support.engine.model_cases import run_ranks
from support.engine.step_driver import (
    VOCAB_SIZE,
    Request,
    StepDriver,
    make_runner,
    random_prompt,
    runner_config,
)

MIB = 2**20
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "vocab_size": VOCAB_SIZE}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_checkpoint(tmp_path_factory.mktemp("memory") / "llama", "llama", **SIZES)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


def generate(runner: ModelRunner, num_blocks: int = 64) -> list[int]:
    request = Request("request", random_prompt(40, seed=1), 8)
    driver = StepDriver(runner, num_blocks)
    driver.run([request])
    driver.step([], 1)
    return request.generated


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


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_the_kv_cache_and_wake_up_restores_the_output(
    checkpoint: Path, level: int
) -> None:
    runner = make_runner(checkpoint, num_blocks=64)
    expected = generate(runner)
    cache = runner.allocate_kv_cache(128 * MIB // runner.spec.kv_cache_layout(1).block_nbytes)
    awake = resident_bytes()
    sleep(runner, level)
    assert cache.untyped_storage().nbytes() == 0
    assert awake - resident_bytes() > 100 * MIB
    with pytest.raises(RuntimeError, match="wake_up"):
        runner.execute_model(SchedulerOutput([], [], {}, []))
    wake_up(runner, ["weights"])
    with pytest.raises(RuntimeError, match="no KV memory"):
        runner.execute_model(SchedulerOutput([], [], {}, []))
    wake_up(runner, ["kv_cache"])
    assert not cache.any()
    assert generate(runner) == expected


def test_sleep_level_2_frees_the_weights_and_wake_up_loads_them(checkpoint: Path) -> None:
    runner = make_runner(checkpoint, num_blocks=64)
    expected = generate(runner)
    norm = weakref.ref(runner.loaded.model.norm)
    sleep(runner, 1)
    assert norm() is not None, "level 1 keeps weights on a CPU"
    sleep(runner, 2)
    gc.collect()
    assert norm() is None
    wake_up(runner)
    assert generate(runner) == expected


def test_weights_that_are_replaced_in_a_sleep_change_the_hash_and_the_output(
    tmp_path: Path,
) -> None:
    folder = create_checkpoint(tmp_path / "model", "llama", seed=1, **SIZES)
    runner = make_runner(folder, num_blocks=64)
    first, output = runner.spec.compatibility_hash, generate(runner)
    sleep(runner, 2)
    wake_up(runner)
    assert runner.spec.compatibility_hash == first
    sleep(runner, 2)
    other = create_checkpoint(tmp_path / "other", "llama", seed=2, **SIZES)
    shutil.copytree(other, folder, dirs_exist_ok=True)
    wake_up(runner, ["kv_cache"])
    assert runner.spec.compatibility_hash == first
    wake_up(runner)
    assert runner.spec.compatibility_hash == make_runner(other).spec.compatibility_hash != first
    assert generate(runner) == generate(make_runner(other, num_blocks=64)) != output


def test_wake_up_of_a_runner_that_is_awake_keeps_its_kv(checkpoint: Path) -> None:
    runner = make_runner(checkpoint, num_blocks=64)
    _, kv = runner._ready()
    kv.cache.fill_(1.0)
    wake_up(runner)
    assert bool((kv.cache == 1.0).all())


def test_unknown_sleep_levels_and_wake_up_tags_are_refused(checkpoint: Path) -> None:
    runner = make_runner(checkpoint, num_blocks=1)
    with pytest.raises(ValueError, match=r"sleep level must be 1 .* or 2 .*, got 3"):
        sleep(runner, 3)
    with pytest.raises(ValueError, match="got cache"):
        wake_up(runner, ["cache"])
    assert runner._ready()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_warm_up_works_in_every_dtype_and_writes_no_kv(checkpoint: Path, dtype: str) -> None:
    runner = make_runner(checkpoint, num_blocks=2, dtype=dtype)
    runner.warm_up()
    _, kv = runner._ready()
    assert bool(torch.isnan(kv.cache).all()), "warm_up wrote KV"
