"""Starts worker processes, receives their answers and detects their end."""

from __future__ import annotations

import logging
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from baton_engine.executor.commands import Answer, StartWorker

logger = logging.getLogger(__name__)


class WorkerProcesses:
    """Starts one process per `StartWorker`, and watches all processes in one thread."""

    def __init__(
        self,
        starts: Sequence[StartWorker],
        *,
        environment: dict[str, str],
        send_timeout_s: float,
        on_answer: Callable[[int, Answer], None],
        on_death: Callable[[int, str], None],
    ) -> None:
        """Start the processes in a thread, and return without waiting for them.

        Args:
            environment: additional environment variables for the processes.
            send_timeout_s: limit for sending to a process that does not read. After this time,
                sending raises BlockingIOError.
            on_answer: called with rank and answer, from the watching thread.
            on_death: called with rank and reason, from the watching thread, if a process cannot be
                started or its answers cannot be decoded. Also called when a process has ended,
                after its last answer.
        """
        self._starts = starts
        self._environment = os.environ | environment
        self._on_answer = on_answer
        self._on_death = on_death
        pipes = [Pipe(duplex=True) for _ in starts]
        self.connections: list[Connection] = [ours for ours, _ in pipes]
        for connection in self.connections:
            _set_send_timeout(connection, send_timeout_s)
        self._their_ends: list[Connection] = [theirs for _, theirs in pipes]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._killed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="workers", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """The process ids of the processes started so far, in rank order."""
        with self._lock:
            return [process.pid for _, process in sorted(self._processes.items())]

    def stopped(self) -> list[str]:
        """Return the names of the processes that SIGSTOP or a debugger has stopped."""
        with self._lock:
            processes = sorted(self._processes.items())
        return [_name(rank, process) for rank, process in processes if _is_stopped(process.pid)]

    def join(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for all processes to end. Return True if all have ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def kill(self) -> None:
        """Kill the processes that still run. Idempotent."""
        with self._lock:
            self._killed = True
            for process in self._processes.values():
                process.kill()

    def _run(self) -> None:
        # This thread starts the processes, because a process ends with the thread that started it
        # (see `worker_main`).
        for start, theirs in zip(self._starts, self._their_ends, strict=True):
            try:
                self._start(start, theirs)
            except OSError as error:
                self._on_death(start.rank, f"worker {start.rank} cannot be started: {error}")
            theirs.close()
        try:
            self._watch()
        except Exception as error:  # for example an answer that cannot be unpickled
            logger.exception("the workers' answers cannot be received, so all workers are killed")
            self.kill()
            for start in self._starts:
                self._on_death(
                    start.rank,
                    f"worker {start.rank} was killed: its answers cannot be received: {error!r}",
                )

    def _start(self, start: StartWorker, theirs: Connection) -> None:
        fd = theirs.fileno()
        command = [
            sys.executable,
            "-P",  # import nothing from the working folder, which may be a checkpoint
            "-m",
            "baton_engine.executor.multiproc.worker_main",
            str(fd),
            str(os.getpid()),
        ]
        with self._lock:
            if self._killed:
                return
            self._processes[start.rank] = subprocess.Popen(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[fd, start.ring_fd, start.interrupt_fd],
            )
        try:
            self.connections[start.rank].send_bytes(pickle.dumps((start, sys.path)))
        except OSError:
            logger.warning(
                "worker %d ended before it received its start message; see its log for the reason",
                start.rank,
            )

    def _watch(self) -> None:
        """Receive answers until all processes have ended."""
        poll = select.poll()
        pidfds = {os.pidfd_open(process.pid): rank for rank, process in self._processes.items()}
        sockets = {self.connections[rank].fileno(): rank for rank in pidfds.values()}
        for fd in (*pidfds, *sockets):
            poll.register(fd, select.POLLIN)
        while pidfds:
            for fd, _ in poll.poll():
                if (rank := sockets.get(fd)) is not None:
                    if not self._receive(rank):
                        poll.unregister(fd)
                        del sockets[fd]
                elif (rank := pidfds.get(fd)) is not None:
                    poll.unregister(fd)
                    del pidfds[fd]
                    os.close(fd)
                    while self.connections[rank].poll() and self._receive(rank):
                        pass
                    self._on_death(rank, _how_it_ended(rank, self._processes[rank]))

    def _receive(self, rank: int) -> bool:
        """Receive one answer of a worker and pass it to `on_answer`.

        Returns:
            True if an answer was received. False if the connection is closed.
        """
        try:
            message = self.connections[rank].recv_bytes()
        except (EOFError, OSError):
            return False
        self._on_answer(rank, pickle.loads(message))
        return True


def _set_send_timeout(connection: Connection, timeout_s: float) -> None:
    with socket.socket(fileno=os.dup(connection.fileno())) as same_socket:
        timeval = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        same_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


def _how_it_ended(rank: int, process: subprocess.Popen[bytes]) -> str:
    """Return how a worker process ended: by a signal or with an exit code."""
    code = process.wait()  # it has ended
    who = _name(rank, process)
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
        return f"{who} was killed by signal {-code} ({name})"
    return f"{who} exited with code {code}; see its log for the reason"


def _name(rank: int, process: subprocess.Popen[bytes]) -> str:
    return f"worker {rank} (pid {process.pid})"


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in ("T", "t")
