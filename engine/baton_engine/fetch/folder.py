"""The folders of one model on disk.

DIR/                     the complete model, with a marker file
DIR.lock                 the lock file: see lock.py
DIR.partial-<random>/    one fetcher's download: verified files, `<name>.incomplete`, a state file
DIR.discarded-<random>/  a folder that is being removed
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from baton_engine.fetch.fetch_errors import FetchError, TransientError
from baton_engine.fetch.lock import boot_id
from baton_engine.fetch.selection import Only, check_name
from baton_engine.fetch.sources.source import RemoteFile
from baton_engine.fetch.verify import verify
from baton_protocol.checkpoint_files import read_file

MARKER = ".baton-model.json"
INCOMPLETE = ".incomplete"
_STATE, _OWNER = ".baton-partial.json", ".baton-partial.lock"

_Record = TypeVar("_Record")


class Marker(msgspec.Struct, frozen=True):
    """The content of the marker file, which shows that a model's folder is complete."""

    uri: str
    revision: str
    only: Only
    #: Size in bytes of each file, by name.
    files: dict[str, int]


class _State(msgspec.Struct):
    """The content of the state file in a partial folder: the model and the verified files."""

    uri: str
    revision: str
    #: Boot id of the machine on which the fetcher runs.
    machine: str
    #: Downloaded and verified files, by name.
    verified: dict[str, RemoteFile] = {}


def read_complete(target: Path, uri: str, only: Only) -> Marker | None:
    """Return the marker of the complete folder at `target`. Remove the folder if it is damaged.

    The cache may be shared with other pods, so the content of the marker is not trusted.

    Returns:
        The marker, or None if the model must be downloaded.

    Raises:
        FetchError: the folder contains another model, unknown files or an unreadable marker
            (ModelCacheInvalid).
    """
    try:
        marker = _read_record(target / MARKER, Marker)
        for name in marker.files:
            check_name(name)
    except (FileNotFoundError, NotADirectoryError):
        if target.is_symlink() or (
            target.exists() and (not target.is_dir() or any(target.iterdir()))
        ):
            raise _cache_invalid(target, "has content that baton-model did not write") from None
        return None
    except (ValueError, FetchError) as error:
        raise _cache_invalid(target, f"has an unreadable marker ({error})") from error
    if (marker.uri, marker.only) != (uri, only):
        raise _cache_invalid(target, f"holds other files: {marker.only} of {marker.uri}")
    if all(_is_file(target / name, size) for name, size in marker.files.items()):
        return marker
    discard(target)
    return None


def _cache_invalid(target: Path, why: str) -> FetchError:
    return FetchError("ModelCacheInvalid", f"{target} {why}; remove it, or choose another cache")


def _read_record(path: Path, kind: type[_Record]) -> _Record:
    """Decode a marker or a state file, which another client of a shared cache may have written.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file cannot be read, or its content does not match `kind`.
    """
    try:
        return msgspec.json.decode(read_file(path.parent, path.name), type=kind)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def _is_file(path: Path, size: int) -> bool:
    try:
        status = path.stat(follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == size


class Partial:
    """A folder into which one fetcher downloads. `commit` renames it to the model's folder.

    Several threads may call the methods at the same time, each for a different file.
    """

    def __init__(self, target: Path, uri: str, revision: str) -> None:
        """Create the partial folder.

        Raises:
            OSError: the cache is not writable.
        """
        self.path = target.with_name(f"{target.name}.partial-{secrets.token_hex(6)}")
        self._target = target
        self._state = _State(uri, revision, boot_id())
        self.path.mkdir(parents=True)
        self._owner = os.open(self.path / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._owner, fcntl.LOCK_EX)  # the kernel releases it when this process dies
        self.save()

    def reuse_leftovers(self, files: Iterable[RemoteFile]) -> None:
        """Move reusable files of other partial folders into this folder. Remove those folders.

        Folders whose fetcher still runs on this machine are skipped. Files are reused only if their
        folder has the same model and revision. Verified files are verified again, because another
        client of a shared cache may have written them. Incomplete files are reused only if their
        fetcher ran on this machine, because another machine's fetcher may still write to them.

        Args:
            files: the files of the model, as the source lists them.
        """
        for other in sorted(self._target.parent.glob(f"{self._target.name}.partial-*")):
            if other != self.path and not other.is_symlink():
                self._reuse_leftover(other, files)
        for doomed in self._target.parent.glob(f"{self._target.name}.discarded-*"):
            shutil.rmtree(doomed, ignore_errors=True)

    def _reuse_leftover(self, other: Path, files: Iterable[RemoteFile]) -> None:
        try:
            owner = os.open(other / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # the fetcher was killed at its start, or the folder was removed
            discard(other)
            return
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            state = _read_record(other / _STATE, _State)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            state = None
        finally:
            os.close(owner)
        if state is not None and (state.uri, state.revision) == (
            self._state.uri,
            self._state.revision,
        ):
            for file in files:
                name = file.name
                if "/" in name:  # another client may have put a link in place of the folder
                    continue
                if state.verified.get(name) == file and _is_file(other / name, file.size):
                    os.replace(other / name, self.path / name)
                    if verify(self.path / name, file):
                        (self.path / name).unlink()
                    else:
                        self._state.verified[name] = file
            if state.machine == self._state.machine:
                for path in other.glob(f"*{INCOMPLETE}"):
                    if stat.S_ISREG(path.stat(follow_symlinks=False).st_mode):
                        os.replace(path, self.path / path.name)
            self.save()
        discard(other)

    def has(self, file: RemoteFile) -> bool:
        """Return whether the file is downloaded and verified."""
        return self._state.verified.get(file.name) == file and _is_file(
            self.path / file.name, file.size
        )

    def incomplete(self, file: RemoteFile) -> Path:
        """Return the path at which the file is stored until it is verified.

        Raises:
            FetchError: the folder of the file is a link, which another process has made.
        """
        path = self.path / f"{file.name}{INCOMPLETE}"
        path.parent.mkdir(exist_ok=True)
        if path.parent.is_symlink():
            raise _cache_invalid(path.parent, "is a link")
        return path

    def accept(self, file: RemoteFile) -> None:
        """Sync a verified file to disk and rename it to its final name.

        Raises:
            OSError: the file cannot be synced or renamed.
        """
        path = self.incomplete(file)
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(path, self.path / file.name)
        if path.parent != self.path:  # `commit` syncs the folder of the model only
            _sync_folder(path.parent)
        self._state.verified[file.name] = file

    def save(self) -> None:
        """Save the list of verified files, which a later fetcher may reuse. Not thread-safe."""
        new = self.path / f"{_STATE}.new"
        new.write_bytes(msgspec.json.encode(self._state))
        os.replace(new, self.path / _STATE)

    def size_of(self, file: RemoteFile) -> int:
        """Return how many bytes of the file are on disk."""
        for path in (self.path / file.name, self.incomplete(file)):
            with contextlib.suppress(OSError):
                return min(path.stat().st_size, file.size)
        return 0

    def commit(self, only: Only, files: list[RemoteFile]) -> Marker:
        """Write the marker and rename this folder to the model's folder.

        If another fetcher has already created the model's folder, keep the model's folder and
        remove the partial folder.

        Returns:
            The marker of the model's folder.

        Raises:
            TransientError: another fetcher has moved files out of this folder, or the model's
                folder is damaged.
        """
        if not all(self.has(file) for file in files):
            raise TransientError(f"another fetcher moved files out of {self.path}")
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
                raise TransientError(f"the model's folder {self._target} was damaged") from error
            return there
        finally:
            self.close()
        _sync_folder(self._target.parent)
        return marker

    def close(self) -> None:
        """Unlock the folder, so that other fetchers may reuse its files."""
        if self._owner >= 0:
            os.close(self._owner)
            self._owner = -1


def discard(folder: Path) -> None:
    """Rename a folder, then remove it, so that no process reads a partly removed folder."""
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
        with contextlib.suppress(OSError):  # some file systems cannot sync folders
            os.fsync(fd)
    finally:
        os.close(fd)
