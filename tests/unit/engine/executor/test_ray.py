"""RayExecutor on a local cluster of two nodes. Skipped if ray is not installed.

The node of the driver has one CPU and one GPU, and the other node has two of each. No test uses the
GPUs, so the machine needs none.
"""

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

from baton_engine.core.engine_core import EngineCore
from baton_engine.core.step_records import StepFailedError
from baton_engine.executor.base import WorkerDiedError, WorkerError
from baton_engine.executor.cpu_binding import assign_usable_cores
from baton_engine.executor.ray import RayExecutor
from baton_engine.models.errors import ModelInvalid
from baton_engine.random_checkpoint import create_checkpoint
from baton_protocol.engine_messages import EngineCoreRequest
from baton_protocol.options.config import EngineConfig, ModelConfig
from baton_protocol.sampling_params import SamplingParams
from support.engine.fake_workers import end_just_after_timeouts, engine_config, step
from support.engine.greedy_steps import generate, generate_in_one_process, model_config
from support.waiting import eventually

os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}  # read at import
ray = pytest.importorskip("ray")
Cluster = pytest.importorskip("ray.cluster_utils").Cluster

WAIT_S = 120.0
DETECTION_S = 5.0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    nodes = Cluster()
    for number in (1, 2):
        nodes.add_node(
            num_cpus=number,
            num_gpus=number,
            include_dashboard=False,
            node_ip_address=f"127.50.0.{number}",  # ray.init replaces 127.0.0.1
            object_store_memory=80 * 2**20,
        )
    ray.init(
        nodes.address,
        _node_ip_address="127.50.0.1",
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
    )
    yield
    ray.shutdown()
    nodes.shutdown()


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
    make: Callable[[EngineConfig], RayExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One test covers all of this, because actors take seconds to start."""
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
    assert executor.collective_rpc("echo", (1,), timeout_s=WAIT_S) == [1, 1]  # not the late result

    with monkeypatch.context() as patch:
        end_just_after_timeouts(patch)
        assert executor.collective_rpc("echo", (2,), timeout_s=WAIT_S) == [2, 2]

    executor.execute_model(step(9, "hang:0"))
    waiting = executor.sample_tokens(None)
    os.kill(who[1][1], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="the Ray actor of worker 1 has ended"):
        waiting.result(DETECTION_S)
    assert (
        "the Ray actor of worker 1 has ended"
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


def test_ranks_are_ordered_by_node_and_share_the_cores_and_gpus_of_their_node(
    make: Callable[[EngineConfig], RayExecutor],
) -> None:
    executor = make(
        msgspec.structs.replace(engine_config(tensor=3), device="cuda", num_threads=None)
    )

    def call(method: str, *args: Any) -> list[Any]:
        return executor.collective_rpc(method, args, timeout_s=WAIT_S)

    assert call("environment", "LOCAL_RANK") == ["0", "0", "1"]
    alone, *together = call("environment", "CUDA_VISIBLE_DEVICES")
    assert alone == "0"
    assert together in (["0,1"] * 2, ["1,0"] * 2)
    expected = [assign_usable_cores(num_workers)[0].num_threads for num_workers in (1, 2, 2)]
    assert [num_threads for num_threads, _ in call("threads")] == expected


def test_an_engine_reserves_room_for_all_of_its_workers_or_for_none(
    make: Callable[[EngineConfig], RayExecutor],
) -> None:
    first = make(engine_config(tensor=2))
    second = RayExecutor(engine_config(tensor=2), "second", lambda: None)
    second.reserve_timeout_s = 0.5
    with pytest.raises(
        TimeoutError,
        match=r"no room for 2 workers within 0.5 s\. Each worker needs 1 CPU of one node, and the "
        r"cluster has 3 CPU \(1 free\)\.",
    ):
        second.initialize()
    second.shutdown()
    first.shutdown()
    eventually(
        lambda: ray.available_resources().get("CPU") == 3, timeout_s=WAIT_S, what="3 free CPUs"
    )


def test_a_worker_that_hangs_ends_the_engine_at_the_step_timeout() -> None:
    config = engine_config(tensor=2, step_timeout_s=1.0)
    executor = RayExecutor(config, "instance", lambda: None)
    executor.shutdown_timeout_s = 0.5
    core = EngineCore(config, executor)
    pid = core.executor.collective_rpc("who", timeout_s=WAIT_S)[0][1]
    os.kill(pid, signal.SIGSTOP)
    core.add_request(EngineCoreRequest("r", [1, 2], SamplingParams(max_tokens=2)))
    with pytest.raises(StepFailedError, match=r"not answered for 1 s \(parallel.step_timeout_s\)"):
        core.step()
    core.shutdown()
    eventually(lambda: not Path(f"/proc/{pid}").exists(), timeout_s=WAIT_S, what="worker 0 ends")
