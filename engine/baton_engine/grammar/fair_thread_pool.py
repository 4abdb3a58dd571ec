"""A thread pool in which clients take turns."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class FairPool:
    """Runs the calls of each client in their order. Thread-safe.

    A call waits for the running calls and for one call of each other client, however many calls the
    other clients have submitted.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        #: The waiting calls of each client. The turn of the first client is next.
        self._waiting: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]]
        self._waiting = OrderedDict()

    def submit(self, client: str, call: Callable[[], _Result]) -> Future[_Result]:
        """Run `call` in a thread. Return the Future of its result."""
        future: Future[_Result] = Future()
        with self._lock:
            self._waiting.setdefault(client, deque()).append((future, call))
        self._threads.submit(self._run_next)
        return future

    def shutdown(self) -> None:
        """Cancel the calls that have not started. Does not wait for running calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for calls in self._waiting.values():
                for future, _ in calls:
                    future.cancel()

    def _run_next(self) -> None:
        with self._lock:
            client, calls = self._waiting.popitem(last=False)
            future, call = calls.popleft()
            if calls:
                self._waiting[client] = calls  # at the end
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call())
        except BaseException as error:  # also a panic of native code, which is not an Exception
            future.set_exception(error)
