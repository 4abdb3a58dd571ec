"""Records of steps: durations, metrics, log lines, and crash dumps of steps that failed."""

from __future__ import annotations

import logging
import math
import time
from concurrent.futures import Future
from types import TracebackType
from typing import Self

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


class StepRecord:
    """Measures one step, and writes a crash dump if the step fails.

    The engine core starts a step in one `with` block of the record, and finishes the step in a
    second `with` block. If a block raises an exception, the record writes a crash dump and raises
    StepFailedError. Exceptions after which the engine can continue are raised unchanged. At the end
    of the block that sets `outputs`, the record adds the step to the metrics and the log.
    """

    __slots__ = (
        "_began",
        "_records",
        "num_decodes",
        "output",
        "outputs",
        "schedule_s",
        "started",
        "step",
    )

    #: Unset until the step is scheduled.
    step: SchedulerOutput
    #: Seconds that the scheduling of the step took.
    schedule_s: float
    #: `time.monotonic()` when the step was sent to the executor.
    started: float
    #: Output of the model.
    output: Future[ModelRunnerOutput]

    def __init__(self, records: StepRecords) -> None:
        self._records = records
        self._began = time.monotonic()
        #: Number of sequences that decode in the step, counted for the log.
        self.num_decodes = 0
        #: Outputs for clients. None until the scheduler is updated.
        self.outputs: list[EngineCoreOutput] | None = None

    def on_scheduled(self, step: SchedulerOutput) -> SchedulerOutput:
        """Record the scheduled step and the duration of scheduling. Return the step."""
        self.step = step
        self.started = time.monotonic()
        self.schedule_s = self.started - self._began
        return step

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._records.on_failure(getattr(self, "step", None), error)
        elif self.outputs is not None:
            self._records.add(self, self.outputs)


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

    def begin(self) -> StepRecord:
        """Return a new record for the step that the caller schedules next."""
        return StepRecord(self)

    def measure(self, record: StepRecord) -> None:
        """Pass the duration of a step to the scheduler.

        The duration ends now. It starts with the step's execution, or with the end of the previous
        step if that is later. If steps are logged, also count the sequences that decode in the
        step. Call this method when the step's output arrives, before
        `Scheduler.update_from_output`.
        """
        ended = time.monotonic()
        self._scheduler.observe_duration(
            record.step, ended - max(record.started, self._last_step_ended)
        )
        self._last_step_ended = ended
        if self._config.observability.log_iterations:
            record.num_decodes = self._scheduler.num_decodes(record.step)

    def add(self, record: StepRecord, outputs: list[EngineCoreOutput]) -> None:
        """Add a finished step and its outputs to the metrics. Call `measure` first.

        If `observability.log_iterations` is set and the step ran tokens, also log the step.
        """
        step = record.step
        self._request_metrics.on_step(step.total_num_scheduled_tokens, record.started)
        self._request_metrics.on_outputs(outputs)
        if self._config.observability.log_iterations and step.num_scheduled_tokens:
            update_s = time.monotonic() - self._last_step_ended
            stats = self._scheduler.stats()
            logger.info(
                "step %d: %d prefill tokens of %d requests, %d decode tokens; "
                "%d running, %d waiting, %.1f %% of KV blocks in use; "
                "schedule %.2f ms, model %.2f ms, update %.2f ms",
                step.step_id,
                step.total_num_scheduled_tokens - record.num_decodes,
                len(step.num_scheduled_tokens) - record.num_decodes,
                record.num_decodes,
                stats.num_requests_running,
                stats.num_requests_waiting,
                stats.kv_cache_usage * 100,
                record.schedule_s * 1e3,
                (self._last_step_ended - record.started) * 1e3,
                update_s * 1e3,
            )

    def on_failure(self, step: SchedulerOutput | None, error: BaseException) -> None:
        """Write a crash dump and raise StepFailedError.

        Do nothing if the type of `error` is in `survivable`, or is not a subclass of Exception (for
        example SystemExit).

        Args:
            step: the step that failed. None: scheduling failed.
            error: the exception that is being handled.
        """
        if not isinstance(error, Exception) or isinstance(error, self._survivable):
            return
        path = write_crash_dump(self._config, step, self._stats_or_none(), error)
        what = f"step {step.step_id}" if step is not None else "scheduling"
        where = f"; the crash dump is {path}" if path is not None else ""
        raise StepFailedError(f"{what} failed: {type(error).__name__}: {error}{where}") from error

    def _stats_or_none(self) -> EngineStats | None:
        try:
            return self._scheduler.stats()
        except Exception:  # the scheduler may be what failed
            return None
