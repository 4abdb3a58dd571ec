"""An event loop on a clock of the test's own: it does all that is due, and never waits."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type] - which class it is depends on the system
    """Asked to wait, it says that nothing more is due."""

    idle: Callable[[], None]

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout > 0:
            self.idle()
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Args: clock: seconds. The test moves it on between two runs."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._simulated_clock = clock
        self._ended_s = 0.0
        selector = _Selector()
        selector.idle = self.stop
        super().__init__(selector)

    def time(self) -> float:
        return self._simulated_clock() + self._ended_s

    def run_until_idle(self) -> None:
        """Whatever goes on by itself at this moment."""
        self.run_forever()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Raises what it raises; RuntimeError if it waits for something that does not come by itself at this moment."""
        return self.run_until_complete(work)

    def end(self) -> None:
        """Close the loop when all tasks have ended, as they were asked to. Raises AssertionError if one does not within 100 s."""
        while asyncio.all_tasks(self) and self._ended_s < 100.0:
            self.run_until_idle()
            self._ended_s += 10.0
        assert not asyncio.all_tasks(self), asyncio.all_tasks(self)
        self.close()
