"""Processes: a container, or a command run in one, as a process group in a session of its own that dies with the kubelet."""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Protocol

from pocketkube.containers import guardian
from pocketkube.lifecycle import set_parent_death_signal

logger = logging.getLogger(__name__)

KUBELET_MARKER = "POCKETKUBE_KUBELET_ID"
CONTAINER_MARKER = "POCKETKUBE_CONTAINER_ID"

_DRAIN_S = 1.0  # how long output is read on after the last process of a container ended
_READ_BYTES = 65536


class StartError(Exception):
    """The command could not be started (waiting reason CreateContainerError)."""


class Sink(Protocol):
    """Takes what a process writes."""

    def feed(self, stream: str, data: bytes) -> None:
        """`stream` is stdout or stderr."""


class Capture:
    """A sink that keeps the first bytes, for the message of a failed probe or hook."""

    def __init__(self, limit: int = 4096):
        self.data = b""
        self._limit = limit

    def feed(self, stream: str, data: bytes) -> None:
        """See `Sink`."""
        self.data = (self.data + data)[: self._limit]


class Guard:
    """The kubelet's side of its guardian process. At most one kubelet runs per state folder: the guardian shares the lock, so a
    successor waits until everything of its predecessor is dead.
    """

    def __init__(self, state_dir: Path):
        self.kubelet_id = uuid.uuid4().hex
        self._state_dir = state_dir
        self._sessions: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = -1
        self._stopping = False

    async def start(self, lock_timeout_s: float = 40.0) -> None:
        """Raises: TimeoutError if another kubelet keeps the state folder."""
        self._state_dir.mkdir(
            parents=True, exist_ok=True, mode=0o700
        )  # tokens and Secrets lie in it
        self._lock = os.open(self._state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = asyncio.get_running_loop().time() + lock_timeout_s
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if asyncio.get_running_loop().time() > deadline:
                    raise TimeoutError(
                        f"another kubelet uses {self._state_dir}; stop it or choose another --state-dir"
                    ) from None
                await asyncio.sleep(0.05)
        self._spawn()

    def watch(self, session: int) -> None:
        """Have `session` killed when the kubelet dies."""
        self._sessions.add(session)
        self._tell(f"+{session}\n")

    def forget(self, session: int) -> None:
        """Every process of `session` is gone; its number may be reused by the system."""
        self._sessions.discard(session)
        self._tell(f"-{session}\n")

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Let the guardian kill what is left and end."""
        self._stopping = True
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.to_thread(self._process.wait)
            except TimeoutError:
                logger.warning("the guardian is still killing processes")
        os.close(self._lock)

    def _spawn(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, f"{KUBELET_MARKER}={self.kubelet_id}"],
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(self._lock,),
            cwd="/",
        )
        on_exit(self._process.pid, self._died)
        for session in self._sessions:
            self._tell(f"+{session}\n")

    def _died(self) -> None:
        assert self._process is not None
        self._process.wait()
        if not self._stopping:
            logger.error("the guardian ended with %s; starting another", self._process.returncode)
            self._spawn()

    def _tell(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        if self._stopping:  # the pipe is closed: everything is being killed
            return
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            logger.warning(
                "the guardian is gone"
            )  # _died starts the next one, which gets all sessions


class Process:
    """A running command and everything it started. Made by `start`."""

    def __init__(self, popen: subprocess.Popen[bytes], guard: Guard, marker: str, sink: Sink):
        self.pid = popen.pid
        self._popen = popen
        self._guard = guard
        self._marker = marker
        self._exited = asyncio.Event()
        self._readers: set[int] = set()
        self._drained = asyncio.Event()
        guard.watch(self.pid)
        for stream, pipe in (("stdout", popen.stdout), ("stderr", popen.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._readers.add(pipe.fileno())
            asyncio.get_running_loop().add_reader(
                pipe.fileno(), self._read, pipe.fileno(), stream, sink
            )
        on_exit(self.pid, self._on_exit)

    @classmethod
    def start(
        cls,
        argv: list[str],
        env: dict[str, str],
        cwd: Path,
        guard: Guard,
        container_id: str,
        sink: Sink,
    ) -> "Process":
        """Start a command as the leader of a new session.

        Raises:
            StartError: the command does not exist, is not executable, or the system refuses.
        """
        kubelet = os.getpid()

        def in_child() -> None:
            set_parent_death_signal(signal.SIGKILL)
            if os.getppid() != kubelet:  # it died before the line above
                os._exit(1)

        marked = {**env, KUBELET_MARKER: guard.kubelet_id, CONTAINER_MARKER: container_id}
        try:
            popen = subprocess.Popen(
                argv,
                env=marked,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=in_child,
            )
        except FileNotFoundError as error:
            raise StartError(
                f"command {argv[0]!r} not found in PATH {env.get('PATH', '')!r}; install it on this machine (images are ignored)"
            ) from error
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise StartError(f"cannot start {argv[0]!r}: {error}") from error
        return cls(popen, guard, f"{CONTAINER_MARKER}={container_id}", sink)

    @property
    def running(self) -> bool:
        """Whether the main process lives."""
        return not self._exited.is_set()

    async def wait(self, timeout_s: float | None = None) -> int:
        """The exit code of the main process, 128 + signal if a signal ended it. Raises: TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._exited.wait()
        code = self._popen.returncode
        return code if code >= 0 else 128 - code

    def terminate(self) -> None:
        """SIGTERM to the main process."""
        if self.running:
            self._popen.send_signal(signal.SIGTERM)

    async def finish(self) -> None:
        """Kill whatever of the container still lives, read its output to the end and let go of it."""
        while not await asyncio.to_thread(guardian.kill_all, {self.pid}, self._marker, 5.0):
            logger.warning("processes of %s survive SIGKILL; is a device hung?", self._marker)
        await self._exited.wait()
        try:
            async with asyncio.timeout(_DRAIN_S):
                await self._drained.wait()
        except TimeoutError:  # a process outside the container holds the pipe
            for fd in list(self._readers):
                self._close(fd)
        self._guard.forget(self.pid)

    def _on_exit(self) -> None:
        self._popen.wait()
        self._exited.set()

    def _read(self, fd: int, stream: str, sink: Sink) -> None:
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        if data:
            sink.feed(stream, data)
        else:
            self._close(fd)

    def _close(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        for pipe in (self._popen.stdout, self._popen.stderr):
            if pipe is not None and not pipe.closed and pipe.fileno() == fd:
                pipe.close()
        self._readers.discard(fd)
        if not self._readers:
            self._drained.set()


def on_exit(pid: int, callback: "ExitCallback") -> None:
    """Call back once when child `pid` has ended (and may be waited for without blocking)."""
    loop = asyncio.get_running_loop()
    fd = os.pidfd_open(pid)

    def ended() -> None:
        loop.remove_reader(fd)
        os.close(fd)
        callback()

    loop.add_reader(fd, ended)


class ExitCallback(Protocol):
    """What `on_exit` calls."""

    def __call__(self) -> None:
        """The child has ended."""


async def run_command(
    argv: list[str], env: dict[str, str], cwd: Path, guard: Guard, timeout_s: float
) -> tuple[int, str]:
    """Run a probe's or hook's command in a session of its own; (exit code, output).

    Raises:
        StartError: it could not be started.
        TimeoutError: it ran past `timeout_s` and was killed.
    """
    sink = Capture()
    process = Process.start(argv, env, cwd, guard, uuid.uuid4().hex, sink)
    try:
        code = await process.wait(timeout_s)
    finally:
        await process.finish()
    return code, sink.data.decode("utf-8", "replace").strip()


def container_pids() -> dict[str, int]:
    """The first process of every container on this machine, by container id."""
    marker = b"\0" + CONTAINER_MARKER.encode() + b"="
    found: dict[str, int] = {}
    for pid in sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        with contextlib.suppress(OSError):  # it has ended, or is someone else's
            environment = b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
            if marker in environment and os.getsid(pid) == pid:
                found.setdefault(environment.partition(marker)[2].partition(b"\0")[0].decode(), pid)
    return found
