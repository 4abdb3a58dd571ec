"""Commands of other threads for a progress thread, run in order, and their results."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from baton_kv_transfer.transports.transfer import TransportError

CALL_TIMEOUT_S = 30.0

_T = TypeVar("_T")


class Mailbox:
    def __init__(self, signal: Callable[[], None]) -> None:
        """Start empty.

        Args:
            signal: wakes the thread. It is not called any more after `close` returned.
        """
        self._signal = signal
        self._lock = threading.Lock()
        self._commands: deque[Callable[[], None]] = deque()
        self.closed = False

    def submit(self, command: Callable[[], None]) -> None:
        """Queue a command.

        Raises:
            TransportError: the mailbox is closed. The command will not run.
        """
        with self._lock:
            if self.closed:
                raise TransportError("the transport is closed")
            self._commands.append(command)
            self._signal()

    def call(self, function: Callable[[], _T]) -> _T:
        """Run `function` on the thread; return its result or raise its exception.

        Raises:
            TransportError: the mailbox is closed, or there is no answer within CALL_TIMEOUT_S. The
                thread may still run `function` after the timeout.
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
                f"the progress thread does not answer within {CALL_TIMEOUT_S:g} s"
            ) from None

    def run(self) -> None:
        """Run what was submitted. Called by the thread."""
        while self._commands:
            self._commands.popleft()()

    def close(self) -> bool:
        """Refuse further commands and wake the thread; return False if it was closed before."""
        with self._lock:
            if self.closed:
                return False
            self.closed = True
            self._signal()
            return True

    def finish(self) -> None:
        """Run what is left.

        After it returns, `signal` is not called any more. Called by the thread.
        """
        with self._lock:  # `close` has signalled
            self.closed = True
        self.run()
