"""A worker publishes the blocks of each step once, as soon as the model runner has written them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from baton_engine.distributed.group import ParallelContext
from baton_engine.distributed.group_errors import GroupBrokenError
from baton_engine.executor.step import SchedulerOutput
from baton_engine.worker.worker import Worker
from baton_kv_transfer.connector import BlockSave, ConnectorMetadata
from baton_protocol.options.config import EngineConfig, ModelConfig


class ScriptedRunner:
    """A model runner that reports written KV, ends without, or fails."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.reports = self.fails = False

    def finish_steps(self) -> None:
        self.calls.append("finish")
        if self.fails:
            raise RuntimeError("the device broke")

    def execute_model(self, step: SchedulerOutput, kv_written: Callable[[], None]) -> None:
        self.calls.append("layers")
        if self.reports:
            kv_written()
        if self.fails:
            raise GroupBrokenError("a member is gone")
        self.calls.append("logits")


def step(transfer_id: str) -> SchedulerOutput:
    save = BlockSave(transfer_id, 0, [3], [b"h"], 16, last=False)
    return SchedulerOutput([], [], {"r": 16}, [], connector=ConnectorMetadata(saves=[save]))


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def runner(calls: list[str]) -> ScriptedRunner:
    return ScriptedRunner(calls)


@pytest.fixture
def worker(calls: list[str], runner: ScriptedRunner) -> Worker:
    worker = Worker(EngineConfig(model=ModelConfig(path="/no/model")), "instance")
    worker._runner = runner  # type: ignore[assignment]
    worker.connector = SimpleNamespace(  # type: ignore[assignment]
        start=lambda metadata: None,
        save=lambda metadata: calls.append(metadata.saves[0].transfer_id),
    )
    return worker


def test_blocks_are_published_while_the_step_runs(
    worker: Worker, runner: ScriptedRunner, calls: list[str]
) -> None:
    runner.reports = True
    worker.execute_model(step("one"))
    assert calls == ["layers", "one", "logits"]


def test_blocks_are_published_after_a_step_that_did_not_report_its_kv(
    worker: Worker, calls: list[str]
) -> None:
    worker.execute_model(step("one"))
    assert calls == ["layers", "logits", "one"]


def test_blocks_of_a_broken_expert_group_are_not_published(
    worker: Worker, runner: ScriptedRunner, calls: list[str]
) -> None:
    runner.fails = True
    with pytest.raises(GroupBrokenError):
        worker.execute_model(step("broken"))
    runner.fails = False
    worker.execute_model(step("next"))
    assert calls == ["layers", "layers", "logits", "next"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_shutdown_waits_for_the_device_before_it_leaves_the_groups(
    worker: Worker, runner: ScriptedRunner, calls: list[str], fails: bool
) -> None:
    """Other ranks may still need this rank's part of an exchange between GPUs."""
    runner.fails = fails
    worker.connector = None
    worker._info = SimpleNamespace()  # type: ignore[assignment]
    group = SimpleNamespace(close=lambda: calls.append("close"))
    worker.parallel = ParallelContext(tensor=group, pipeline=group)  # type: ignore[arg-type]
    worker.shutdown()
    assert calls == ["finish", "close", "close"]
