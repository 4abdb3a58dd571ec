"""Workers with a fault. For the chaos test of stalls, whose engine processes import it by name."""

from __future__ import annotations

from baton_engine.worker.worker import Worker


class WorkerThatKeepsWeights(Worker):
    """Fails when a sleep at level 2 would drop the weights."""

    def sleep(self, level: int) -> None:
        """Sleep at level 1.

        Raises:
            RuntimeError: the level is 2.
        """
        if level == 2:
            raise RuntimeError("the weights are in use")
        super().sleep(level)
