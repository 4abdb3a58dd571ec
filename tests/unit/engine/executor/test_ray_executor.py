"""RayExecutor on a local cluster. Skipped if ray is not installed."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_engine.checkpoint import create_checkpoint
from baton_engine.executor.base import WorkerDiedError, WorkerError
from baton_engine.executor.ray import RayExecutor
from baton_engine.models.errors import ModelInvalid
from baton_protocol.config import EngineConfig, ModelConfig
from support.engine.fake_workers import engine_config, step
from support.engine.greedy_steps import generate, generate_in_one_process, model_config
from support.waiting import eventually

os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}  # read at import
ray = pytest.importorskip("ray")

WAIT_S = 120.0
DETECTION_S = 5.0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(
        num_cpus=2,
        num_gpus=0,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=80 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
    )
    yield
    ray.shutdown()


@pytest.fixture
def make() -> Iterator[Callable[[EngineConfig], RayExecutor]]:
    executors: list[RayExecutor] = []

    def start(config: EngineConfig) -> RayExecutor:
        executor = RayExecutor(config, "instance", lambda: None)
        executors.append(executor)
        executor.initialize()
        return executor

    yield start
    for executor in executors:
        executor.shutdown()
        executor.shutdown()


def test_steps_calls_failures_and_the_death_of_a_worker(
    make: Callable[[EngineConfig], RayExecutor],
) -> None:
    """One test for all of it, as actors take seconds to start."""
    executor = make(engine_config(tensor=2))
    reasons: list[str] = []
    executor.set_failure_callback(reasons.append)

    futures = []
    for number in range(5):
        executor.execute_model(step(number, "slow"))
        futures.append(executor.sample_tokens(None))
    assert [future.result(WAIT_S).sampled_token_ids["r"] for future in futures] == list(range(5))

    who: list[Any] = executor.collective_rpc("who", timeout_s=WAIT_S)
    assert [rank for rank, _ in who] == [0, 1]
    with pytest.raises(
        WorkerError, match=r"worker 1 failed in raise_on: KeyError(.|\n)*in raise_on"
    ):
        executor.collective_rpc("raise_on", (1,), timeout_s=WAIT_S)
    with pytest.raises(TimeoutError, match=r"nap was not answered within 0.1 s by worker \[0, 1\]"):
        executor.collective_rpc("nap", timeout_s=0.1)

    executor.execute_model(step(9, "hang:0"))
    waiting = executor.sample_tokens(None)
    os.kill(who[1][1], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="worker 1 is gone"):
        waiting.result(DETECTION_S)
    assert (
        "worker 1 is gone"
        in eventually(lambda: reasons, timeout_s=DETECTION_S, what="the failure callback")[0]
    )
    with pytest.raises(WorkerDiedError):
        executor.collective_rpc("who")
    assert len(reasons) == 1
    assert "\n" not in reasons[0]


def test_two_tensor_ranks_give_the_tokens_of_one_process(
    make: Callable[[EngineConfig], RayExecutor], tmp_path: Path
) -> None:
    path = create_checkpoint(tmp_path / "model", "llama", seed=5)
    expected = generate_in_one_process(model_config(path))
    assert generate(make(model_config(path, tensor=2, executor="ray"))) == expected


def test_shutdown_calls_the_shutdown_of_workers(
    make: Callable[[EngineConfig], RayExecutor], tmp_path: Path
) -> None:
    executor = make(msgspec.structs.replace(engine_config(), model=ModelConfig(path=str(tmp_path))))
    executor.shutdown()
    assert [path.name for path in tmp_path.iterdir()] == ["shut-down-0"]


def test_a_failed_step_and_an_invalid_model_are_reported(
    make: Callable[[EngineConfig], RayExecutor],
) -> None:
    executor = make(engine_config())
    executor.execute_model(step(0, "raise:0"))
    with pytest.raises(
        WorkerError, match=r"worker 0 failed in a step: ValueError: the model broke"
    ):
        executor.sample_tokens(None).result(WAIT_S)
    executor.shutdown()
    with pytest.raises(ModelInvalid, match=r"lm_head\.weight is missing"):
        make(engine_config("WorkerOfBadModel"))
