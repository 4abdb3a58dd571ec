"""A thread pool in which clients take turns."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_Calls = dict[Future[Any], Callable[[], Any]]


class FairThreadPool:
    """Runs calls in threads, and takes turns among the clients. Thread-safe.

    The calls of one client start in the order of their submission. If several of them wait, then
    between two consecutive ones, at most one call of each other client starts.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        #: The waiting calls of each client. The next free thread runs a call of the first client.
        self._waiting: OrderedDict[str, _Calls] = OrderedDict()

    def submit(self, client: str, call: Callable[[], _Result]) -> Future[_Result]:
        """Run `call` in a thread when it is the turn of `client`. Return the Future of the result.

        If the Future is cancelled before `call` starts, `call` is dropped at once.
        """
        future: Future[_Result] = Future()
        with self._lock:
            self._waiting.setdefault(client, {})[future] = call
        future.add_done_callback(partial(self._drop, client))
        self._threads.submit(self._run_next)
        return future

    def shutdown(self) -> None:
        """Cancel the calls that have not started. Does not wait for running calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            waiting = [future for calls in self._waiting.values() for future in calls]
        for future in waiting:
            future.cancel()

    def _drop(self, client: str, future: Future[Any]) -> None:
        if future.cancelled():
            with self._lock:
                self._remove(client, future)

    def _remove(self, client: str, future: Future[Any]) -> None:
        calls = self._waiting.get(client, {})
        calls.pop(future, None)
        if not calls:
            self._waiting.pop(client, None)

    def _run_next(self) -> None:
        with self._lock:
            if not self._waiting:  # the call for which this run was submitted was cancelled
                return
            client, calls = next(iter(self._waiting.items()))
            future, call = next(iter(calls.items()))
            self._waiting.move_to_end(client)
            self._remove(client, future)
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call())
        except BaseException as error:  # also a panic of native code, which is not an Exception
            future.set_exception(error)
            # The error's traceback refers to this frame, which must not keep the call's arguments.
            del future, call
