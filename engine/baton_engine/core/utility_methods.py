"""UtilityMethods: the methods of EngineCore that clients and the admin HTTP port call by name.

`server/utility_calls.py` lists the names and checks the arguments.

The methods are in a base class of `EngineCore` and not in a separate object. Such an object would
still call the core's steps and scheduler, and `DPEngineCore` would need a subclass of it.
"""

from __future__ import annotations

import logging
import math
import time
from concurrent.futures import Future

from baton_engine.core.pause import PauseControl, PausedEngine, PauseMode, SleepLevel
from baton_engine.metrics.engine_stats import EngineStats
from baton_kv_transfer.connector import ConnectorStats
from baton_protocol.options.config import EngineConfig, KVRole

logger = logging.getLogger(__name__)


class UtilityMethods(PausedEngine):
    """Statistics, drain, pause, sleep and profiling of an engine core.

    `EngineCore` sets the attributes. If a method returns a Future, the operation completes after
    the call, and a later method call resolves the Future.
    """

    config: EngineConfig
    _pause: PauseControl
    _connector_stats: ConnectorStats | None = None
    _connector_stats_time = -math.inf

    def get_stats(self) -> EngineStats:
        """Return the engine's gauges and counters, without cached values."""
        return self.recent_stats(max_connector_age_s=0.0)

    def recent_stats(self, *, max_connector_age_s: float) -> EngineStats:
        """Return the engine's gauges and counters. The KV connector's counters may be cached.

        Cached counters are at most `max_connector_age_s` seconds old. The connector runs in the
        workers, so reading its counters delays steps in flight.
        """
        now = time.monotonic()
        if now - self._connector_stats_time >= max_connector_age_s:
            self._connector_stats = self.executor.connector_stats()
            self._connector_stats_time = now
        stats = self.scheduler.stats()
        stats.kv_transfer = self._connector_stats
        stats.paused = self._pause.is_paused
        stats.sleep_level = self._pause.sleep_level
        return stats

    def reset_prefix_cache(self, reset_running: bool = False) -> None:
        """Clear the prefix cache. Requests keep their blocks, but later requests cannot reuse them.

        Args:
            reset_running: also free the blocks of running requests. These requests compute their KV
                again.
        """
        if reset_running:
            self.finish_steps()
        self.scheduler.reset_prefix_cache(reset_running)

    def drain(self) -> EngineStats:
        """Start to refuse new requests, and return the engine's gauges and counters.

        Accepted requests continue. Idempotent.
        """
        if not self.scheduler.draining:
            self.scheduler.draining = True
            logger.info(
                "draining: new requests are refused, and %d unfinished requests continue",
                self.scheduler.stats().num_unfinished,
            )
        return self.get_stats()

    def pause(self, mode: PauseMode = "abort") -> Future[None] | None:
        """Stop scheduling. New requests wait. `core/pause.py` describes the modes.

        Returns:
            None if the engine is paused now. Otherwise a Future that is resolved when the engine is
            paused.
        """
        return self._pause.pause(mode)

    def resume(self) -> None:
        """End a pause. Raise RuntimeError if a sleep has freed memory that is not restored."""
        self._pause.resume()

    def is_paused(self) -> bool:
        return self._pause.is_paused

    def sleep(self, level: SleepLevel = 1, mode: PauseMode = "abort") -> Future[None] | None:
        """Pause, then free memory. Level 1 moves weights to host memory, level 2 drops the weights.

        Both levels drop the KV cache. Level 0 frees nothing.

        Returns:
            None if the engine sleeps now. Otherwise a Future that is resolved when the engine
            sleeps.

        Raises:
            RuntimeError: the level is not 0, and other engines use the KV cache for KV transfers.
            ValueError, RuntimeError: from `PauseControl.sleep`.
        """
        role = self.config.kv_transfer.role
        if level != 0 and role is not KVRole.NONE:
            raise RuntimeError(
                f"an engine with kv_transfer.role={role.value} cannot sleep at level {level}: "
                "other engines read and write its KV cache; drain it and delete its pod instead"
            )
        return self._pause.sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """End a sleep, or restore only some of the parts that the sleep has stopped or freed.

        Args:
            tags: parts to restore: some of "weights", "kv_cache" and "scheduling". None: all of
                them.
        """
        self._pause.wake_up(tags)

    def is_sleeping(self) -> bool:
        return self._pause.sleep_level is not None

    def start_profile(self) -> None:
        """Start a torch profile on every worker. Raise RuntimeError if no folder is configured."""
        self._check_profiling()
        self.executor.collective_rpc("start_profile")

    def stop_profile(self) -> None:
        """End the torch profile on every worker and write the traces."""
        self._check_profiling()
        self.executor.collective_rpc("stop_profile")

    def _check_profiling(self) -> None:
        if not self.config.observability.profiler_dir:
            raise RuntimeError(
                "profiling is off: set observability.profiler_dir (--profiler-dir) to a folder for "
                "traces"
            )
