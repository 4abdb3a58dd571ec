"""An event loop on a simulated clock. The loop runs everything that is due, and never waits."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """A selector that calls `idle()` instead of waiting when nothing is due."""

    idle: Callable[[], None]

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout > 0:
            self.idle()
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop on a simulated clock.

    Args:
        clock: returns seconds. Tests advance it between runs.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._simulated_clock = clock
        self._ended_s = 0.0
        selector = _Selector()
        selector.idle = self.stop
        super().__init__(selector)

    def time(self) -> float:
        return self._simulated_clock() + self._ended_s

    def run_until_idle(self) -> None:
        """Run everything that is due at the current simulated time."""
        self.run_forever()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, and return its result.

        Raises:
            RuntimeError: the coroutine waits for something that is not due.
        """
        return self.run_until_complete(work)

    def end(self) -> None:
        """Wait up to 100 s of simulated time until all tasks have ended, then close the loop."""
        while asyncio.all_tasks(self) and self._ended_s < 100.0:
            self.run_until_idle()
            self._ended_s += 10.0
        assert not asyncio.all_tasks(self), asyncio.all_tasks(self)
        self.close()
