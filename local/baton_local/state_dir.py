"""The state folder of a local cluster, and the lock of its supervisor.

The supervisor is the process of `baton up`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pocketkube.private_files import check_private_folder, create_private_folder, write_private

#: Time to wait for the lock, which a call of `StateDir.supervisor` holds for a moment.
PROBE_S = 0.5


class StateDirError(Exception):
    """Raised when the state folder cannot be used. The message has the reason and the remedy."""


class ClusterRunningError(StateDirError):
    """Raised when another `baton up` holds the lock of the state folder."""


class _Written(msgspec.Struct):
    """The part of `ClusterInfo` that every version of baton can read."""

    supervisor_pid: int


class ClusterInfo(_Written):
    """The description of the running cluster, which `baton up` writes for other commands."""

    kubeconfig: str
    namespace: str
    service: str
    #: Path of the YAML file from which `baton up` created the service.
    file: str
    #: The URL at which the service has answered; empty before its first answer.
    endpoint: str = ""


class StateDir:
    """The state folder: `$BATON_HOME`, `$XDG_STATE_HOME/baton` or `~/.local/state/baton`.

    Methods raise StateDirError if the folder cannot be used.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root or _default_root()).absolute()
        self.logs = self.root / "logs"
        #: Folder in which the path of a hostPath volume is looked up first, before `/`.
        self.host_root = self.root / "host"
        self._lock_file: int | None = None

    @property
    def _info_path(self) -> Path:
        return self.root / "cluster.json"

    def make(self) -> None:
        """Create the state folder and its folder for logs, accessible by their owner only.

        Existing folders must belong to this process's user, and must not be writable by others.
        """
        with self._usable():
            for folder in (self.root, self.logs):
                create_private_folder(folder)

    def acquire(self) -> None:
        """Make this process the supervisor (`baton up`): hold the lock until the process ends.

        Raises:
            ClusterRunningError: another process is the supervisor.
        """
        self.make()
        with self._usable():
            lock_file = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _lock(lock_file, PROBE_S):
            os.close(lock_file)
            raise ClusterRunningError(
                f"a local cluster is already running from {self.root}: see `baton status`, "
                "end it with `baton down`, or set BATON_HOME to another folder"
            )
        os.ftruncate(lock_file, 0)
        os.pwrite(lock_file, str(os.getpid()).encode(), 0)
        self._lock_file = lock_file  # stays open, and holds the lock, until the process ends
        self._info_path.unlink(missing_ok=True)

    def supervisor(self) -> int | None:
        """Return the pid of the `baton up` that holds the lock of this folder.

        None means that no process holds the lock, or that the pid is not written yet.

        Raises:
            StateDirError: another user can change the folder, so the pid and the kubeconfig in it
                cannot be trusted.
        """
        with self._usable():
            try:
                check_private_folder(self.root)
                lock_file = os.open(self.root / "lock", os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
        try:
            # A shared lock, so that two readers do not take each other for a supervisor.
            fcntl.flock(lock_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            return int(os.pread(lock_file, 32, 0) or b"0") or None
        finally:
            os.close(lock_file)

    def write_info(self, info: ClusterInfo) -> None:
        """Replace the description of the running cluster with `info`."""
        write_private(self._info_path, msgspec.json.encode(info))

    def read_info(self) -> ClusterInfo | None:
        """Return the description of the running cluster.

        The result is None if no `baton up` is running, or if `baton up` has not written it yet.
        """
        pid = self.supervisor()
        if pid is None:
            return None
        try:
            written = self._info_path.read_bytes()
            if msgspec.json.decode(written, type=_Written).supervisor_pid != pid:
                return None  # left by a supervisor that was killed
            return msgspec.json.decode(written, type=ClusterInfo)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            text = (
                f"another version of baton runs the cluster of {self.root} ({error}); "
                "end it with `baton down`"
            )
            raise StateDirError(text) from error

    def stop_supervisor(self, timeout_s: float) -> bool:
        """Send SIGTERM to the running `baton up`, and SIGKILL if it does not end in time.

        Args:
            timeout_s: number of seconds from SIGTERM to SIGKILL.

        Returns:
            Whether a `baton up` was running.

        Raises:
            StateDirError: the process has not ended 10 seconds after SIGKILL.
        """
        pid = self.supervisor()
        if pid is None:
            return False
        for signum, deadline_s in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
            deadline = time.monotonic() + deadline_s
            while time.monotonic() < deadline:
                if self.supervisor() is None:
                    return True
                time.sleep(0.05)
        raise StateDirError(f"`baton up` (process {pid}) uses {self.root} and cannot be killed")

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
            text = (
                f"cannot keep a local cluster in {self.root}: {why}; "
                "set BATON_HOME to another folder"
            )
            raise StateDirError(text) from error


def _default_root() -> Path:
    for variable, below in (("BATON_HOME", ""), ("XDG_STATE_HOME", "baton")):
        if folder := os.environ.get(variable):
            return Path(folder) / below
    return Path.home() / ".local/state/baton"


def _lock(file: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
