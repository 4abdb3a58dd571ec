"""What other threads want of a progress thread: commands, run there in order, and answers to those who wait for one."""

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
        """`signal` wakes the thread; never called any more once `close` returned."""
        self._signal = signal
        self._lock = threading.Lock()
        self._commands: deque[Callable[[], None]] = deque()
        self.closed = False

    def submit(self, command: Callable[[], None]) -> None:
        """Raises TransportError if closed."""
        with self._lock:
            if self.closed:
                raise TransportError("the transport is closed")
            self._commands.append(command)
            self._signal()

    def call(self, function: Callable[[], _T]) -> _T:
        """Runs `function` on the thread; returns or raises what it does.

        Raises:
            TransportError: closed, or no answer within CALL_TIMEOUT_S.
        """
        future: Future[_T] = Future()

        def command() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # whatever it is belongs to the caller
                future.set_exception(error)

        self.submit(command)
        try:
            return future.result(CALL_TIMEOUT_S)
        except TimeoutError:
            raise TransportError(
                f"the progress thread does not answer within {CALL_TIMEOUT_S:g} s"
            ) from None

    def run(self) -> None:
        """The thread's part: runs what was submitted."""
        while self._commands:
            self._commands.popleft()()

    def close(self) -> bool:
        """Takes no more commands and wakes the thread; false if it was closed before."""
        with self._lock:
            if self.closed:
                return False
            self.closed = True
            self._signal()
            return True

    def finish(self) -> None:
        """The thread's last part: runs what is left. When this returns, `signal` is not called any more."""
        with self._lock:  # whoever closes has signalled
            self.closed = True
        self.run()
