"""Pausing and sleeping: when scheduling stops, and when memory may be dropped.

pause(abort)   all requests end, then the engine is paused
pause(wait)    running requests end, no waiting request is admitted, then the engine is paused
pause(keep)    steps in flight end, then the engine is paused; `resume` continues all requests
sleep(level)   a pause in one of these modes, then level 1 moves weights to host memory, and
               level 2 drops them; both drop the KV cache; level 0 frees nothing

Requests that arrive during a pause wait. A later call to `pause` or `sleep` sets the mode for
pending calls as well. A call with `keep` cancels pending calls with `wait`. `resume` cancels all
pending calls, and `wake_up` cancels pending calls to `sleep`. Every Future is resolved or fails, so
no order of calls deadlocks.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import replace
from typing import Literal

from baton_engine.executor.base import Executor, ModelInfo
from baton_engine.scheduling.scheduler import Scheduler
from baton_engine.scheduling.scheduler_state import PauseState

logger = logging.getLogger(__name__)

PauseMode = Literal["abort", "wait", "keep"]
SleepLevel = Literal[0, 1, 2]

WEIGHTS, KV_CACHE, SCHEDULING = "weights", "kv_cache", "scheduling"
#: Tags that `PauseControl.wake_up` accepts.
TAGS = (WEIGHTS, KV_CACHE, SCHEDULING)

_MEMORIES = frozenset({WEIGHTS, KV_CACHE})
_NOT_ASLEEP = -1


class PausedEngine(ABC):
    """Base class of `EngineCore`: the operations that `PauseControl` uses.

    `EngineCore` sets the attributes.
    """

    executor: Executor
    info: ModelInfo
    scheduler: Scheduler

    @abstractmethod
    def finish_steps(self) -> None:
        """Wait for all steps in flight and process their results."""

    @abstractmethod
    def _collect_outputs(self) -> None:
        """Collect the outputs that the scheduler has produced between steps."""

    def set_pause_state(self, state: PauseState) -> None:
        self.scheduler.set_pause_state(state)

    def end_requests(self) -> None:
        """End all requests as aborted.

        Unlike `EngineCore.abort_requests`, this method does not call `PauseControl.advance`.
        """
        self.scheduler.abort_requests(list(self.scheduler.state.requests))
        self._collect_outputs()

    def num_running(self) -> int:
        """Return the number of requests that run or are swapped out."""
        stats = self.scheduler.stats()
        return stats.num_requests_running + stats.num_requests_swapped

    def free_kv_cache(self) -> bool:
        """Free the KV of all requests and clear the prefix cache.

        Returns:
            True if all KV is freed. False if KV transfers still hold blocks, so that the caller
            must try again later.
        """
        self.scheduler.preempt_all()
        if self.scheduler.state.kv.usage > 0:
            return False
        self.scheduler.reset_prefix_cache()
        return True

    def sleep_workers(self, level: int) -> None:
        self.executor.collective_rpc("sleep", (level,))

    def wake_workers(self, tags: list[str]) -> None:
        compatibility_hash, *_ = self.executor.collective_rpc("wake_up", (tags,))
        self.info = replace(self.info, compatibility_hash=compatibility_hash)


class PauseControl:
    """The state machine of pause, sleep and wake-up. Only the engine's thread calls its methods."""

    def __init__(self, engine: PausedEngine) -> None:
        self._engine = engine
        #: None: not paused.
        self._mode: PauseMode | None = None
        self._level = _NOT_ASLEEP
        #: Memory that is dropped: WEIGHTS, KV_CACHE or both.
        self._asleep: set[str] = set()
        self._paused_by_sleep = False
        #: Pending calls: the Future and the sleep level of each.
        self._pending: list[tuple[Future[None], int]] = []

    @property
    def is_paused(self) -> bool:
        return self._mode is not None

    @property
    def sleep_level(self) -> int | None:
        return None if self._level == _NOT_ASLEEP else self._level

    @property
    def memory_dropped(self) -> bool:
        """Whether a sleep has freed weights or KV cache of the workers, so that no step can run."""
        return bool(self._asleep)

    def pause(self, mode: PauseMode = "abort") -> Future[None] | None:
        """Start a pause.

        Returns:
            None if the engine is paused now. Otherwise a Future, which is resolved when the engine
            is paused. The Future fails if another call cancels the pause.
        """
        _check_mode(mode)
        self._paused_by_sleep = False  # an explicit pause needs an explicit resume
        return self._begin(mode, _NOT_ASLEEP)

    def sleep(self, level: SleepLevel = 1, mode: PauseMode = "abort") -> Future[None] | None:
        """Start a pause, and free memory once the engine is paused.

        Args:
            level: 1 moves weights to host memory, and 2 drops the weights. Both levels drop the KV
                cache. 0 frees nothing.
            mode: mode of the pause, see the docstring of this module.

        Returns:
            None if the engine sleeps now. Otherwise a Future, which is resolved when the engine
            sleeps. The Future fails if another call cancels the sleep.

        Raises:
            ValueError: the level or the mode is unknown.
            RuntimeError: the engine already sleeps at another level, or is partly awake.
        """
        _check_mode(mode)
        if level not in (0, 1, 2):
            raise ValueError(f"level must be 0, 1 or 2, got {level}")
        if (
            level > 0
            and self._asleep
            and not (level == self._level and len(self._asleep) == len(_MEMORIES))
        ):
            raise RuntimeError(
                f"the engine already sleeps at level {self._level}, or is partly awake; "
                "call wake_up() first"
            )
        if self._level >= level:
            return None
        if not self.is_paused:
            self._paused_by_sleep = True
        return self._begin(mode, level)

    def resume(self) -> None:
        """Resume scheduling and cancel pending calls. Do nothing without a pause.

        Raises:
            RuntimeError: a sleep has freed memory that is not restored. Call `wake_up` first.
        """
        if self._asleep:
            raise RuntimeError(f"the engine sleeps at level {self._level}; call wake_up() first")
        self._cancel(_NOT_ASLEEP, "the engine was resumed before the pause was complete")
        self._level = _NOT_ASLEEP
        self._unpause()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """End a sleep, or restore only some of the parts that the sleep has stopped or freed.

        If the sleep stopped scheduling, scheduling resumes when all memory is restored.

        Args:
            tags: parts to restore, from TAGS. None: all of them.

        Raises:
            ValueError: a tag is unknown.
        """
        wanted = set(TAGS if tags is None else tags)
        if unknown := sorted(wanted - set(TAGS)):
            raise ValueError(f"tags must be some of {', '.join(TAGS)}, got {', '.join(unknown)}")
        if (
            self._cancel(0, "the engine was woken up before it slept")
            and self._level == _NOT_ASLEEP
        ):
            self._end_sleep()
        if wake := sorted(self._asleep & wanted):
            self._engine.wake_workers(wake)
            self._asleep -= set(wake)
            logger.info("the engine woke up: restored %s", ", ".join(wake))
            if not self._asleep:
                self._end_sleep()
        elif self._level == 0 and SCHEDULING in wanted:
            self._end_sleep()

    def advance(self) -> None:
        """Complete the pending calls of `pause` and `sleep` whose conditions are met.

        The engine core calls this method after requests or steps have changed.
        """
        if not self._pending or (self._mode == "wait" and self._engine.num_running() > 0):
            return
        self._engine.finish_steps()
        self._resolve(_NOT_ASLEEP)
        if not self._pending:
            return
        level = max(level for _, level in self._pending)
        try:
            if level > 0:
                if not self._engine.free_kv_cache():
                    return
                self._sleep_workers(level)
            self._level = level
            logger.info("the engine sleeps at level %d until POST /wake_up", level)
        except Exception as error:  # the engine stays paused
            pending, self._pending = self._pending, []
            for future, _ in pending:
                future.set_exception(error)
        self._resolve(level)

    def _sleep_workers(self, level: int) -> None:
        """Free the workers' memory, in all workers or in none.

        If a worker fails, wake up all workers again and raise the worker's error. If this wake-up
        also fails, the engine stays asleep until the next call of `wake_up`.
        """
        self._asleep = set(_MEMORIES)
        try:
            self._engine.sleep_workers(level)
        except Exception:
            self._level = level
            self._engine.wake_workers(sorted(_MEMORIES))
            self._asleep, self._level = set(), _NOT_ASLEEP
            raise

    def _begin(self, mode: PauseMode, level: int) -> Future[None] | None:
        if self._asleep:  # no request can run
            if mode == "abort":
                self._engine.end_requests()
            return None
        if mode == "keep" and self._mode == "wait":
            self._cancel(
                _NOT_ASLEEP, "the running requests were frozen by another pause before they ended"
            )
        self._mode = mode
        if mode == "abort":
            self._engine.end_requests()
        self._engine.set_pause_state(
            PauseState.PAUSED_NEW if mode == "wait" else PauseState.PAUSED_ALL
        )
        future: Future[None] = Future()
        self._pending.append((future, level))
        self.advance()
        if not future.done():
            return future
        return future.result()

    def _resolve(self, level: int) -> None:
        """Resolve all pending pauses, and the pending sleeps whose level is at most `level`."""
        done = [future for future, wanted in self._pending if wanted <= level]
        self._pending = [(future, wanted) for future, wanted in self._pending if wanted > level]
        for future in done:
            future.set_result(None)

    def _cancel(self, level: int, reason: str) -> bool:
        """Fail all pending sleeps of level `level` or higher.

        If `level` is _NOT_ASLEEP, pending pauses fail as well.

        Returns:
            Whether any pending call failed.
        """
        void = [future for future, wanted in self._pending if wanted >= level]
        self._pending = [(future, wanted) for future, wanted in self._pending if wanted < level]
        for future in void:
            future.set_exception(RuntimeError(reason))
        return bool(void)

    def _end_sleep(self) -> None:
        self._level = _NOT_ASLEEP
        if self._paused_by_sleep:
            self._unpause()

    def _unpause(self) -> None:
        self._mode = None
        self._paused_by_sleep = False
        self._engine.set_pause_state(PauseState.UNPAUSED)


def _check_mode(mode: str) -> None:
    if mode not in ("abort", "wait", "keep"):
        raise ValueError(f"mode must be abort, wait or keep, got {mode!r}")
