"""A queue of commands for one thread, which runs them in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from baton_kv_transfer.transports.transfer import TransportError

#: How long `call` waits for a result. The thread may be inside a slow call of a network library.
CALL_TIMEOUT_S = 30.0

_T = TypeVar("_T")


class CommandQueue:
    """Commands that any thread may submit. One thread at a time, the owner, runs them."""

    def __init__(self, signal: Callable[[], None]) -> None:
        """Create an empty queue.

        Args:
            signal: wakes the owner. `signal` is not called after `close` has returned.
        """
        self._signal = signal
        self._lock = threading.Lock()
        self._commands: deque[Callable[[], None]] = deque()
        self.closed = False

    def submit(self, command: Callable[[], None]) -> None:
        """Queue a command.

        Raises:
            TransportError: the queue is closed. The command will not run.
        """
        with self._lock:
            if self.closed:
                raise TransportError("the transport is closed")
            self._commands.append(command)
            self._signal()

    def call(self, function: Callable[[], _T]) -> _T:
        """Run `function` on the owner's thread; return its result or raise its exception.

        Raises:
            TransportError: the queue is closed, or `function` does not end within CALL_TIMEOUT_S.
                The thread may still run `function` after the timeout.
        """
        future: Future[_T] = Future()

        def command() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # raised again in the caller
                future.set_exception(error)

        self.submit(command)
        try:
            return future.result(CALL_TIMEOUT_S)
        except TimeoutError:
            raise TransportError(
                f"the thread of the KV transports does not answer within {CALL_TIMEOUT_S:g} s"
            ) from None

    def run(self) -> None:
        """Run all queued commands. Only the owner calls this."""
        while self._commands:
            self._commands.popleft()()

    def close(self) -> bool:
        """Refuse further commands, and wake the owner.

        Return True. If the queue is closed already, do nothing and return False.
        """
        with self._lock:
            if self.closed:
                return False
            self.closed = True
            self._signal()
            return True

    def finish(self) -> None:
        """Refuse further commands, and run the queued commands.

        Only the owner calls this. After the return, `signal` is not called any more.
        """
        with self._lock:  # waits until `signal`, called by `close`, has returned
            self.closed = True
        self.run()
