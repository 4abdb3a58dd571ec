"""A model from its source into a folder, once, however many ask for it."""

from __future__ import annotations

import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from baton_engine.fetch.download import Download, Patience
from baton_engine.fetch.fetch_errors import TransientError, no_space
from baton_engine.fetch.folder import Marker, Partial, read_complete
from baton_engine.fetch.lock import FetchLock
from baton_engine.fetch.open_source import open_source
from baton_engine.fetch.progress import Progress
from baton_engine.fetch.selection import Only, select
from baton_engine.fetch.source import Listing, RemoteFile, Source
from baton_protocol.progress import LoadProgress

POLL_S = 0.5


@dataclass(frozen=True)
class Order:
    """What to fetch, and where to."""

    uri: str
    target: Path
    only: Only = "all"
    max_bytes: int | None = None
    """The files taken may not be larger together."""


def fetch(order: Order, progress: Progress, patience: Patience) -> Marker:
    """Returns when the folder is complete: at once if it is already.

    Raises:
        FetchError: it cannot be had.
        OSError: the folder cannot be written.
    """
    if marker := read_complete(order.target, order.uri, order.only):
        return marker
    source = open_source(order.uri)
    order.target.parent.mkdir(parents=True, exist_ok=True)
    lock = FetchLock(order.target.with_name(f"{order.target.name}.lock"))
    while not lock.try_acquire():
        progress.tell(f"another pod fetches {order.uri} into the same cache")
        time.sleep(POLL_S)
        if marker := read_complete(order.target, order.uri, order.only):
            return marker
    try:
        attempt, began = 0, time.monotonic()
        while True:
            if marker := read_complete(order.target, order.uri, order.only):
                return marker
            try:
                return _fetch_once(order, source, progress, patience)
            except TransientError as error:
                progress.fail(str(error))
                patience.retry(attempt, began, error, threading.Event())
                attempt += 1
    finally:
        lock.release()


def _fetch_once(order: Order, source: Source, progress: Progress, patience: Patience) -> Marker:
    """Raises TransientError if all of it may be tried again."""
    progress.tell(f"asking for the files of {order.uri}")
    listing = source.listing()
    files = _taken(listing, order.only)
    total = sum(file.size for file in files)
    if order.max_bytes is not None and total > order.max_bytes:
        raise no_space(
            f"the model has {total} bytes, more than the cache's size limit of {order.max_bytes}"
        )
    partial = Partial(order.target, order.uri, listing.revision)
    try:
        partial.reuse_leftovers()
        lacking = total - sum(map(partial.size_of, files))
        free = shutil.disk_usage(order.target.parent).free
        if lacking > free:
            raise no_space(
                f"the model still needs {lacking} bytes, the cache at {order.target.parent} has {free} left"
            )
        progress.tell(
            f"fetching {order.uri} at {listing.revision}",
            lambda: LoadProgress(sum(map(partial.size_of, files)), total),
        )
        Download(source, listing.revision, partial, patience, progress).run(files)
        return partial.commit(order.only, files)
    finally:
        partial.close()


def _taken(listing: Listing, only: Only) -> list[RemoteFile]:
    by_name = {file.name: file for file in listing.files}
    return [by_name[name] for name in select(by_name, only)]
