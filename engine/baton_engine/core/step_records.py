"""Records of steps: durations, metrics, log lines, and crash dumps of steps that failed."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from baton_engine.core.crash_dump import write_crash_dump
from baton_engine.executor.step import ModelRunnerOutput, SchedulerOutput
from baton_engine.metrics.engine_stats import EngineStats
from baton_engine.metrics.request_metrics import RequestMetrics
from baton_engine.scheduling.scheduler import Scheduler
from baton_protocol.engine_messages import EngineCoreOutput
from baton_protocol.options.config import EngineConfig

logger = logging.getLogger(__name__)


class StepFailedError(RuntimeError):
    """A step failed and the engine cannot continue.

    The message gives the reason and, if a crash dump was written, the path of the dump.
    """


@dataclass(slots=True)
class StepInFlight:
    """A step that has started and has not finished."""

    step: SchedulerOutput
    output: Future[ModelRunnerOutput]
    #: Seconds that the scheduling of the step took.
    schedule_s: float
    #: `time.monotonic()` when the step was sent to the executor.
    started: float
    #: Number of sequences that decode in the step. `StepRecords.measure` counts them for the log.
    num_decodes: int = 0


class StepRecords:
    """Measures steps, adds them to the metrics and to the log, and writes crash dumps."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        request_metrics: RequestMetrics,
        survivable: tuple[type[Exception], ...],
    ) -> None:
        """Create the records of an engine that has not run a step.

        Args:
            config: configuration of the engine.
            scheduler: receives the duration of each step.
            request_metrics: receives the size and the outputs of each step.
            survivable: exceptions of a step after which the engine continues.
        """
        self._config = config
        self._scheduler = scheduler
        self._request_metrics = request_metrics
        self._survivable = survivable
        self._last_step_ended = -math.inf

    def measure(self, in_flight: StepInFlight) -> None:
        """Pass the duration of a step to the scheduler, and count its decodes for the log.

        Call this when the result arrives, before `Scheduler.update_from_output`.
        """
        ended = time.monotonic()
        self._scheduler.observe_duration(
            in_flight.step, ended - max(in_flight.started, self._last_step_ended)
        )
        self._last_step_ended = ended
        if self._config.observability.log_iterations:
            in_flight.num_decodes = self._scheduler.num_decodes(in_flight.step)

    def record(self, in_flight: StepInFlight, outputs: list[EngineCoreOutput]) -> None:
        """Add a finished step, which `measure` has measured, and its outputs to the metrics.

        Log the step if `observability.log_iterations` is set.
        """
        step = in_flight.step
        self._request_metrics.on_step(step.total_num_scheduled_tokens, in_flight.started)
        self._request_metrics.on_outputs(outputs)
        if self._config.observability.log_iterations and step.num_scheduled_tokens:
            update_s = time.monotonic() - self._last_step_ended
            stats = self._scheduler.stats()
            logger.info(
                "step %d: %d prefill tokens of %d requests, %d decode tokens; "
                "%d running, %d waiting, %.1f %% of KV blocks in use; "
                "schedule %.2f ms, model %.2f ms, update %.2f ms",
                step.step_id,
                step.total_num_scheduled_tokens - in_flight.num_decodes,
                len(step.num_scheduled_tokens) - in_flight.num_decodes,
                in_flight.num_decodes,
                stats.num_requests_running,
                stats.num_requests_waiting,
                stats.kv_cache_usage * 100,
                in_flight.schedule_s * 1e3,
                (self._last_step_ended - in_flight.started) * 1e3,
                update_s * 1e3,
            )

    @contextmanager
    def dump_on_failure(self, step: SchedulerOutput | None) -> Iterator[None]:
        """If the `with` block fails, write a crash dump and raise StepFailedError.

        Survivable exceptions pass unchanged.

        Args:
            step: the step that runs. None: a step is being scheduled.
        """
        try:
            yield
        except self._survivable:
            raise
        except Exception as error:
            path = write_crash_dump(self._config, step, self._stats_or_none(), error)
            what = f"step {step.step_id}" if step is not None else "scheduling"
            where = f"; the crash dump is {path}" if path is not None else ""
            raise StepFailedError(
                f"{what} failed: {type(error).__name__}: {error}{where}"
            ) from error

    def _stats_or_none(self) -> EngineStats | None:
        try:
            return self._scheduler.stats()
        except Exception:  # the scheduler may be what failed
            return None
