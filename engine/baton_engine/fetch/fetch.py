"""Downloads a model into a folder. Fetchers that share a cache download the model once."""

from __future__ import annotations

import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from baton_engine.fetch.download import Download, RetryPolicy
from baton_engine.fetch.fetch_errors import FetchError, TransientError
from baton_engine.fetch.fetch_progress import FetchProgress
from baton_engine.fetch.folder import Marker, Partial, read_complete
from baton_engine.fetch.lock import FetchLock
from baton_engine.fetch.selection import Only, select
from baton_engine.fetch.sources.create_source import create_source
from baton_engine.fetch.sources.source import Listing, RemoteFile, Source
from baton_protocol.process.health import LoadProgress

#: Interval at which a fetcher tries to take the lock that another fetcher holds.
POLL_S = 0.5


@dataclass(frozen=True)
class FetchRequest:
    """The model to fetch, and the folder to create."""

    uri: str
    target: Path
    only: Only = "all"
    #: Limit for the sum of the files' sizes.
    max_bytes: int | None = None


def fetch(request: FetchRequest, progress: FetchProgress, retries: RetryPolicy) -> Marker:
    """Download the model unless its folder is complete. Return the folder's marker.

    Raises:
        FetchError: the model cannot be downloaded.
        OSError: the folder is not writable.
    """
    if marker := read_complete(request.target, request.uri, request.only):
        return marker
    source = create_source(request.uri)
    request.target.parent.mkdir(parents=True, exist_ok=True)
    lock = FetchLock(request.target.with_name(f"{request.target.name}.lock"))
    while not lock.try_acquire():
        progress.set_step(f"waiting for another pod that fetches {request.uri} into the same cache")
        time.sleep(POLL_S)
        if marker := read_complete(request.target, request.uri, request.only):
            return marker
    try:
        attempt, began = 0, time.monotonic()
        while True:
            if marker := read_complete(request.target, request.uri, request.only):
                return marker
            try:
                return _fetch_once(request, source, progress, retries)
            except TransientError as error:
                progress.fail(str(error))
                retries.retry(attempt, began, error, threading.Event())
                attempt += 1
    finally:
        lock.release()


def _fetch_once(
    request: FetchRequest, source: Source, progress: FetchProgress, retries: RetryPolicy
) -> Marker:
    """Download the selected files to a partial folder, and rename it to the model's folder.

    Returns:
        The marker of the model's folder.

    Raises:
        FetchError: an immediate retry does not help.
        TransientError: a retry of the whole fetch may succeed.
    """
    progress.set_step(f"listing the files of {request.uri}")
    listing = source.listing()
    files = _taken(listing, request.only)
    total = sum(file.size for file in files)
    if request.max_bytes is not None and total > request.max_bytes:
        raise FetchError(
            "NoSpace",
            f"the model has {total} bytes, more than the cache's size limit of "
            f"{request.max_bytes} bytes; raise the limit (cache.sizeLimit)",
        )
    partial = Partial(request.target, request.uri, listing.revision)
    try:
        partial.reuse_leftovers(files)
        lacking = total - sum(map(partial.size_of, files))
        free = shutil.disk_usage(request.target.parent).free
        if lacking > free:
            raise FetchError(
                "NoSpace",
                f"the model needs {lacking} bytes more, and the cache at {request.target.parent} "
                f"has {free} bytes left; free space or use a larger volume",
            )
        step = f"fetching {request.uri} at {listing.revision}"
        progress.set_step(step, lambda: LoadProgress(sum(map(partial.size_of, files)), total))
        Download(source, listing.revision, partial, retries, progress).run(files)
        marker = partial.commit(request.only, files)
        progress.set_step(step, lambda: LoadProgress(total, total))
        return marker
    finally:
        partial.close()


def _taken(listing: Listing, only: Only) -> list[RemoteFile]:
    by_name = {file.name: file for file in listing.files}
    files = [by_name[name] for name in select(by_name, only)]
    for file in files:
        if file.size < 0:
            raise FetchError(
                "ModelInvalid",
                f"{file.name} is listed with {file.size} bytes; check the file in its source",
            )
    return files
