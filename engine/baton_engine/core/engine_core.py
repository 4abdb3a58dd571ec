"""EngineCore takes requests as token ids and runs steps: schedule, execute, sample, update.

`step` starts a step and waits for its output. With pipeline stages or asynchronous scheduling, an
executor holds several steps at once. The caller then uses `step_with_batch_queue`, which starts a
step and waits only for the output of the oldest step. So the engine schedules a step while earlier
steps run. A StepRecord measures each step, and writes a crash dump if the step fails.

This module uses no sockets and no processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from baton_engine.core.pause import PauseControl
from baton_engine.core.request_validation import validate_request
from baton_engine.core.scheduler_setup import make_scheduler
from baton_engine.core.step_records import StepRecord, StepRecords
from baton_engine.core.utility_methods import UtilityMethods
from baton_engine.executor.base import Executor
from baton_engine.executor.step import ModelRunnerOutput
from baton_engine.executor.step_waiter import StepWaiter
from baton_engine.grammar.structured_output import StructuredOutputManager
from baton_engine.metrics.request_metrics import RequestMetrics
from baton_engine.scheduling.request_limits import RequestRefusedError, refusal_of
from baton_engine.scheduling.scheduler_state import PauseState
from baton_protocol.engine_messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    ErrorCode,
    KVEvent,
    PrefillResult,
    Ready,
)
from baton_protocol.options.config import EngineConfig, container_path


class EngineCore(UtilityMethods):
    """The engine without sockets and processes. Only one thread may use it.

    The caller adds requests, calls `step_fn` while `has_requests` is true, and delivers the outputs
    that `step_fn` returns. `pause` and `sleep` may return a Future, which is resolved during a
    later method call.
    """

    #: Exceptions of a step after which the engine continues.
    survivable: tuple[type[Exception], ...] = ()

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        take_aborts: Callable[[], Iterable[str]] = lambda: (),
        request_metrics: RequestMetrics | None = None,
        on_executor_failure: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Initialize the executor: load the model and allocate the KV cache. May take minutes.

        Args:
            config: configuration of the engine.
            executor: runs the model. The executor must not be initialized yet.
            take_aborts: returns the ids of requests that clients have aborted since the last call.
                Called after each run of the model, so that no tokens are sent to a client that has
                just disconnected.
            request_metrics: receives latencies and numbers of tokens of requests. None: these
                metrics are not exported.
            on_executor_failure: called with the reason, from any thread, when a worker process dies
                or a step takes longer than `parallel.step_timeout_s`.

        Raises:
            ConfigurationError: the model or the configuration cannot be served.
        """
        self.config = config
        self.executor = executor
        self.request_metrics = request_metrics or RequestMetrics()
        self._take_aborts = take_aborts
        self._waiter = StepWaiter(executor, config.parallel.step_timeout_s, on_executor_failure)
        self.info = executor.initialize()
        self._structured_output = StructuredOutputManager(
            container_path(config.model.path),
            self.info.vocab_size,
            self.info.eos_token_ids,
            executor.wakeup,
        )
        self.scheduler = make_scheduler(config, self.info, self._structured_output)
        self._records = StepRecords(config, self.scheduler, self.request_metrics, self.survivable)
        #: Whether to call `step_fn` again without waiting for messages. True if another step must
        #: follow, or if the last step ran tokens, changed requests or carried connector metadata.
        self.made_progress = False
        #: `step`, or `step_with_batch_queue` if several steps may be in flight.
        self.step_fn = (
            self.step if executor.max_concurrent_batches == 1 else self.step_with_batch_queue
        )
        #: Records of the steps that have started and have not finished, oldest first.
        self._in_flight: deque[StepRecord] = deque()
        #: Outputs that `take_outputs` has not returned yet.
        self._outputs: list[EngineCoreOutput] = []
        self._pause = PauseControl(self)

    @property
    def ready(self) -> Ready:
        return Ready(
            self.scheduler.state.max_model_len,
            task=self.info.task,
            pair_format=self.info.pair_format,
        )

    @property
    def has_requests(self) -> bool:
        """Whether requests, KV transfers, steps in flight or outputs remain."""
        return self.scheduler.has_work or bool(self._in_flight or self._outputs)

    @property
    def pause_state(self) -> PauseState:
        return self.scheduler.pause_state

    # Steps

    def step(self) -> list[EngineCoreOutput]:
        """Run a step to its end, and return the outputs for clients."""
        runs = self._can_start
        if runs:
            self._start_step()
            self._finish_oldest()
            self._pause.advance()
        return self._end_step(runs, must_continue=False)

    def step_with_batch_queue(self) -> list[EngineCoreOutput]:
        """Start a step if possible, finish the oldest step in flight and return the outputs.

        If a step was started and there is room for another, the call does not wait for a step that
        still runs. The next call can then start another step.

        The scheduler decides which requests may be in two steps at once, see `RunAhead`.
        """
        started = self._can_start and self._start_step()
        runs = bool(self._in_flight)
        if runs and not (started and self._has_room and self._oldest_runs):
            self._finish_oldest()
            self._pause.advance()
        return self._end_step(runs, must_continue=bool(self._in_flight))

    def _start_step(self) -> bool:
        """Schedule a step, and start its execution without waiting for the output.

        The output of a step without content only reports ended KV transfers. Such a step is not
        executed if another step is in flight, because the other step's output reports the same.

        Returns:
            Whether the step has content: work for the model runner, or metadata for the connector.
        """
        with self._records.begin() as record:
            step = record.on_scheduled(self.scheduler.schedule())
            has_content = bool(step.reaches_model_runner or step.connector)
            if has_content or not self._in_flight:
                self.executor.execute_model(step)
                grammar = self.scheduler.grammar_output(step)  # while the model runs
                record.output = self.executor.sample_tokens(grammar)
                self._in_flight.append(record)
        return has_content

    def finish_steps(self) -> None:
        """Wait for all steps in flight. `take_outputs()` then returns their outputs."""
        while self._in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Wait for the output of the oldest step, and update the scheduler with it."""
        with self._in_flight.popleft() as record:
            self._update(record, self._waiter.wait(record.output))

    def _update(self, record: StepRecord, output: ModelRunnerOutput) -> None:
        """Abort requests that clients aborted during the step, then apply the step's output."""
        self._records.measure(record)
        self.scheduler.abort_requests(self._take_aborts())
        record.outputs = self.scheduler.update_from_output(record.step, output)
        self._outputs += record.outputs

    def _end_step(self, has_run: bool, *, must_continue: bool) -> list[EngineCoreOutput]:
        """Set `made_progress`, and return the outputs for clients.

        Args:
            has_run: whether the current call of `step_fn` has started or finished a step.
            must_continue: whether `step_fn` must be called again even if the scheduler made no
                progress in the last step.
        """
        self.made_progress = has_run and (self.scheduler.made_progress or must_continue)
        return self.take_outputs()

    @property
    def _has_room(self) -> bool:
        """Whether one more step may be in flight."""
        return len(self._in_flight) < self.executor.max_concurrent_batches

    @property
    def _can_start(self) -> bool:
        """Whether a step may start now."""
        return self.scheduler.has_work and self._has_room and not self._pause.memory_dropped

    @property
    def _oldest_runs(self) -> bool:
        """Whether the workers have not returned the output of the oldest step in flight yet."""
        return not self._in_flight[0].output.done()

    # Requests

    def add_request(self, request: EngineCoreRequest) -> EngineCoreOutput | None:
        """Queue a request. Return None if it was accepted, otherwise the output that refuses it."""
        try:
            validate_request(
                request,
                vocab_size=self.info.vocab_size,
                kv_role=self.config.kv_transfer.role,
                data_parallel_rank=self.ready.data_parallel_rank,
                task=self.info.task,
                vector_size=self.info.vector_size,
            )
            self.scheduler.add_request(request)
        except ValueError as error:
            refusal = refusal_of(request, ErrorCode.INVALID, str(error))
        except RequestRefusedError as error:
            refusal = refusal_of(request, error.code, str(error))
        else:
            self.request_metrics.on_add(request)
            return None
        self.scheduler.forget_refused(request.request_id)
        return refusal

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End these requests as aborted. Unknown ids are ignored."""
        self.scheduler.abort_requests(request_ids)
        self._collect_outputs()
        self._pause.advance()

    def fail_all(self, code: ErrorCode, message: str) -> None:
        """End all requests with an error."""
        self.scheduler.fail_all(code, message)
        self._collect_outputs()

    def add_prefill_result(self, result: PrefillResult) -> None:
        """Pass the result of a request's prefill stage to the scheduler.

        A result with token ids outside the vocabulary is replaced by an error of the prefill stage.
        """
        if result.token_ids and not all(
            0 <= token_id < self.info.vocab_size for token_id in result.token_ids
        ):
            result = PrefillResult(
                result.request_id,
                [],
                f"the prefill engine sampled token ids {result.token_ids}, outside the vocabulary "
                f"of {self.info.vocab_size}; do both engines serve the same model?",
            )
        self.scheduler.add_prefill_result(result)
        self._collect_outputs()

    def take_outputs(self) -> list[EngineCoreOutput]:
        """Return all outputs that no earlier call has returned."""
        self._collect_outputs()
        outputs, self._outputs = self._outputs, []
        return outputs

    def _collect_outputs(self) -> None:
        """Append to `_outputs` the outputs that the scheduler produced between steps."""
        outputs = self.scheduler.take_outputs()
        if outputs:
            self.request_metrics.on_outputs(outputs)
            self._outputs += outputs

    def take_kv_events(self) -> list[KVEvent]:
        """Return the changes of the prefix cache since the last call.

        The list is empty unless `cache.enable_kv_events` is set.
        """
        return self.scheduler.state.kv.take_events()

    def shutdown(self) -> None:
        """End workers and threads. Idempotent."""
        self._structured_output.shutdown()
        self.executor.shutdown()
