"""Start, watch and kill the processes of containers.

A container is a process group in its own session. All processes end when the kubelet ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import subprocess
import sys
import termios
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from pocketkube.containers import container_reaper
from pocketkube.containers.container_log import ContainerLog
from pocketkube.lifecycle import kill_at_end_of_parent, wait_up_to
from pocketkube.private_files import create_private_folder

logger = logging.getLogger(__name__)

#: Environment variables of all processes of containers: the id of the kubelet, the container's id.
KUBELET_MARKER = "POCKETKUBE_KUBELET_ID"
CONTAINER_MARKER = "POCKETKUBE_CONTAINER_ID"
#: Environment variable of commands that `kubectl exec` runs in a container: an id per command.
EXEC_MARKER = "POCKETKUBE_EXEC_ID"
#: Prefix of container ids in the status of pods.
RUNTIME = "process://"

#: Time to read the remaining output after the last process of a container has ended.
_DRAIN_S = 1.0
_READ_BYTES = 65536
#: Maximum wait for the end of processes after SIGKILL.
KILL_S = 5.0


class StartError(Exception):
    """The command did not start (waiting reason CreateContainerError)."""


class ContainerReaper:
    """Starts the reaper process, and sends the session ids of the containers to it.

    The reaper kills the processes of these sessions when the kubelet ends.

    The reaper holds the lock of the state folder until all processes of containers have ended. A
    new kubelet waits for the lock.
    """

    def __init__(self, state_dir: Path) -> None:
        self.kubelet_id = uuid.uuid4().hex
        self._state_dir = state_dir
        self._sessions: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = -1
        self._stopping = False

    async def start(self, lock_timeout_s: float = 40.0) -> None:
        """Lock the state folder and start the reaper.

        Raises:
            PermissionError: another user owns the state folder or may write to it.
            TimeoutError: another kubelet still holds the lock after `lock_timeout_s`.
        """
        # The folder will hold tokens and Secrets.
        create_private_folder(self._state_dir)
        self._lock = os.open(self._state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = asyncio.get_running_loop().time() + lock_timeout_s
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if asyncio.get_running_loop().time() > deadline:
                    raise TimeoutError(
                        f"another kubelet uses {self._state_dir}; "
                        "stop it or choose another --state-dir"
                    ) from None
                await asyncio.sleep(0.05)
        self._spawn()

    def watch(self, session: int) -> None:
        """Register `session`, whose processes the reaper kills when the kubelet ends."""
        self._sessions.add(session)
        self._send(f"+{session}\n")

    def forget(self, session: int) -> None:
        """Unregister `session`, whose processes have ended. The kernel may reuse the session id."""
        self._sessions.discard(session)
        self._send(f"-{session}\n")

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Stop the reaper, which first kills the containers' remaining processes.

        Then release the lock of the state folder.

        Args:
            timeout_s: maximum wait for the reaper.
        """
        self._stopping = True
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.to_thread(self._process.wait)
            except TimeoutError:
                logger.warning(
                    "the container reaper (process %d) is still killing processes after %g s; the "
                    "next kubelet waits until the reaper has ended",
                    self._process.pid,
                    timeout_s,
                )
        os.close(self._lock)

    def _spawn(self) -> None:
        marker = f"{KUBELET_MARKER}={self.kubelet_id}"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", container_reaper.__file__, marker],
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(self._lock,),
            cwd="/",
        )
        on_exit(self._process.pid, self._on_reaper_exit)
        for session in self._sessions:
            self._send(f"+{session}\n")

    def _on_reaper_exit(self) -> None:
        assert self._process is not None
        self._process.wait()
        if not self._stopping:
            logger.error(
                "the container reaper (process %d) has ended with exit code %s, starting another "
                "one",
                self._process.pid,
                self._process.returncode,
            )
            self._spawn()

    def _send(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        if self._stopping:  # the reaper is killing everything
            return
        # After the end of a reaper, _on_reaper_exit() sends all sessions to the next reaper.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


class ContainerProcess:
    """The processes of a container: a command and its descendants. Create it with `start()`.

    Attributes:
        environment: the environment variables of the command, including KUBELET_MARKER and
            CONTAINER_MARKER.
        cwd: the working folder of the command.
    """

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        reaper: ContainerReaper,
        marker: str,
        log: ContainerLog,
        environment: dict[str, str],
        cwd: Path,
    ) -> None:
        self.pid = popen.pid
        self.environment = environment
        self.cwd = cwd
        self._popen = popen
        self._reaper = reaper
        self._marker = marker
        self._exited = asyncio.Event()
        #: Open pipes by file descriptor.
        self._pipes: dict[int, IO[bytes]] = {}
        self._drained = asyncio.Event()
        reaper.watch(self.pid)
        for stream, pipe in (("stdout", popen.stdout), ("stderr", popen.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._pipes[pipe.fileno()] = pipe
            asyncio.get_running_loop().add_reader(
                pipe.fileno(), self._read, pipe.fileno(), stream, log
            )
        on_exit(self.pid, self._on_exit)

    @classmethod
    def start(
        cls,
        argv: list[str],
        env: dict[str, str],
        cwd: Path,
        reaper: ContainerReaper,
        container_id: str,
        log: ContainerLog,
    ) -> ContainerProcess:
        """Start a command as the leader of a new session.

        Raises:
            StartError: the command was not found or could not be started.
        """
        marked = {**env, KUBELET_MARKER: reaper.kubelet_id, CONTAINER_MARKER: container_id}
        popen = spawn(argv, marked, cwd, subprocess.DEVNULL, subprocess.PIPE, subprocess.PIPE)
        return cls(popen, reaper, f"{CONTAINER_MARKER}={container_id}", log, marked, cwd)

    @property
    def is_running(self) -> bool:
        """Whether the main process is running."""
        return not self._exited.is_set()

    async def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end of the main process. Return its exit code.

        After a signal, the exit code is 128 + the signal number.

        Raises:
            TimeoutError: the process has not ended within `timeout_s`.
        """
        async with asyncio.timeout(timeout_s):
            await self._exited.wait()
        return exit_code(self._popen)

    def terminate(self) -> None:
        """Send SIGTERM to the main process."""
        if self.is_running:
            self._popen.send_signal(signal.SIGTERM)

    async def finish(self) -> None:
        """Kill the container's remaining processes, and read the rest of their output."""
        kill_all = container_reaper.kill_all
        while not await asyncio.to_thread(kill_all, {self.pid}, self._marker, KILL_S):
            logger.warning(
                "process %d or its descendants (%s in their environment) still run %g s after "
                "SIGKILL, trying again; a device may hang: see `ps -s %d` and `dmesg`",
                self.pid,
                self._marker,
                KILL_S,
                self.pid,
            )
        await self._exited.wait()
        if not await wait_up_to(_DRAIN_S, self._drained):
            for fd in list(self._pipes):  # a process outside the container holds the pipe open
                self._close(fd)
        self._reaper.forget(self.pid)

    def _on_exit(self) -> None:
        self._popen.wait()
        self._exited.set()

    def _read(self, fd: int, stream: str, log: ContainerLog) -> None:
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        if data:
            log.feed(stream, data)
        else:
            self._close(fd)

    def _close(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        self._pipes.pop(fd).close()
        if not self._pipes:
            self._drained.set()


def spawn(
    argv: list[str],
    env: dict[str, str],
    cwd: Path,
    stdin: int,
    stdout: int,
    stderr: int,
    *,
    in_terminal: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a command as the leader of a new session.

    When the kubelet ends, the kernel kills the command.

    Args:
        in_terminal: whether `stdin` is a terminal. The terminal then becomes the controlling
            terminal of the session.

    Raises:
        StartError: the command was not found or could not be started.
    """
    die_with_kubelet = kill_at_end_of_parent()

    def before_exec() -> None:
        die_with_kubelet()
        if in_terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    try:
        return subprocess.Popen(
            argv,
            env=env,
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=before_exec,
        )
    except FileNotFoundError as error:
        raise StartError(
            f"command {argv[0]!r} not found in PATH {env.get('PATH', '')!r}; install it on this "
            "machine (images are ignored)"
        ) from error
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise StartError(f"cannot start {argv[0]!r}: {error}") from error


def exit_code(popen: subprocess.Popen[bytes]) -> int:
    """Return the exit code of a process that has ended; 128 + the signal number after a signal."""
    code: int = popen.returncode
    return code if code >= 0 else 128 - code


def on_exit(pid: int, callback: Callable[[], None]) -> None:
    """Call `callback` in the event loop once the child process `pid` has ended."""
    loop = asyncio.get_running_loop()
    fd = os.pidfd_open(pid)

    def ended() -> None:
        loop.remove_reader(fd)
        os.close(fd)
        callback()

    loop.add_reader(fd, ended)


def container_pids() -> dict[str, int]:
    """Return container id -> pid of the main process, for each container on this machine.

    The container ids are those in the status of pods.
    """
    found: dict[str, int] = {}
    for pid, container_id, environment in container_processes():
        with contextlib.suppress(ProcessLookupError):
            if b"\0%s=" % EXEC_MARKER.encode() not in environment and os.getsid(pid) == pid:
                found.setdefault(container_id, pid)
    return found


def container_processes() -> Iterator[tuple[int, str, bytes]]:
    """Yield the processes of all containers on this machine, in the order of their pids.

    Yields:
        The pid, the container id as in the status of pods, and the environment with a null byte
        before and after each variable.
    """
    marker = b"\0%s=" % CONTAINER_MARKER.encode()
    for pid in sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            environment = b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
            if marker in environment:
                value = environment.partition(marker)[2].partition(b"\0")[0]
                yield pid, RUNTIME + value.decode(), environment
