"""The main function of a worker process.

The process reads commands from the ring, answers through its pipe, and ends when its parent ends.

`WorkerProcesses` runs `python -P -m baton_engine.executor.multiproc.worker_main CONNECTION_FD
PARENT_PID`. It does not use `multiprocessing.Process`, which would run the parent's main module
again.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import select
import signal
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from baton_engine.executor.commands import (
    Answer,
    Call,
    CallDone,
    CallFailed,
    Command,
    CommandFailure,
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
from baton_engine.executor.multiproc.interrupts import watch_interrupts
from baton_engine.executor.multiproc.shm_ring import RingMemory, RingReader
from baton_engine.executor.startup import load_worker_class
from baton_engine.executor.step import ModelRunnerOutput, PendingOutput

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1


class WorkerProcess:
    """Runs the executor's commands on one worker."""

    def __init__(self, start: StartWorker, connection: Connection) -> None:
        self._start = start
        self._connection = connection
        self._send_lock = threading.Lock()  # the connector and `_results` send in other threads
        self._commands = RingReader(
            RingMemory(start.ring_fd, *start.ring_geometry), start.rank, connection
        )
        self._worker: Any = None  # of the class that the configuration names
        #: Whether a step has failed. The thread of `_results` may set it.
        self._step_failed = False
        #: Waits for pending tokens and sends the results of steps, in order.
        self._results = ThreadPoolExecutor(max_workers=1, thread_name_prefix="results")
        #: Done when `_results` has sent all results passed to it. None: none were passed.
        self._last_result: Future[None] | None = None
        #: Failure of the last `ExecuteModel`. None: it succeeded, and its tokens can be sampled.
        self._broken: CommandFailure | None = None

    def run(self) -> None:
        """Create the worker and run commands until Shutdown.

        If the worker cannot be created, send StartFailed and return.
        """
        try:
            worker_class = load_worker_class(self._start.config)
            self._worker = worker_class(
                self._start.config, self._start.instance_id, self._start.rank
            )
        except Exception as error:
            self._send(StartFailed(self._failure(error)))
            return
        if self._start.config.parallel.enable_expert_parallel:
            watch_interrupts(self._start.interrupt_fd, self._worker.interrupt)
        self._send(Started())
        while True:
            command: Command = pickle.loads(self._commands.get())
            if isinstance(command, Shutdown):
                self._results.shutdown()  # when all results are sent
                self._worker.shutdown()
                return
            self._run_command(command)

    def _run_command(self, command: ExecuteModel | SampleTokens | Call) -> None:
        if isinstance(command, Call):
            try:
                self._send(CallDone(command.call_id, self._call(command)))
            except Exception as error:  # the method failed, or its result cannot be pickled
                self._send(CallFailed(command.call_id, self._failure(error)))
        elif not self._step_failed:
            try:
                self._run_step(command)
            except Exception as error:
                self._fail_step(error)

    def _run_step(self, command: ExecuteModel | SampleTokens) -> None:
        if isinstance(command, ExecuteModel):
            try:
                self._worker.execute_model(command.step)
            except Exception as error:
                self._broken = self._failure(error)
                if not self._broken.group_broken:
                    raise
                logger.warning(
                    "step %d is dropped, because the expert-parallel group broke; its requests "
                    "wait for the group's next generation: %s",
                    command.step.step_id,
                    error,
                )
            return
        broken, self._broken = self._broken, None
        if broken is not None:
            if self._start.is_output_rank:
                self._send(StepBroken(command.number, broken))
            return
        output = self._worker.sample_tokens(command.grammar)
        if self._start.is_output_rank:
            self._send_result(command.number, output)
        elif output.connector:
            self._send(TransfersEnded(output.connector))

    def _send_result(self, number: int, output: ModelRunnerOutput | PendingOutput) -> None:
        """Send the results of a step after the results of all earlier steps.

        Return without waiting for the step's tokens.
        """
        is_behind = self._last_result is not None and not self._last_result.done()
        if is_behind or isinstance(output, PendingOutput):
            self._last_result = self._results.submit(self._wait_and_send, number, output)
        else:
            self._send(StepDone(number, output))

    def _wait_and_send(self, number: int, output: ModelRunnerOutput | PendingOutput) -> None:
        try:
            if isinstance(output, PendingOutput):
                output = output.result()
            self._send(StepDone(number, output))
        except Exception as error:
            self._fail_step(error)

    def _fail_step(self, error: Exception) -> None:
        logger.error(
            "a step failed; this worker runs no more steps, and the engine stops", exc_info=error
        )
        # No step can follow, because this worker's KV differs from the scheduler's state.
        self._step_failed = True
        self._send(StepFailed(self._failure(error)))

    def _call(self, call: Call) -> Any:
        if call.method == "open_connector":
            # A function cannot be sent through the ring.
            return self._worker.open_connector(lambda: self._send(Wakeup()))
        return getattr(self._worker, call.method)(*call.args)

    def _send(self, answer: Answer) -> None:
        message = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
        with self._send_lock:
            self._connection.send_bytes(message)

    def _failure(self, error: BaseException) -> CommandFailure:
        return CommandFailure.of(error, self._start.rank)


def main(connection_fd: int, parent_pid: int) -> None:
    """Run a worker process until the parent process shuts it down or ends."""
    # Ctrl-C and SIGTERM reach the whole process group, but the parent may need workers to drain.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(connection_fd)
    os.set_inheritable(connection_fd, False)
    _die_with_parent(connection_fd, parent_pid)
    try:
        start, sys.path[:] = pickle.loads(connection.recv_bytes())
        os.set_inheritable(start.ring_fd, False)
        os.set_inheritable(start.interrupt_fd, False)
        os.environ["LOCAL_RANK"] = str(start.rank)  # selects the GPU
        logging.basicConfig(
            level=start.log_level,
            format=f"%(asctime)s %(levelname)s [rank {start.rank}] %(name)s %(message)s",
            stream=sys.stderr,
        )
        if start.cpus:
            _bind(start.cpus)
        WorkerProcess(start, connection).run()
        sys.stdout.flush()
        sys.stderr.flush()
        # Everything is shut down. The interpreter would take a second to unload its modules.
        os._exit(0)
    except (EOFError, ConnectionError):
        os._exit(1)  # the parent has ended; threads of libraries must not keep this process alive


def _bind(cpus: frozenset[int]) -> None:
    """Bind this thread, and all threads that it starts, to CPUs. Log a warning if that fails."""
    try:
        os.sched_setaffinity(0, cpus)
        logger.info("this worker is bound to CPUs %s", sorted(cpus))
    except OSError as error:  # the container may have lost a CPU since the executor chose them
        logger.warning(
            "this worker cannot be bound to CPUs %s (%s); the system chooses the CPUs",
            sorted(cpus),
            error,
        )


def _die_with_parent(connection_fd: int, parent_pid: int) -> None:
    """Make this process end when its parent ends.

    The kernel kills this process when the parent ends, or when the thread that started this process
    ends. In addition, a thread ends this process when the parent closes the connection.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # the parent died before the call

    def watch() -> None:
        poll = select.poll()
        poll.register(connection_fd, 0)  # reports only the hang-up
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
