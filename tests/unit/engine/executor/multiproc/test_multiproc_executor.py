"""MultiprocExecutor: steps run in order, failures are reported, no worker outlives the executor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np
import psutil
import pytest

from baton_engine.executor.base import WorkerDiedError, WorkerError
from baton_engine.executor.multiproc import multiproc_executor
from baton_engine.executor.multiproc.multiproc_executor import MultiprocExecutor
from baton_engine.executor.step import GrammarOutput, ModelRunnerOutput
from baton_engine.models.errors import ConfigurationError, ModelInvalid
from baton_kv_transfer.connector import ConnectorOutput, LoadResult
from baton_kv_transfer.memory.layout import HeadRange, RankAddress
from baton_protocol.options.config import EngineConfig, KVRole
from support.engine.fake_workers import engine_config, step
from support.waiting import eventually

WAIT_S = 60.0  # long enough for a busy machine
DETECTION_S = 5.0


@pytest.fixture(scope="module")
def shared() -> Iterator[MultiprocExecutor]:
    """An executor with two workers, for tests that leave it healthy."""
    executor = MultiprocExecutor(engine_config(tensor=2), "instance", lambda: None)
    executor.initialize()
    yield executor
    executor.shutdown()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., MultiprocExecutor]]:
    """Start executors, and shut them down with the timeouts that the test has patched."""
    executors: list[MultiprocExecutor] = []

    def start(config: EngineConfig, wakeup: Callable[[], None] = lambda: None) -> MultiprocExecutor:
        executor = MultiprocExecutor(config, "instance", wakeup)
        executors.append(executor)
        executor.initialize()
        return executor

    yield start
    for executor in executors:
        executor.shutdown()
        eventually(
            lambda e=executor: not alive(e.worker_pids), timeout_s=WAIT_S, what="workers end"
        )


def alive(pids: list[int]) -> list[int]:
    return [
        pid
        for pid in pids
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]


def run(executor: MultiprocExecutor, step_id: int, *commands: str) -> Future[ModelRunnerOutput]:
    executor.execute_model(step(step_id, *commands))
    return executor.sample_tokens(None)


def test_all_workers_start_with_the_smallest_number_of_blocks(shared: MultiprocExecutor) -> None:
    calls = shared.collective_rpc("get_calls")
    assert (
        calls
        == [
            [
                "join_groups",
                "load_model",
                "num_available_blocks",
                "initialize_cache",
                "warm_up",
                "open_connector",
            ]
        ]
        * 2
    )
    info = shared.collective_rpc("model_info")[1]
    assert (info.num_blocks, info.num_swap_blocks) == (99, 10)


def test_results_arrive_in_the_order_of_the_steps(shared: MultiprocExecutor) -> None:
    futures = [run(shared, number, *["slow"] * (number % 3 == 0)) for number in range(20)]
    assert [f.result(WAIT_S).sampled_token_ids["r"] for f in futures] == list(range(20))


def test_the_workers_continue_while_tokens_are_pending(
    make: Callable[..., MultiprocExecutor],
) -> None:
    executor = make(engine_config(tensor=2))
    futures = [run(executor, number, *["pending"] * (number in (1, 2))) for number in range(5)]
    assert futures[0].result(WAIT_S).sampled_token_ids == {"r": 0}
    assert executor.collective_rpc("echo", (1,), timeout_s=WAIT_S) == [1, 1], "step 4 has run"
    assert not any(future.done() for future in futures[1:]), "results arrive in order"
    executor.collective_rpc("release", timeout_s=WAIT_S)
    assert [f.result(WAIT_S).sampled_token_ids["r"] for f in futures] == list(range(5))
    assert run(executor, 5).result(WAIT_S).sampled_token_ids == {"r": 5}


def test_an_error_of_pending_tokens_fails_the_steps_in_flight_and_all_later_ones(
    make: Callable[..., MultiprocExecutor],
) -> None:
    executor = make(engine_config(tensor=2))
    before, lost, later = (run(executor, n, *c) for n, c in enumerate([["pending"], ["lost"], []]))
    executor.collective_rpc("release", timeout_s=WAIT_S)
    assert before.result(WAIT_S).sampled_token_ids == {"r": 0}
    for future in (lost, later, run(executor, 3)):
        with pytest.raises(WorkerError, match=r"failed in a step: ValueError: the device broke"):
            future.result(WAIT_S)


def test_tokens_that_stay_pending_fail_at_the_step_timeout(
    make: Callable[..., MultiprocExecutor],
) -> None:
    executor = make(engine_config(step_timeout_s=1.0))
    with pytest.raises(WorkerDiedError, match=r"have not answered step 0 for 1 s"):
        run(executor, 0, "pending").result(WAIT_S)


def test_starting_a_step_does_not_wait_for_the_model(shared: MultiprocExecutor) -> None:
    futures = [run(shared, number, "slow") for number in range(3)]
    assert not futures[-1].done()
    assert futures[-1].result(WAIT_S).sampled_token_ids == {"r": 2}


def test_the_grammar_bitmask_is_sent_with_sample_tokens(shared: MultiprocExecutor) -> None:
    shared.execute_model(step(1))
    output = shared.sample_tokens(GrammarOutput(["g"], np.array([[5, 7]], dtype=np.int32))).result(
        WAIT_S
    )
    assert output.sampled_token_ids == {"r": 1, "g": 12}


def test_a_message_larger_than_a_slot_arrives_in_order(shared: MultiprocExecutor) -> None:
    large = b"x" * (3 * multiproc_executor.SLOT_NBYTES)
    before = run(shared, 1)
    assert shared.collective_rpc("echo", (large,)) == [large, large]
    after = run(shared, 2)
    assert before.result(WAIT_S).sampled_token_ids == {"r": 1}
    assert after.result(WAIT_S).sampled_token_ids == {"r": 2}


def test_results_of_a_call_are_in_rank_order(shared: MultiprocExecutor) -> None:
    assert [rank for rank, _ in shared.collective_rpc("who")] == [0, 1]
    assert [pid for _, pid in shared.collective_rpc("who")] == shared.worker_pids


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_workers_are_bound_to_their_own_cpus_and_the_parent_is_not(
    shared: MultiprocExecutor,
) -> None:
    before = os.sched_getaffinity(0)
    first, second = shared.collective_rpc("cpus")
    assert first
    assert second
    assert set(first).isdisjoint(second)
    assert {*first, *second} <= before == os.sched_getaffinity(0)


def test_the_engine_wakes_when_a_transfer_has_ended_on_all_workers(
    make: Callable[..., MultiprocExecutor],
) -> None:
    woken = threading.Event()
    executor = make(engine_config(tensor=2, kv_role=KVRole.BOTH), woken.set)
    addresses = [
        RankAddress("host", 7000, HeadRange(0, 2)),
        RankAddress("host", 7001, HeadRange(2, 2)),
    ]
    assert executor.collective_rpc("get_ranks") == [addresses] * 2
    assert not run(executor, 0, "loaded:0").result(WAIT_S).connector
    assert not woken.is_set()
    # Worker 0 answers, perhaps before worker 1 reports the end of its transfer.
    first = run(executor, 1, "loaded:1").result(WAIT_S)
    assert woken.wait(WAIT_S)
    second = run(executor, 2).result(WAIT_S)
    ended = [output.connector for output in (first, second) if output.connector]
    assert ended == [ConnectorOutput({"sent"}, {"load": LoadResult(2)})]
    stats = executor.connector_stats()
    assert stats.blocks_sent == 10 + 11
    assert stats.failures == {"timeout": 2}


def test_a_failed_call_has_the_workers_traceback_and_later_calls_work(
    shared: MultiprocExecutor,
) -> None:
    with pytest.raises(
        WorkerError,
        match=r"worker 1 failed in raise_on: KeyError: 'nothing here'(.|\n)*in raise_on",
    ):
        shared.collective_rpc("raise_on", (1,))
    with pytest.raises(WorkerError, match="no attribute 'no_such_method'"):
        shared.collective_rpc("no_such_method")
    with pytest.raises(WorkerError, match=r"worker [01] failed in unpicklable"):
        shared.collective_rpc("unpicklable")
    with pytest.raises(Exception, match="pickle"):
        shared.collective_rpc("echo", (lambda: None,))
    assert shared.collective_rpc("echo", (3,)) == [3, 3]
    assert not any(shared.collective_rpc("has_imported", ("torch",))), (
        "the import of torch would delay the report of a failure by seconds"
    )


def test_the_timeout_of_a_call_names_the_worker(
    make: Callable[..., MultiprocExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MultiprocExecutor, "shutdown_timeout_s", 0.5)  # worker 1 hangs
    executor = make(engine_config(tensor=2))
    with pytest.raises(
        TimeoutError, match=r"hang_on was not answered within 0.3 s by worker \[1\]"
    ):
        executor.collective_rpc("hang_on", (1,), timeout_s=0.3)


@pytest.mark.parametrize("commands", [["raise:0"], ["hang:0", "raise:1"]])
def test_a_failed_step_fails_its_future_and_all_later_ones(
    make: Callable[..., MultiprocExecutor], commands: list[str]
) -> None:
    """The other worker hangs, as in a collective operation with the failed one."""
    executor = make(engine_config(tensor=2))
    assert run(executor, 0).result(WAIT_S).sampled_token_ids == {"r": 0}
    bad, later = run(executor, 1, *commands), run(executor, 2)
    rank = commands[-1].removeprefix("raise:")
    expected = rf"worker {rank} failed in a step: ValueError: the model broke(.|\n)*execute_model"
    for future in (bad, later):
        with pytest.raises(WorkerError, match=expected):
            future.result(DETECTION_S)
    with pytest.raises(WorkerError):
        run(executor, 3).result(0)


def test_kill_of_a_worker_fails_pending_work_and_is_reported_once(
    make: Callable[..., MultiprocExecutor],
) -> None:
    executor = make(engine_config(tensor=2))
    reasons: list[str] = []
    executor.set_failure_callback(reasons.append)
    waiting = run(executor, 0, "hang:0")
    call: Future[None] = Future()

    def wait_for_call() -> None:
        try:
            executor.collective_rpc("who")
        except Exception as error:
            call.set_exception(error)

    caller = threading.Thread(target=wait_for_call)
    caller.start()
    victim = executor.worker_pids[1]
    os.kill(victim, signal.SIGKILL)
    expected = rf"worker 1 \(pid {victim}\) was killed by signal 9 \(SIGKILL\)"
    with pytest.raises(WorkerDiedError, match=expected):
        waiting.result(DETECTION_S)
    eventually(lambda: reasons, timeout_s=DETECTION_S, what="the failure callback")
    caller.join(DETECTION_S)
    with pytest.raises(WorkerDiedError, match=expected):
        call.result(0)
    with pytest.raises(WorkerDiedError, match=expected):
        executor.collective_rpc("who")
    with pytest.raises(WorkerDiedError, match=expected):
        run(executor, 1).result(0)
    assert len(reasons) == 1
    late: list[str] = []
    executor.set_failure_callback(late.append)
    assert late == reasons


def test_kill_of_an_idle_worker_is_reported(make: Callable[..., MultiprocExecutor]) -> None:
    executor = make(engine_config())
    reasons: list[str] = []
    executor.set_failure_callback(reasons.append)
    os.kill(executor.worker_pids[0], signal.SIGKILL)
    assert (
        "killed by signal 9"
        in eventually(lambda: reasons, timeout_s=DETECTION_S, what="the failure callback")[0]
    )


@pytest.mark.parametrize("waiting", ["step", "call"])
def test_the_timeout_for_a_stopped_worker_names_it(
    make: Callable[..., MultiprocExecutor], waiting: str
) -> None:
    executor = make(engine_config(tensor=2, step_timeout_s=1.0))
    victim = executor.worker_pids[0]
    os.kill(victim, signal.SIGSTOP)
    name = {"step": "step 0", "call": "who"}[waiting]
    expected = (
        rf"have not answered {name} for 1 s \(parallel.step_timeout_s\): "
        rf"worker 0 \(pid {victim}\) stopped \(SIGSTOP"
    )
    with pytest.raises(WorkerDiedError, match=expected):
        run(executor, 0).result(WAIT_S) if waiting == "step" else executor.collective_rpc("who")


def test_a_step_that_hangs_fails_at_the_step_timeout(
    make: Callable[..., MultiprocExecutor],
) -> None:
    executor = make(engine_config(step_timeout_s=1.0))
    with pytest.raises(
        WorkerDiedError, match=r"have not answered step 0 for 1 s \(parallel.step_timeout_s\)$"
    ):
        run(executor, 0, "hang").result(WAIT_S)


def test_a_call_can_take_longer_than_the_step_timeout(
    make: Callable[..., MultiprocExecutor],
) -> None:
    executor = make(engine_config(step_timeout_s=0.2))
    executor.collective_rpc("nap")
    assert executor.collective_rpc("echo", (1,)) == [1]


def test_the_step_timeout_does_not_count_time_in_which_the_parent_was_stopped() -> None:
    script = f"""
import sys, threading
sys.path[:0] = {sys.path!r}
from support.engine.fake_workers import engine_config, step
from baton_engine.executor.multiproc.multiproc_executor import MultiprocExecutor
executor = MultiprocExecutor(engine_config(step_timeout_s=2.0), "instance", lambda: None)
executor.initialize()
print("up", flush=True)
for number in range(1000):
    executor.execute_model(step(number, "slow"))
    executor.sample_tokens(None).result()
    if sys.stdin in __import__("select").select([sys.stdin], [], [], 0)[0]:
        break
executor.shutdown()
print("well", flush=True)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout.readline() == "up\n"
    parent.send_signal(signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        parent.wait(4.0)
    parent.send_signal(signal.SIGCONT)
    output, errors = parent.communicate("enough\n", timeout=WAIT_S)
    assert output == "well\n", errors


def test_a_result_that_cannot_be_unpickled_fails_the_executor_at_once(
    make: Callable[..., MultiprocExecutor],
) -> None:
    executor = make(engine_config(tensor=2))
    reasons: list[str] = []
    executor.set_failure_callback(reasons.append)
    with pytest.raises(
        WorkerDiedError, match="its answers cannot be received: ModuleNotFoundError"
    ):
        executor.collective_rpc("unreadable", timeout_s=WAIT_S)
    assert len(eventually(lambda: reasons, timeout_s=DETECTION_S, what="the failure callback")) == 1
    eventually(lambda: not alive(executor.worker_pids), timeout_s=DETECTION_S, what="workers end")


def test_shutdown_in_a_forked_child_does_not_end_the_workers(shared: MultiprocExecutor) -> None:
    child = os.fork()
    if child == 0:
        shared.shutdown()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert [
        pid for _, pid in shared.collective_rpc("who", timeout_s=DETECTION_S)
    ] == shared.worker_pids


def test_workers_ignore_sigint_and_sigterm(make: Callable[..., MultiprocExecutor]) -> None:
    executor = make(engine_config())
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(executor.worker_pids[0], number)
    assert run(executor, 0).result(WAIT_S).sampled_token_ids == {"r": 0}


def test_a_configuration_error_of_a_worker_keeps_its_type_reason_and_message(
    make: Callable[..., MultiprocExecutor],
) -> None:
    with pytest.raises(ModelInvalid, match=r"lm_head\.weight is missing") as error:
        make(engine_config("WorkerOfBadModel", tensor=2))
    assert error.value.reason == "ModelInvalid"
    assert error.value.message == "model.safetensors: tensor lm_head.weight is missing"


@pytest.mark.parametrize(
    ("worker", "error", "message"),
    [
        ("WorkerThatCannotStart", WorkerError, "failed in its start: OSError: no such device"),
        ("WorkerThatDiesAtStart", WorkerDiedError, r"worker 0 \(pid \d+\) exited with code 7"),
        (
            "NoSuchWorker",
            ConfigurationError,
            "cannot load worker support.engine.fake_workers.NoSuchWorker",
        ),
    ],
)
def test_a_failed_start_reports_the_reason(
    make: Callable[..., MultiprocExecutor], worker: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(engine_config(worker))


def test_a_start_that_hangs_fails_at_the_start_timeout(
    make: Callable[..., MultiprocExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MultiprocExecutor, "start_timeout_s", 1.0)
    with pytest.raises(TimeoutError, match="0 of 1 worker processes were up after 1 s"):
        make(engine_config("WorkerThatHangsAtStart"))


def test_a_worker_can_wake_the_engine(make: Callable[..., MultiprocExecutor]) -> None:
    woken = threading.Event()
    executor = make(engine_config(), woken.set)
    executor.collective_rpc("wake_engine")
    assert woken.wait(WAIT_S)


def test_shutdown_ends_the_workers_and_can_be_repeated(
    make: Callable[..., MultiprocExecutor], capfd: pytest.CaptureFixture[str]
) -> None:
    executor = make(engine_config(pipeline=2))
    assert executor.max_concurrent_batches == 2
    pids = executor.worker_pids
    executor.shutdown()
    executor.shutdown()
    assert not alive(pids)
    log = capfd.readouterr().err
    assert "[rank 0]" in log
    assert "[rank 1]" in log
    with pytest.raises(WorkerDiedError):
        run(executor, 0).result(0)


def test_workers_end_with_their_parent() -> None:
    """The parent has an idle executor and one whose step hangs."""
    script = f"""
import sys, threading
sys.path[:0] = {sys.path!r}
from support.engine.fake_workers import engine_config, step
from baton_engine.executor.multiproc.multiproc_executor import MultiprocExecutor
executors = [MultiprocExecutor(engine_config(tensor=n), "instance", lambda: None) for n in (1, 2)]
for executor in executors:
    executor.initialize()
executor.execute_model(step(0, "hang"))
print(*(pid for executor in executors for pid in executor.worker_pids), flush=True)
threading.Event().wait()
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 3
    parent.kill()
    parent.wait()
    eventually(
        lambda: not alive(pids), timeout_s=DETECTION_S, what=f"workers {pids} end with their parent"
    )
