"""UniProcExecutor: the worker's thread, its errors, and refused configurations."""

from __future__ import annotations

import os
import threading

import pytest

from baton_engine.executor.base import WorkerError
from baton_engine.executor.external_launcher import ExternalLauncherExecutor
from baton_engine.executor.uniproc import UniProcExecutor
from baton_engine.models.errors import ConfigurationError
from pocketkube.ports import free_ports
from support.engine.fake_workers import end_just_after_timeouts, engine_config, step
from support.waiting import eventually

WAIT_S = 30.0


@pytest.fixture
def executor() -> UniProcExecutor:
    executor = UniProcExecutor(engine_config(), "instance", lambda: None)
    executor.initialize()
    return executor


def test_steps_end_in_order_and_calls_wait_for_them(executor: UniProcExecutor) -> None:
    futures = []
    for number in range(3):
        executor.execute_model(step(number, "slow"))
        futures.append(executor.sample_tokens(None))
    assert executor.collective_rpc("echo", ("after",)) == ["after"]
    assert all(future.done() for future in futures)
    assert [future.result().sampled_token_ids["r"] for future in futures] == [0, 1, 2]
    executor.shutdown()
    executor.shutdown()


def test_the_worker_continues_while_tokens_are_pending(executor: UniProcExecutor) -> None:
    executor.execute_model(step(0, "pending"))
    pending = executor.sample_tokens(None)
    executor.execute_model(step(1))
    assert executor.sample_tokens(None).result(WAIT_S).sampled_token_ids == {"r": 1}
    assert not pending.done()
    executor.collective_rpc("release", timeout_s=WAIT_S)
    assert pending.result(WAIT_S).sampled_token_ids == {"r": 0}
    executor.shutdown()


def test_an_error_of_pending_tokens_fails_their_step(executor: UniProcExecutor) -> None:
    executor.execute_model(step(0, "lost"))
    pending = executor.sample_tokens(None)
    executor.collective_rpc("release", timeout_s=WAIT_S)
    with pytest.raises(ValueError, match="the device broke"):
        pending.result(WAIT_S)


def test_tokens_that_stay_pending_do_not_hold_the_shutdown(executor: UniProcExecutor) -> None:
    worker = executor._worker
    executor.execute_model(step(0, "pending"))
    pending = executor.sample_tokens(None)
    executor.collective_rpc("echo", (1,), timeout_s=WAIT_S)  # the step has run
    shutdown = threading.Thread(target=executor.shutdown)
    shutdown.start()
    shutdown.join(WAIT_S)
    ended = not shutdown.is_alive()
    assert not pending.done()
    worker.release()
    assert ended


def test_a_failed_step_fails_its_future(executor: UniProcExecutor) -> None:
    executor.execute_model(step(0, "raise:0"))
    with pytest.raises(ValueError, match="the model broke"):
        executor.sample_tokens(None).result(WAIT_S)


def test_a_failed_call_has_the_workers_traceback(executor: UniProcExecutor) -> None:
    with pytest.raises(
        WorkerError, match=r"worker 0 failed in raise_on: KeyError(.|\n)*in raise_on"
    ):
        executor.collective_rpc("raise_on", (0,))


def test_a_step_that_hangs_does_not_hold_the_shutdown(
    executor: UniProcExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(executor._worker, "execute_model", lambda step: answer.wait())
    monkeypatch.setattr(executor, "shutdown_timeout_s", 0.1)
    executor.execute_model(step(0))
    shutdown = threading.Thread(target=executor.shutdown)
    shutdown.start()
    shutdown.join(WAIT_S)
    ended = not shutdown.is_alive()
    answer.set()
    shutdown.join()
    assert ended
    assert "because a step hangs" in caplog.text


def test_a_call_has_a_timeout(executor: UniProcExecutor) -> None:
    executor.execute_model(step(0, "slow"))
    with pytest.raises(TimeoutError, match=r"echo was not answered within 0\.001 s"):
        executor.collective_rpc("echo", (1,), timeout_s=0.001)


@pytest.mark.parametrize("kind", [UniProcExecutor, ExternalLauncherExecutor])
def test_a_call_that_ends_just_after_its_timeout_has_succeeded(
    kind: type[UniProcExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    [port] = free_ports(1)
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    executor = kind(engine_config(), "instance", lambda: None)
    executor.initialize()
    with monkeypatch.context() as patch:
        end_just_after_timeouts(patch)
        assert executor.collective_rpc("echo", (1,), timeout_s=WAIT_S) == [1]
    executor.shutdown()


def test_several_workers_and_unknown_worker_classes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="executor uniproc has one worker"):
        UniProcExecutor(engine_config(tensor=2), "instance", lambda: None).initialize()
    with pytest.raises(
        ConfigurationError, match=r"cannot load worker support\.engine\.fake_workers\.NoSuchWorker"
    ):
        UniProcExecutor(engine_config("NoSuchWorker"), "instance", lambda: None).initialize()


def test_shutdown_in_a_forked_child_does_not_wait_for_the_workers_thread(
    executor: UniProcExecutor,
) -> None:
    child = os.fork()
    if child == 0:
        executor.shutdown()
        os._exit(0)
    ended = eventually(
        lambda: os.waitpid(child, os.WNOHANG)[0], timeout_s=WAIT_S, what="the child ends"
    )
    assert ended == child
    assert executor.collective_rpc("echo", (1,)) == [1]
