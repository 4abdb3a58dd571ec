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
        """What ends by itself ends, as if it waited as long as it likes; the rest is cancelled."""
        for turn in range(20):
            self.run_until_idle()
            self._ended_s += 10.0
            if turn >= 10:
                for task in asyncio.all_tasks(self):
                    task.cancel()
        self.close()
