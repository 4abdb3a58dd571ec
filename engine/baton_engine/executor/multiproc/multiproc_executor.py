"""The executor of worker processes, one per rank, on this host.

The executor writes commands into a ring in shared memory, and all workers read the ring. Answers
return through one pipe per worker.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import secrets
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from baton_engine.distributed.store.store_server import StoreServer, open_store
from baton_engine.executor.base import ModelInfo, WorkerDiedError
from baton_engine.executor.commands import (
    Answer,
    Call,
    CallDone,
    CallFailed,
    Command,
    ExecuteModel,
    SampleTokens,
    Shutdown,
    Started,
    StartFailed,
    StartWorker,
    StepBroken,
    StepDone,
    StepFailed,
    TransfersEnded,
    Wakeup,
)
from baton_engine.executor.cpu_binding import bindings
from baton_engine.executor.futures import reject, resolve, wait_for_answers
from baton_engine.executor.multiproc.connector_outputs import OutputAggregator
from baton_engine.executor.multiproc.interrupts import InterruptPipes
from baton_engine.executor.multiproc.shm_ring import RingMemory, RingWriter
from baton_engine.executor.multiproc.worker_processes import WorkerProcesses
from baton_engine.executor.remote_executor import RemoteExecutor
from baton_engine.executor.startup import (
    JOIN_TIMEOUT_S,
    initialize_workers,
    output_rank,
    share_threads,
)
from baton_engine.executor.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from baton_kv_transfer.connector import ConnectorStats
from baton_protocol.options.config import EngineConfig, KVRole

logger = logging.getLogger(__name__)

#: Maximum number of commands that the slowest worker has not yet read.
RING_SLOTS = 32
#: Bytes per slot of the ring. A step of 64k new prompt tokens fits. Only written slots take memory.
SLOT_NBYTES = 256 * 1024
#: Address of the rendezvous store and of gloo. gloo accepts any connection, so no other host may
#: reach this address.
LOOPBACK = "127.0.0.1"
#: Maximum wait for workers to end by themselves. Workers that still run are then killed.
SHUTDOWN_TIMEOUT_S = 10.0


class MultiprocExecutor(RemoteExecutor):
    """Runs one worker process per rank on this host."""

    watches_steps = True
    #: Limit for a worker process to import its modules, create the worker and read commands.
    start_timeout_s = JOIN_TIMEOUT_S
    shutdown_timeout_s = SHUTDOWN_TIMEOUT_S

    def __init__(self, config: EngineConfig, instance_id: str, wakeup: Callable[[], None]) -> None:
        super().__init__(config, instance_id, wakeup)
        self._step_timeout_s = config.parallel.step_timeout_s
        self._memory = RingMemory.create(self._world_size, RING_SLOTS, SLOT_NBYTES)
        self._processes: WorkerProcesses | None = None
        self._interrupts: InterruptPipes | None = None
        self._commands: RingWriter
        self._store: StoreServer | None = None  # the rendezvous store of the ranks
        self._send_lock = threading.Lock()
        self._step_numbers = itertools.count()
        self._call_ids = itertools.count()
        self._started: Future[None] = Future()
        self._num_started = 0
        #: Steps in flight, oldest first. `_lock` guards steps and calls: the engine's thread adds
        #: them, and the thread of `WorkerProcesses` completes them.
        self._steps: deque[_Step] = deque()
        #: Used by the thread of `WorkerProcesses` only.
        self._transfers = OutputAggregator(self._world_size)
        self._calls: dict[int, _PendingCall] = {}
        #: Set when a worker has died or the executor shuts down, which ends `_watch_for_stalls`.
        self._ended = threading.Event()

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers in rank order. Empty before `initialize`."""
        return self._processes.pids if self._processes is not None else []

    def initialize(self) -> ModelInfo:
        config = share_threads(self.config, self._world_size)
        memory, cpus = self._memory, bindings(config, self._world_size)
        self._interrupts = InterruptPipes(self._world_size)
        starts = [
            StartWorker(
                config=config,
                instance_id=self.instance_id,
                rank=rank,
                is_output_rank=rank == output_rank(config),
                ring_fd=memory.fd,
                ring_geometry=(memory.num_readers, memory.num_slots, memory.slot_nbytes),
                log_level=logging.getLogger().getEffectiveLevel(),
                interrupt_fd=self._interrupts.read_fds[rank],
                cpus=cpus[rank],
            )
            for rank in range(self._world_size)
        ]
        self._processes = processes = WorkerProcesses(
            starts,
            environment={"OMP_NUM_THREADS": str(config.num_threads)},
            send_timeout_s=self._step_timeout_s,
            on_answer=self._take_answer,
            on_death=self._on_death,
        )
        self._commands = RingWriter(memory, processes.connections)
        try:
            self._started.result(self.start_timeout_s)
        except TimeoutError:
            raise TimeoutError(
                f"{self._num_started} of {self._world_size} worker processes were up after "
                f"{self.start_timeout_s:.0f} s; see the logs of the other processes"
            ) from None
        if self._world_size > 1:
            secret = secrets.token_bytes()  # other processes of this host cannot connect
            self._store = open_store(LOOPBACK, secret=secret)
            self.collective_rpc(
                "join_groups", (self._store.address, 0, LOOPBACK, secret), timeout_s=JOIN_TIMEOUT_S
            )
        threading.Thread(target=self._watch_for_stalls, name="stall-watch", daemon=True).start()
        return initialize_workers(config, self.collective_rpc)

    def execute_model(self, step: SchedulerOutput) -> None:
        self._send(ExecuteModel(step))

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        step = _Step(next(self._step_numbers))
        with self._lock:
            if self._failure is not None:
                step.future.set_exception(self._failure)
                return step.future
            self._steps.append(step)
        self._send(SampleTokens(step.number, grammar))
        return step.future

    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), *, timeout_s: float | None = None
    ) -> list[Any]:
        command = Call(next(self._call_ids), method, args)
        call = _PendingCall(method)
        with self._lock:
            if self._died and self._failure is not None:
                raise self._failure
            self._calls[command.call_id] = call
        try:
            self._send(command)
            return wait_for_answers(call.future, timeout_s, method, self._world_size, call.results)
        finally:
            with self._lock:
                del self._calls[command.call_id]

    def interrupt(self, nonce: str = "") -> None:
        if self._interrupts is not None:
            self._interrupts.send(nonce)

    def connector_stats(self) -> ConnectorStats | None:
        if self.config.kv_transfer.role is KVRole.NONE:
            return None
        return ConnectorStats.total(
            self.collective_rpc("connector_stats", timeout_s=self._step_timeout_s)
        )

    def shutdown(self) -> None:
        if self.is_forked_copy:
            return
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            orderly = self._failure is None and self._num_started == self._world_size
        if self._processes is not None:
            if orderly:
                self._send(Shutdown(), self.shutdown_timeout_s)
            if not (orderly and self._processes.join(self.shutdown_timeout_s)):
                self._processes.kill()
                self._processes.join(self.shutdown_timeout_s)
        self._fail(WorkerDiedError("the executor was shut down"), died=True)
        self._memory.close()
        if self._interrupts is not None:
            self._interrupts.close()
        if self._store is not None:
            self._store.close()

    def _send(self, command: Command, timeout_s: float | None = None) -> None:
        """Send a command to all workers.

        If a worker does not receive the command, all pending steps and calls fail, and this method
        returns normally. A command that cannot be pickled raises an exception.
        """
        message = pickle.dumps(command, pickle.HIGHEST_PROTOCOL)
        try:
            with self._send_lock:
                self._check_alive()
                self._commands.put(message, timeout_s or self._step_timeout_s, self._check_alive)
        except (OSError, TimeoutError) as error:
            self._fail(WorkerDiedError(f"a worker reads no commands: {error}"), died=True)
        except WorkerDiedError:
            pass  # all futures have failed already

    def _check_alive(self) -> None:
        if self._died:
            raise WorkerDiedError

    # Called by the thread of WorkerProcesses

    def _take_answer(self, rank: int, answer: Answer) -> None:
        match answer:
            case StepDone():
                with self._lock:
                    step = self._steps.popleft() if self._steps else None
                if step is not None:
                    assert step.number == answer.number, (
                        f"step {answer.number} answered, {step.number} is due"
                    )
                    self._transfers.add(rank, answer.output.connector)
                    answer.output.connector = self._transfers.take()
                    resolve(step.future, answer.output)
            case TransfersEnded():
                if self._transfers.add(rank, answer.output):
                    self.wakeup()  # the output rank may have answered the step already
            case StepBroken():
                with self._lock:
                    step = self._steps.popleft() if self._steps else None
                if step is not None:
                    assert step.number == answer.number, (
                        f"step {answer.number} broke, {step.number} is due"
                    )
                    reject(step.future, answer.failure.exception("a step"))
            case StepFailed():
                self._fail(answer.failure.exception("a step"), died=False)
            case CallDone():
                with self._lock:
                    call = self._calls.get(answer.call_id)
                    if call is None:
                        return  # the caller has given up
                    call.results[rank] = answer.result
                if len(call.results) == self._world_size:
                    resolve(call.future, [call.results[rank] for rank in range(self._world_size)])
            case CallFailed():
                with self._lock:
                    call = self._calls.get(answer.call_id)
                if call is not None:
                    reject(call.future, answer.failure.exception(call.name))
            case Started():
                self._num_started += 1
                if self._num_started == self._world_size:
                    resolve(self._started, None)
            case StartFailed():
                reject(self._started, answer.failure.exception("its start"))
            case Wakeup():
                self.wakeup()

    def _on_death(self, rank: int, reason: str) -> None:
        if not self._stopping:
            logger.error("%s; the engine stops, because steps need all workers", reason)
            self._fail(WorkerDiedError(reason), died=True)

    def _take_pending(self, died: bool) -> list[Future[Any]]:
        pending: list[Future[Any]] = [step.future for step in self._steps]
        self._steps.clear()
        if died:
            self._ended.set()
            pending += [self._started, *(call.future for call in self._calls.values())]
        return pending

    def _watch_for_stalls(self) -> None:
        """Fail all steps and calls if a step has no answer for `parallel.step_timeout_s`.

        If no step is pending, all calls fail if the oldest call has no answer for this time and a
        worker is stopped (SIGSTOP). A stopped worker neither answers nor ends. Otherwise, calls
        have only their own timeouts.
        """
        interval_s = min(1.0, self._step_timeout_s / 4)
        watched: _Step | _PendingCall | None = None
        silent_s = 0.0
        while not self._ended.wait(interval_s):
            with self._lock:
                oldest = self._steps[0] if self._steps else next(iter(self._calls.values()), None)
            # Count rounds of this thread instead of time. While this process itself was stopped,
            # the workers may have answered.
            silent_s = silent_s + interval_s if oldest is watched and oldest is not None else 0.0
            watched = oldest
            if silent_s < self._step_timeout_s or oldest is None or self._processes is None:
                continue
            stopped = self._processes.stopped()
            # A call has its own deadline, which may be later than the deadline of a step. Fail the
            # call here only if a stopped worker will never answer.
            if isinstance(oldest, _Step) or stopped:
                why = f": {', '.join(stopped)} stopped (SIGSTOP, or a debugger)" if stopped else ""
                self._fail(
                    WorkerDiedError(
                        f"the workers have not answered {oldest.name} for "
                        f"{self._step_timeout_s:g} s (parallel.step_timeout_s){why}"
                    ),
                    died=True,
                )


class _Step:
    """A step that was sent to the workers and has no answer yet."""

    __slots__ = ("future", "name", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = f"step {number}"
        self.future: Future[ModelRunnerOutput] = Future()


class _PendingCall:
    """A call that some workers have not answered yet."""

    __slots__ = ("future", "name", "results")

    def __init__(self, name: str) -> None:
        self.name = name
        self.future: Future[list[Any]] = Future()
        #: Answers by rank.
        self.results: dict[int, Any] = {}
