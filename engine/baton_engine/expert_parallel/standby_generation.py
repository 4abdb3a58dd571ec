"""Prepares a generation in the background, while another generation serves.

The engine core polls the preparation between steps.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from baton_engine.executor.base import Executor
from baton_engine.expert_parallel.vote_group import VoteGroup
from baton_engine.worker.experts.preparation import PreparationState
from baton_protocol.topology import Generation, StartWave

logger = logging.getLogger(__name__)

#: Interval at which workers are polled for progress, and at which a vote is repeated.
POLL_INTERVAL_S = 0.05
#: Timeout of short calls to workers. The workers may have to end a long step first.
CALL_TIMEOUT_S = 30.0

#: Joins the vote group of a generation as a rank. Blocks until all members have joined.
Join = Callable[[Generation, int], VoteGroup]


class StandbyGeneration:
    """The preparation of the next generation (version of the expert-parallel group's topology).

    Errors are stored in `failure` and do not stop the engine.
    """

    def __init__(
        self,
        generation: Generation,
        rank: int | None,
        current: Generation | None,
        executor: Executor,
        join: Join,
        wakeup: Callable[[], None],
    ) -> None:
        """Start the preparation.

        Args:
            generation: the generation to prepare.
            rank: rank of this engine in `generation`. None: the engine leaves the group and
                prepares nothing.
            current: the generation in use. None: this engine is in no generation.
            executor: executor of the workers, which prepare groups and experts.
            join: joins the `VoteGroup` of a generation.
            wakeup: called by another thread when the join has succeeded or failed.
        """
        self.generation = generation
        self.rank = rank
        self.failure = ""
        #: Whether the commit was received. A commit is final.
        self.committed = False
        #: Earliest monotonic time at which this rank starts an exchange only to vote. A vote that
        #: was not unanimous delays the next vote.
        self.vote_due = 0.0
        #: The latest wave of this generation that another rank has started.
        self.start: StartWave | None = None
        self._executor = executor
        self._wakeup = wakeup
        self._workers_ready = rank is None
        self._next_poll = 0.0
        #: Guards the fields below, which the joining thread writes.
        self._lock = threading.Lock()
        self._group: VoteGroup | None = None
        self._join_failure = ""
        self._dropped = False
        if rank is None:
            return
        try:
            executor.collective_rpc(
                "prepare_generation", (generation, current), timeout_s=CALL_TIMEOUT_S
            )
        except Exception as error:
            self._fail(f"the workers cannot start the preparation: {error}")
            return
        threading.Thread(
            target=self._run,
            args=(join, rank),
            name=f"join-votes-{generation.number}",
            daemon=True,
        ).start()

    @property
    def ready(self) -> bool:
        """Whether the generation is prepared and can be committed."""
        return (
            not self.failure
            and self._workers_ready
            and (self.rank is None or self._group is not None)
        )

    def advance(self, now: float) -> None:
        """Check the progress of the preparation, and update `ready` and `failure`.

        Call this method between steps.

        Args:
            now: current time in seconds, from any monotonic clock.
        """
        was_ready = self.ready
        if was_ready or self.failure:
            return
        with self._lock:
            failure = self._join_failure
        if failure:
            self._fail(f"the vote group could not be joined: {failure}")
        elif not self._workers_ready and now >= self._next_poll:
            self._next_poll = now + POLL_INTERVAL_S
            self._poll_workers()
        if self.ready:
            logger.info("generation %d is prepared (operation %s)", *_names(self.generation))

    def keep(self, start: StartWave) -> None:
        """Store a StartWave that another rank has sent, and set `committed`.

        The message shows that the other rank has committed the generation. Of several messages,
        the one with the highest wave number is kept.
        """
        self.committed = True
        if self.start is None or start.wave > self.start.wave:
            self.start = start

    def take_group(self) -> VoteGroup:
        """Return the vote group. The caller becomes its owner and closes it.

        Call this method when the generation is committed.
        """
        with self._lock:
            group, self._group = self._group, None
        assert group is not None, "a generation is committed once, after its preparation"
        return group

    def drop(self) -> None:
        """Discard the preparation, because the generation will not be committed. Never raises."""
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
                    "a worker could not drop the preparation of generation %d: %s",
                    self.generation.number,
                    error,
                )
        logger.info(
            "the preparation of generation %d is dropped (operation %s)", *_names(self.generation)
        )

    def _poll_workers(self) -> None:
        nonce = self.generation.nonce
        try:
            preparations = self._executor.collective_rpc("preparation", timeout_s=CALL_TIMEOUT_S)
        except Exception as error:
            self._fail(f"the workers do not answer: {error}")
            return
        for worker, preparation in enumerate(preparations):
            if preparation.nonce != nonce:
                self._fail(f"worker {worker} has dropped the preparation")
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
        group: VoteGroup | None = None
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


def _give_up(group: VoteGroup) -> None:
    group.abort()  # so that other members do not wait for this rank
    group.close()


def _names(generation: Generation) -> tuple[int, str]:
    return generation.number, generation.operation_id or "-"
