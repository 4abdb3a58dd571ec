"""The folder of one model on disk.

DIR                        complete, with a marker; never changed after it appeared
DIR.lock                   see lock.py
DIR.partial-<random>/      of one fetcher: verified files by their names, `<name>.incomplete`, what it was begun for
DIR.discarded-<random>/    being removed
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
from pathlib import Path

import msgspec

from baton_engine.fetch.fetch_errors import FetchError, TransientError
from baton_engine.fetch.lock import boot_id
from baton_engine.fetch.selection import Only
from baton_engine.fetch.source import RemoteFile

MARKER = ".baton-model.json"
INCOMPLETE = ".incomplete"
_STATE, _OWNER = ".baton-partial.json", ".baton-partial.lock"


class Marker(msgspec.Struct, frozen=True):
    """Says that the folder is complete, and of what."""

    uri: str
    revision: str
    only: Only
    files: dict[str, int]
    """Sizes in bytes."""


class _State(msgspec.Struct):
    """What a partial folder is for, and what of it was proved."""

    uri: str
    revision: str
    machine: str
    verified: dict[str, RemoteFile] = {}


def read_complete(target: Path, uri: str, only: Only) -> Marker | None:
    """The marker of a folder that holds all of `uri`; None if it has to be fetched. A damaged folder is moved out of the way.

    Raises:
        FetchError: ModelCacheInvalid, the folder belongs to something else.
    """
    try:
        marker = msgspec.json.decode((target / MARKER).read_bytes(), type=Marker)
    except (FileNotFoundError, NotADirectoryError):
        if target.is_symlink() or (
            target.exists() and (not target.is_dir() or any(target.iterdir()))
        ):
            raise _foreign(target, "holds something that baton-model did not put there") from None
        return None
    except msgspec.DecodeError as error:
        raise _foreign(target, f"has a marker that cannot be read ({error})") from error
    if (marker.uri, marker.only) != (uri, only):
        raise _foreign(target, f"holds {marker.only} of {marker.uri}")
    if all(_is_file(target / name, size) for name, size in marker.files.items()):
        return marker
    discard(target)
    return None


def _foreign(target: Path, what: str) -> FetchError:
    return FetchError("ModelCacheInvalid", f"{target} {what}; remove it, or choose another cache")


def _is_file(path: Path, size: int) -> bool:
    try:
        status = path.stat(follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == size


class Partial:
    """A folder that becomes the model's. Only its maker writes in it. Methods may be called by one thread per file."""

    def __init__(self, target: Path, uri: str, revision: str) -> None:
        """Makes it. Raises OSError."""
        self.path = target.with_name(f"{target.name}.partial-{secrets.token_hex(6)}")
        self._target = target
        self._state = _State(uri, revision, boot_id())
        self.path.mkdir(parents=True)
        self._owner = os.open(self.path / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._owner, fcntl.LOCK_EX)  # the kernel lets go of it when this process dies
        self._write_state()

    def reuse_leftovers(self) -> None:
        """Takes over what others began, and removes their folders, but for that of a fetcher that still lives on this machine; and
        what somebody died removing.

        Verified files nobody writes to any more. One that is incomplete is taken only if its writer is dead for sure.
        """
        for other in sorted(self._target.parent.glob(f"{self._target.name}.partial-*")):
            if other != self.path and not other.is_symlink():
                self._reuse_leftover(other)
        for doomed in self._target.parent.glob(f"{self._target.name}.discarded-*"):
            shutil.rmtree(doomed, ignore_errors=True)

    def _reuse_leftover(self, other: Path) -> None:
        try:
            owner = os.open(other / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # killed before it got so far, or removed by another
            discard(other)
            return
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            state = msgspec.json.decode((other / _STATE).read_bytes(), type=_State)
        except BlockingIOError:
            return
        except (OSError, msgspec.DecodeError):
            state = None
        finally:
            os.close(owner)
        if state is not None and (state.uri, state.revision) == (
            self._state.uri,
            self._state.revision,
        ):
            for name, file in state.verified.items():
                if _is_file(other / name, file.size):
                    os.replace(other / name, self.path / name)
                    self._state.verified[name] = file
            if state.machine == self._state.machine:
                for path in other.glob(f"*{INCOMPLETE}"):
                    if stat.S_ISREG(path.stat(follow_symlinks=False).st_mode):
                        os.replace(path, self.path / path.name)
            self._write_state()
        discard(other)

    def has(self, file: RemoteFile) -> bool:
        """Whether the file is there and proved."""
        return self._state.verified.get(file.name) == file and _is_file(
            self.path / file.name, file.size
        )

    def incomplete(self, file: RemoteFile) -> Path:
        return self.path / f"{file.name}{INCOMPLETE}"

    def accept(self, file: RemoteFile) -> None:
        """The incomplete file was proved: it is on disk for good under its name. Raises OSError."""
        path = self.incomplete(file)
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(path, self.path / file.name)
        self._state.verified[file.name] = file

    def save(self) -> None:
        """So that a successor need not prove again what was accepted. Not for two threads at once."""
        self._write_state()

    def size_of(self, file: RemoteFile) -> int:
        """Bytes that are there."""
        for path in (self.path / file.name, self.incomplete(file)):
            with contextlib.suppress(OSError):
                return min(path.stat().st_size, file.size)
        return 0

    def commit(self, only: Only, files: list[RemoteFile]) -> Marker:
        """The folder takes its name. If another fetcher was faster, its folder stays.

        Raises:
            TransientError: another fetcher took this one for dead and took files away.
        """
        if not all(self.has(file) for file in files):
            raise TransientError(f"{self.path} was taken over by another fetcher")
        marker = Marker(
            self._state.uri, self._state.revision, only, {file.name: file.size for file in files}
        )
        for name in (_STATE, *(path.name for path in self.path.glob(f"*{INCOMPLETE}"))):
            (self.path / name).unlink(missing_ok=True)
        _write_durably(self.path / MARKER, msgspec.json.encode(marker))
        (self.path / _OWNER).unlink(missing_ok=True)
        try:
            os.rename(self.path, self._target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            there = read_complete(self._target, marker.uri, only)
            discard(self.path)
            if there is None:
                raise TransientError(f"{self._target} was damaged") from error
            return there
        finally:
            self.close()
        _sync_folder(self._target.parent)
        return marker

    def close(self) -> None:
        """Lets others take over what is there."""
        if self._owner >= 0:
            os.close(self._owner)
            self._owner = -1

    def _write_state(self) -> None:
        new = self.path / f"{_STATE}.new"
        new.write_bytes(msgspec.json.encode(self._state))
        os.replace(new, self.path / _STATE)


def discard(folder: Path) -> None:
    """Removes it; under another name first, so that nobody takes half of it for the whole."""
    doomed = folder.with_name(
        f"{folder.name.partition('.partial-')[0]}.discarded-{secrets.token_hex(6)}"
    )
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # not every file system syncs folders
            os.fsync(fd)
    finally:
        os.close(fd)
