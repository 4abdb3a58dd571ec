"""A generation that is prepared beside the one that serves, as one engine core sees it: in the background, polled between steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from baton_engine.executor.base import Executor
from baton_engine.expert_parallel.control_group import ControlGroup
from baton_engine.worker.experts.preparation import PreparationState
from baton_protocol.topology import Generation, StartWave

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.05
"""How often workers are asked how far they are; and the other ranks, in an exchange, whether they vote for it, too."""
CALL_TIMEOUT_S = 30.0
"""Of calls that return at once: workers may be at the end of a long step."""

Join = Callable[[Generation, int], ControlGroup]
"""Joins the control group of a generation as a rank; blocks until all members have, and raises if they do not."""


class StandbyGeneration:
    """Nothing that goes wrong here is raised: it is the `failure`, and what serves goes on."""

    def __init__(
        self,
        generation: Generation,
        rank: int | None,
        current: Generation | None,
        executor: Executor,
        join: Join,
        wakeup: Callable[[], None],
    ) -> None:
        """Begins to prepare.

        Args:
            rank: of this engine in it; None: the engine is to leave, which takes no preparation.
            current: what the engine serves in.
            wakeup: called, by another thread, when there is something new for `advance`.
        """
        self.generation = generation
        self.rank = rank
        self.failure = ""
        self.committed = False
        """It is adopted by all who can; never taken back."""
        self.vote_due = 0.0
        """From when on an exchange is wanted for the sake of a vote alone: not at once again after one that was not unanimous."""
        self.start: StartWave | None = None
        """The latest wave of it that somebody was seen to begin."""
        self._executor = executor
        self._wakeup = wakeup
        self._workers_ready = rank is None
        self._next_poll = 0.0
        self._lock = threading.Lock()
        """Guards what follows, which the joining thread writes."""
        self._group: ControlGroup | None = None
        self._join_failure = ""
        self._dropped = False
        if rank is None:
            return
        try:
            executor.collective_rpc(
                "prepare_generation", (generation, current), timeout_s=CALL_TIMEOUT_S
            )
        except Exception as error:
            self._fail(f"workers cannot prepare it: {error}")
            return
        threading.Thread(
            target=self._run,
            args=(join, rank),
            name=f"join-control-{generation.number}",
            daemon=True,
        ).start()

    @property
    def ready(self) -> bool:
        """Prepared: it can be adopted at any time."""
        return (
            not self.failure
            and self._workers_ready
            and (self.rank is None or self._group is not None)
        )

    def advance(self, now: float) -> None:
        """Between steps: sees how far the preparation is.

        Args:
            now: in seconds, of any clock.
        """
        was_ready = self.ready
        if was_ready or self.failure:
            return
        with self._lock:
            failure = self._join_failure
        if failure:
            self._fail(f"the control group could not be joined: {failure}")
        elif not self._workers_ready and now >= self._next_poll:
            self._next_poll = now + POLL_INTERVAL_S
            self._poll_workers()
        if self.ready:
            logger.info("generation %d is prepared (operation %s)", *_names(self.generation))

    def keep(self, start: StartWave) -> None:
        """Somebody has adopted this generation, and has begun a wave of it."""
        self.committed = True
        if self.start is None or start.wave > self.start.wave:
            self.start = start

    def take_group(self) -> ControlGroup:
        """The control group now belongs to the caller, for this generation is adopted."""
        with self._lock:
            group, self._group = self._group, None
        assert group is not None, "a generation is adopted once, and after it was prepared"
        return group

    def drop(self) -> None:
        """It will not be adopted. Never raises."""
        with self._lock:
            self._dropped = True
            group, self._group = self._group, None
        if group is not None:
            _give_up(group)
        if self.rank is not None:
            try:
                self._executor.collective_rpc(
                    "drop_generation", (self.generation.nonce,), timeout_s=CALL_TIMEOUT_S
                )
            except Exception as error:
                logger.warning(
                    "generation %d could not be dropped: %s", self.generation.number, error
                )
        logger.info("generation %d is dropped (operation %s)", *_names(self.generation))

    def _poll_workers(self) -> None:
        nonce = self.generation.nonce
        try:
            preparations = self._executor.collective_rpc("preparation", timeout_s=CALL_TIMEOUT_S)
        except Exception as error:
            self._fail(f"workers do not answer: {error}")
            return
        for worker, preparation in enumerate(preparations):
            if preparation.nonce != nonce:
                self._fail(f"worker {worker} does not prepare it any more")
                return
            if preparation.state is PreparationState.FAILED:
                self._fail(f"worker {worker}: {preparation.reason}")
                return
        self._workers_ready = all(each.state is PreparationState.PREPARED for each in preparations)

    def _fail(self, reason: str) -> None:
        self.failure = reason
        logger.warning(
            "generation %d (operation %s) cannot be prepared: %s", *_names(self.generation), reason
        )
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            _give_up(group)

    def _run(self, join: Join, rank: int) -> None:
        group: ControlGroup | None = None
        try:
            group = join(self.generation, rank)
        except Exception as error:
            with self._lock:
                self._join_failure = f"{type(error).__name__}: {error}"
        with self._lock:
            wanted = not (self._dropped or self.failure)
            if wanted:
                self._group = group
        if group is not None and not wanted:
            _give_up(group)
        self._wakeup()


def _give_up(group: ControlGroup) -> None:
    group.abort()  # the others need not wait for this one
    group.close()


def _names(generation: Generation) -> tuple[int, str]:
    return generation.number, generation.operation_id
