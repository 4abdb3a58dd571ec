"""Sleep and wake-up of a model runner."""

from __future__ import annotations

import gc
import mmap
import shutil
import weakref
from pathlib import Path

import pytest

from baton_engine.executor.step import SchedulerOutput
from baton_engine.random_checkpoint import create_checkpoint
from baton_engine.worker.model_runner import ModelRunner
from baton_engine.worker.sleep import sleep, wake_up
from support.engine.step_driver import (
    VOCAB_SIZE,
    Request,
    StepDriver,
    make_runner,
    random_prompt,
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
