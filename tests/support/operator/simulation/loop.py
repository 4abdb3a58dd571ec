"""An event loop on a simulated clock. It runs everything that is due, and never waits."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """A selector that records that nothing is due instead of waiting."""

    idle: Callable[[], None]

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout > 0:
            self.idle()
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """A simulated loop.

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
        """Run everything that is due at this time."""
        self.run_forever()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine. Raise RuntimeError if it waits for something that is not due."""
        return self.run_until_complete(work)

    def end(self) -> None:
        """Close the loop after all cancelled tasks have ended, within 100 s of simulated time."""
        while asyncio.all_tasks(self) and self._ended_s < 100.0:
            self.run_until_idle()
            self._ended_s += 10.0
        assert not asyncio.all_tasks(self), asyncio.all_tasks(self)
        self.close()
