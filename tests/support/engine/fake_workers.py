"""Worker classes without a model. They record their calls, and fail or hang on request.

For the tests of executors.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton_engine.executor.base import ModelInfo
from baton_engine.executor.step import (
    GrammarOutput,
    ModelRunnerOutput,
    PendingOutput,
    SchedulerOutput,
)
from baton_engine.models.errors import ModelInvalid
from baton_kv_transfer.connector import ConnectorOutput, ConnectorStats, FailureReason, LoadResult
from baton_kv_transfer.memory.layout import HeadRange, RankAddress
from baton_protocol.options.config import (
    EngineConfig,
    KVRole,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
)

logger = logging.getLogger(__name__)


def engine_config(
    worker: str = "FakeWorker",
    tensor: int = 1,
    pipeline: int = 1,
    executor: str = "auto",
    step_timeout_s: float = 300.0,
    kv_role: KVRole = KVRole.NONE,
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path="/no/model"),
        parallel=ParallelConfig(
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipeline,
            worker_class=f"{__name__}.{worker}",
            executor_class=executor,
            step_timeout_s=step_timeout_s,
        ),
        kv_transfer=KVTransferConfig(role=kv_role),
        device="cpu",
        num_threads=1,
    )


def end_just_after_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each wait for a Future with a timeout fail when the Future has its result."""
    result = Future.result

    def result_after_timeout(self: Future[Any], timeout: float | None = None) -> Any:
        value = result(self)
        if timeout is not None:
            raise TimeoutError
        return value

    monkeypatch.setattr(Future, "result", result_after_timeout)


def step(step_id: int, *finished: str) -> SchedulerOutput:
    """Return a step for which FakeWorker samples the token `step_id` of request "r".

    Args:
        finished: commands for `FakeWorker.execute_model()`.
    """
    return SchedulerOutput([], [], {"r": 1}, list(finished), step_id=step_id)


def _fail_to_read() -> None:
    raise ModuleNotFoundError("No module named 'only_the_worker_has_this'")


class Unreadable:
    """An object that can be pickled, but not unpickled."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _fail_to_read, ()


class FakeWorker:
    def __init__(self, config: EngineConfig, instance_id: str, rank: int = 0) -> None:
        self.config = config
        self.rank = rank
        self.calls: list[str] = []
        self.ranks: list[RankAddress] = []
        self._step: SchedulerOutput | None = None
        self._released = threading.Event()
        self._wakeup: Callable[[], None] | None = None

    def join_groups(
        self,
        store_address: tuple[str, int],
        generation: int,
        host: str | None = None,
        secret: bytes = b"",
    ) -> None:
        self.calls.append("join_groups")

    def load_model(self) -> None:
        self.calls.append("load_model")

    def num_available_blocks(self) -> tuple[int, int]:
        self.calls.append("num_available_blocks")
        return 100 - self.rank, 10 + self.rank

    def initialize_cache(self, num_blocks: int, num_swap_blocks: int) -> None:
        self.calls.append("initialize_cache")
        self.blocks = (num_blocks, num_swap_blocks)

    def warm_up(self) -> None:
        self.calls.append("warm_up")

    def open_connector(self, wakeup: Callable[[], None]) -> RankAddress | None:
        self.calls.append("open_connector")
        self._wakeup = wakeup
        if self.config.kv_transfer.role is KVRole.NONE:
            return None
        return RankAddress("host", 7000 + self.rank, HeadRange(2 * self.rank, 2))

    def connect(self, ranks: list[RankAddress]) -> None:
        self.calls.append("connect")
        self.ranks = ranks

    def model_info(self) -> ModelInfo:
        return ModelInfo(self.blocks[0], 1000, (2,), 4096, "hash", self.blocks[1])

    def execute_model(self, step: SchedulerOutput) -> None:
        """Execute the commands in `finished_request_ids`.

        The commands are raise:RANK, kill:RANK, hang[:RANK] and slow. `sample_tokens()` executes the
        commands loaded:RANK, pending (until `release`) and lost (pending, and then an error).
        """
        assert self._step is None, "sample_tokens() was not called"
        self._step = step
        for command in step.finished_request_ids:
            action, _, rank = command.partition(":")
            if rank and int(rank) != self.rank:
                continue
            if action == "raise":
                raise ValueError("the model broke")
            if action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if action == "hang":
                threading.Event().wait()
            if action == "slow":
                time.sleep(0.05)

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput | PendingOutput:
        step, self._step = self._step, None
        output = ModelRunnerOutput(sampled_token_ids={"r": step.step_id})
        if f"loaded:{self.rank}" in step.finished_request_ids:
            output.connector = ConnectorOutput({"sent"}, {"load": LoadResult(3 - self.rank)})
        if grammar is not None:
            output.sampled_token_ids |= {
                request_id: int(grammar.bitmask.sum()) for request_id in grammar.request_ids
            }
        for command in {"pending", "lost"}.intersection(step.finished_request_ids):
            return PendingOutput(partial(self._wait, command, step.step_id), output.connector)
        return output

    def _wait(self, command: str, token_id: int) -> dict[str, int]:
        self._released.wait()
        if command == "lost":
            raise ValueError("the device broke")
        return {"r": token_id}

    def connector_stats(self) -> ConnectorStats | None:
        stats = ConnectorStats(blocks_sent=10 + self.rank)
        stats.count_failure(FailureReason.TIMEOUT)
        return stats

    def shutdown(self) -> None:
        logger.warning("shut down")
        if os.path.isdir(self.config.model.path):
            Path(self.config.model.path, f"shut-down-{self.rank}").touch()

    # Methods for collective_rpc

    def who(self) -> tuple[int, int]:
        return self.rank, os.getpid()

    def has_imported(self, module: str) -> bool:
        return module in sys.modules

    def threads(self) -> tuple[int | None, str | None]:
        return self.config.num_threads, os.environ.get("OMP_NUM_THREADS")

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def cpus(self) -> list[int]:
        return sorted(os.sched_getaffinity(0))

    def get_ranks(self) -> list[RankAddress]:
        return self.ranks

    def get_calls(self) -> list[str]:
        return self.calls

    def release(self) -> None:
        """End the wait for all pending tokens."""
        self._released.set()

    def echo(self, value: Any) -> Any:
        return value

    def raise_on(self, rank: int) -> None:
        if self.rank == rank:
            raise KeyError("nothing here")

    def hang_on(self, rank: int) -> None:
        if self.rank == rank:
            time.sleep(3600)

    def nap(self) -> None:
        time.sleep(0.5)

    def unpicklable(self) -> Any:
        return lambda: None

    def unreadable(self) -> Any:
        return Unreadable()

    def wake_engine(self) -> None:
        self._wakeup()


class WorkerOfBadModel(FakeWorker):
    def load_model(self) -> None:
        if self.rank == self.config.parallel.world_size - 1:
            raise ModelInvalid("model.safetensors: tensor lm_head.weight is missing")


class WorkerThatCannotStart(FakeWorker):
    def __init__(self, config: EngineConfig, instance_id: str, rank: int = 0) -> None:
        raise OSError("no such device")


class WorkerThatDiesAtStart(FakeWorker):
    def __init__(self, config: EngineConfig, instance_id: str, rank: int = 0) -> None:
        os._exit(7)


class WorkerThatHangsAtStart(FakeWorker):
    def __init__(self, config: EngineConfig, instance_id: str, rank: int = 0) -> None:
        time.sleep(3600)
