"""Downloads the files of a model in parallel. Downloads are resumed, verified and retried."""

from __future__ import annotations

import errno
import io
import logging
import os
import queue
import random
import threading
import time
from dataclasses import dataclass
from typing import Any

from baton_engine.fetch.fetch_errors import FetchError, TransientError
from baton_engine.fetch.fetch_progress import FetchProgress
from baton_engine.fetch.folder import Partial
from baton_engine.fetch.sources.source import RemoteFile, Source
from baton_engine.fetch.verify import verify

logger = logging.getLogger(__name__)

#: Number of files that are downloaded at the same time.
WORKERS = 4
#: The fetch fails when this many downloads of one file have failed verification.
CORRUPT_TRIES = 3


@dataclass(frozen=True)
class RetryPolicy:
    """Retries with exponential backoff, for a source that does not respond."""

    #: Maximum time without a new byte.
    give_up_after_s: float = 300.0
    #: Delay before the first retry. The delay doubles with each further retry, up to `max_delay_s`.
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0

    def retry(
        self, attempt: int, silent_since: float, error: TransientError, stop: threading.Event
    ) -> None:
        """Wait until the caller may retry, or raise FetchError if it must give up.

        Args:
            attempt: number of earlier retries since the last new byte, or since the start.
            silent_since: `time.monotonic` of the last new byte, or of the start if there was none.
            stop: an event that ends the wait when it is set.

        Raises:
            FetchError: nothing was received for `give_up_after_s`.
        """
        if time.monotonic() - silent_since > self.give_up_after_s:
            text = f"nothing was received for {self.give_up_after_s:g} s; last error: {error}"
            raise FetchError("ModelSourceUnavailable", text, temporary=True) from error
        delay_s = min(self.first_delay_s * 2**attempt, self.max_delay_s) * random.uniform(0.5, 1.0)
        logger.warning("%s; retrying in %.1f s", error, delay_s)
        stop.wait(delay_s)


class Download:
    """Downloads the listed files of a model into a partial folder."""

    def __init__(
        self,
        source: Source,
        revision: str,
        partial: Partial,
        retries: RetryPolicy,
        progress: FetchProgress,
    ) -> None:
        self._source, self._revision = source, revision
        self._partial, self._retries, self._progress = partial, retries, progress
        self._stop = threading.Event()

    def run(self, files: list[RemoteFile]) -> None:
        """Download and verify all files.

        Raises:
            FetchError: a file cannot be downloaded. Other downloads may continue in daemon threads.
        """
        wanted: queue.SimpleQueue[RemoteFile] = queue.SimpleQueue()
        outcomes: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        # Small files first, so that a problem of the model shows early.
        missing = sorted(
            (file for file in files if not self._partial.has(file)), key=lambda file: file.size
        )
        for file in missing:
            wanted.put(file)
        for _ in range(min(WORKERS, len(missing))):
            threading.Thread(
                target=self._fetch_files, args=(wanted, outcomes), name="fetch", daemon=True
            ).start()
        try:
            for _ in missing:
                outcome = outcomes.get()
                if outcome is not None:
                    raise outcome
                self._partial.save()
        except OSError as error:
            raise _disk_error(error) from error
        finally:
            self._stop.set()

    def _fetch_files(
        self, wanted: queue.SimpleQueue[RemoteFile], outcomes: queue.SimpleQueue[Exception | None]
    ) -> None:
        while not self._stop.is_set():
            try:
                file = wanted.get_nowait()
            except queue.Empty:
                return
            try:
                self._fetch(file)
            except Exception as error:  # any error: the main thread waits for every file
                outcomes.put(error)
                return
            outcomes.put(None)

    def _fetch(self, file: RemoteFile) -> None:
        path = self._partial.incomplete(file)
        attempt, corrupt, reached, silent_since = 0, 0, 0, time.monotonic()
        while not self._stop.is_set():
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            with _Target(fd, file.size) as target:
                offset = os.fstat(fd).st_size
                if offset > file.size:
                    target.truncate(offset := 0)
                target.seek(offset)
                try:
                    self._source.read(file, self._revision, target, offset)
                    target.flush()
                    if os.fstat(fd).st_size < file.size:
                        raise TransientError(
                            f"{file.name}: received {os.fstat(fd).st_size} of {file.size} bytes"
                        )
                except TransientError as error:
                    target.flush()
                    size = os.fstat(fd).st_size
                    if size <= file.size:
                        if size > reached:
                            attempt, reached, silent_since = 0, size, time.monotonic()
                        self._progress.fail(str(error))
                        self._retries.retry(attempt, silent_since, error, self._stop)
                        attempt += 1
                        continue
            problem = verify(path, file)
            if not problem:
                self._partial.accept(file)
                return
            path.unlink()
            corrupt, reached = corrupt + 1, 0
            if corrupt >= CORRUPT_TRIES:
                raise FetchError(
                    "ModelCorrupt",
                    f"{file.name} was downloaded {corrupt} times, and {problem}",
                    temporary=True,
                )
            logger.warning("%s: %s; downloading the file again", file.name, problem)
            self._progress.fail(f"{file.name}: {problem}")


class _Target(io.BufferedRandom):
    """A file under download. Writes fail once the file is larger than its listed size.

    The write that first exceeds the size succeeds. `verify` then reports the wrong size.
    """

    def __init__(self, fd: int, size: int) -> None:
        super().__init__(io.FileIO(fd, "r+b"))
        self._size = size

    def write(self, data: Any) -> int:
        if self.tell() > self._size:
            raise TransientError(f"the source sent more than the listed {self._size} bytes")
        return super().write(data)


def _disk_error(error: OSError) -> Exception:
    """Return a FetchError if the disk is full or not writable. Otherwise return `error`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return FetchError("NoSpace", f"the cache is full: {error}")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return FetchError("ModelCacheInvalid", f"the cache is not writable: {error}")
    return error
