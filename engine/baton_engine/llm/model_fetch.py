"""Downloads the model of an `LLM` into the cache, with a progress bar."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from baton_engine.fetch.cached_model import GIVE_UP_AFTER_S, CachedModel
from baton_engine.fetch.download import RetryPolicy
from baton_engine.fetch.fetch import FetchRequest, fetch
from baton_engine.fetch.fetch_errors import FetchError
from baton_engine.fetch.fetch_progress import FetchProgress

#: Interval between two updates of the progress bar.
_UPDATE_S = 0.2


def fetch_model(model: CachedModel) -> None:
    """Download a model unless its folder is complete. Show a progress bar during a download.

    Raises:
        FetchError: the model cannot be downloaded. The message says what to do.
        OSError: the cache is not writable.
    """
    progress = FetchProgress()
    retries = RetryPolicy(give_up_after_s=GIVE_UP_AFTER_S)
    try:
        with _progress_bar(progress, model.name):
            fetch(FetchRequest(model.uri, model.folder), progress, retries)
    except FetchError as error:
        raise FetchError(
            error.reason,
            f"cannot download {model.uri}: {error.message}; {model.advice}",
            temporary=error.temporary,
        ) from error


@contextlib.contextmanager
def _progress_bar(progress: FetchProgress, name: str) -> Iterator[None]:
    """Show a progress bar during the `with` block. A thread updates the bar."""
    end = threading.Event()
    thread = threading.Thread(target=_show, args=(progress, name, end), daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _show(progress: FetchProgress, name: str, end: threading.Event) -> None:
    with contextlib.ExitStack() as stack:
        bar: tqdm[Any] | None = None
        has_ended = False
        while not has_ended:
            has_ended = end.wait(_UPDATE_S)
            load = progress.health().progress
            if load is None:
                continue
            if bar is None:
                bar = stack.enter_context(
                    tqdm(
                        total=load.total_bytes,
                        desc=f"Downloading {name}",
                        unit="B",
                        unit_scale=True,
                        unit_divisor=1024,
                        dynamic_ncols=True,
                    )
                )
            bar.update(max(load.done_bytes - bar.n, 0))
