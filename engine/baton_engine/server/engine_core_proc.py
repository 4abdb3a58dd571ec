"""EngineCoreProc: runs an EngineCore as a process.

I/O thread (engine_io)       puts clients' messages into the input queue, and sends outputs
main thread                  loads the model, then loops: take inputs, run a step, send outputs
HTTP threads (admin_server)  put calls into the same input queue

The state is LOADING, then SERVING, then STOPPED. The first SIGTERM drains, and the second SIGTERM
ends all requests. In both cases, the exit code is 0. If a step fails or a worker dies, the state
becomes FAILED, all clients receive DEAD, and the exit code is 1.
"""

from __future__ import annotations

import enum
import gc
import logging
import queue
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import msgspec

from baton_engine.core.engine_core import EngineCore
from baton_engine.core.step_records import StepFailedError
from baton_engine.executor.base import Executor, WorkerDiedError, executor_name, load_executor_class
from baton_engine.metrics.engine_stats import EngineStats
from baton_engine.metrics.load_counter import COUNTER
from baton_engine.metrics.recent_maximum import RecentMaximum
from baton_engine.metrics.request_metrics import Histogram, RequestMetrics
from baton_engine.scheduling.scheduler_state import PauseState
from baton_engine.server import utility_calls
from baton_engine.server.access import Access
from baton_engine.server.admin_server import AdminCallPending, DrainStatus, ProbeResult
from baton_engine.server.engine_io import CLIENT_TIMEOUT_S, Abort, EngineIO, Input
from baton_engine.server.request_owners import RequestOwners
from baton_protocol.engine_messages import (
    PROTOCOL_VERSION,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    ErrorCode,
    Init,
    Pong,
    PrefillResult,
    UtilityOutput,
    UtilityRequest,
)
from baton_protocol.engine_messages import EngineCoreRequestType as RequestType
from baton_protocol.kv_compatibility import KVCompatibility
from baton_protocol.options.config import EngineConfig
from baton_protocol.process.health import Health

logger = logging.getLogger(__name__)

#: Maximum time that an idle loop waits for a message.
IDLE_INTERVAL_S = 1.0
#: Added to the executor's step timeout. The loop counts as stalled if a step exceeds the sum.
STUCK_MARGIN_S = 30.0
#: The loop counts as stalled if a utility call takes longer than this. wake_up may read weights.
CALL_STUCK_AFTER_S = 1800.0
#: Time that an HTTP request waits for the loop.
ADMIN_TIMEOUT_S = 10.0
#: Utility methods whose result is computed from the stats. The admin server runs them without the
#: loop.
FROM_STATS: dict[str, Callable[[EngineStats], bool]] = {
    "is_paused": lambda stats: stats.paused,
    "is_sleeping": lambda stats: stats.sleep_level is not None,
}
#: Maximum age of the KV connector's statistics while steps run.
CONNECTOR_STATS_INTERVAL_S = 1.0
#: Window of `Pong.longest_step_s`. A step counts for one to two windows after its end.
LONGEST_STEP_WINDOW_S = 600.0


class State(enum.Enum):
    """The state of the process. The value is the reason in health responses."""

    LOADING = "Loading"
    SERVING = "Serving"
    STOPPED = "Stopped"
    FAILED = "Failed"


class ShutdownKind(enum.IntEnum):
    """The requested shutdown: none, after a drain, or at once. The value never decreases."""

    NONE = 0
    #: Running requests may still complete, within `drain_timeout_s`.
    DRAIN = 1
    AT_ONCE = 2


@dataclass(slots=True)
class _LoopCall:
    """A function that the loop runs for another thread of this process."""

    run: Callable[[EngineCore], Any]
    future: Future[Any] = field(default_factory=Future)


class EngineCoreProc:
    """The engine process. The constructor binds the engine port.

    `run` loads the model and serves requests until shutdown.
    """

    def __init__(
        self,
        config: EngineConfig,
        host: str,
        *,
        client_timeout_s: float = CLIENT_TIMEOUT_S,
    ) -> None:
        """Bind the engine port.

        Raises:
            zmq.ZMQError: the engine port cannot be bound.
            ConfigurationError: the service key cannot be read.
        """
        self.access = Access.load(config.service_key_file)
        self.config = config
        self.idle_interval_s = IDLE_INTERVAL_S
        self.instance_id = uuid.uuid4().hex
        self.state = State.LOADING
        self.io = EngineIO(
            host,
            config.engine_port,
            self.instance_id,
            self._make_pong,
            access=self.access,
            client_timeout_s=client_timeout_s,
        )
        self.request_metrics = RequestMetrics()
        #: Pauses for commits of a topology, by kind of commit: see `topology_stats`. Empty for an
        #: engine outside an expert-parallel group.
        self.commit_pauses: dict[str, Histogram] = {}
        self._stats = EngineStats()
        #: Last time at which the engine was paused or asleep.
        self._suspended_at: float | None = None
        self._owners = RequestOwners(self.io.aborts)
        self._heartbeat = time.monotonic()
        #: Last time at which no request was unfinished, or unfinished requests could make progress.
        self._last_progress = self._heartbeat
        self._step_seconds = RecentMaximum(LONGEST_STEP_WINDOW_S)
        #: Whether the loop is running a utility call.
        self._in_call = False
        self._failure = ""
        #: The compatibility hash that was last sent to clients.
        self._hash_sent = ""
        #: None while the model loads, and for an engine that exchanges no KV blocks.
        self._kv: KVCompatibility | None = None
        self._drain_requested = False
        self._shutdown = ShutdownKind.NONE
        self._shutdown_deadline: float | None = None

    def run(self) -> int:
        """Load the model and serve until `request_shutdown`. Return the exit code.

        Raises:
            ConfigurationError: the model or the configuration cannot be served. Clients have
                received DEAD.
        """
        self.io.start()
        executor: Executor | None = None
        core: EngineCore | None = None
        try:
            executor = load_executor_class(executor_name(self.config))(
                self.config, self.instance_id, self.io.wake_engine
            )
            core = self._make_core(executor)
            self._kv = core.info.kv
            # The garbage collector need not visit objects that live until the end.
            gc.collect()
            gc.freeze()
            self._start_serving(core)
            self._run_busy_loop(core)
            self.state = State.STOPPED
            logger.info("the engine stopped")
            return 0
        except Exception as error:
            loading = self.state is State.LOADING
            is_explained = isinstance(error, StepFailedError)
            self._fail(str(error) if is_explained else f"{type(error).__name__}: {error}")
            if loading:
                raise
            logger.exception("the engine loop failed")
            return 1
        finally:
            if core is not None:
                core.shutdown()
            elif executor is not None:
                executor.shutdown()
            self.io.close()
            gc.unfreeze()

    def _make_core(self, executor: Executor) -> EngineCore:
        """Create the engine core, which loads the model. May take minutes."""
        return EngineCore(
            self.config,
            executor,
            take_aborts=self._owners.take_aborts,
            request_metrics=self.request_metrics,
            on_executor_failure=self._on_executor_failure,
        )

    def request_shutdown(self, how: ShutdownKind = ShutdownKind.DRAIN) -> None:
        """Make `run` shut the engine down and return. Callable from any thread or signal handler.

        Args:
            how: whether running requests may still complete. A later call can only make the
                shutdown faster.
        """
        self._shutdown = max(self._shutdown, how)
        self.io.wake_engine()

    def install_signal_handlers(self) -> None:
        """Install the handlers of SIGTERM and SIGINT.

        The first signal drains the engine. The second signal ends all requests at once. Both lead
        to exit code 0. The third signal kills the process. While the model loads, the first signal
        ends the process at once, with exit code 0.
        """

        def handle(signum: int, frame: FrameType | None) -> None:
            if self.state is State.LOADING:
                raise SystemExit(0)
            if self._shutdown is ShutdownKind.NONE:
                self.request_shutdown(ShutdownKind.DRAIN)
                return
            self.request_shutdown(ShutdownKind.AT_ONCE)
            # A third signal must end the process even if a step hangs.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)

        signal.signal(signal.SIGTERM, handle)
        signal.signal(signal.SIGINT, handle)

    # For the admin server's threads

    def health(self) -> ProbeResult:
        """Return the result of the liveness probe. If `ok` is False, only a restart helps."""
        silence = time.monotonic() - self._heartbeat
        if self.state is State.FAILED:
            return ProbeResult(False, Health("Failed", self._failure))
        transfer = self._stats.kv_transfer
        if transfer is not None and transfer.failure:
            return ProbeResult(False, Health("KVTransferFailed", transfer.failure))
        limit_s = (
            CALL_STUCK_AFTER_S
            if self._in_call
            else self.config.parallel.step_timeout_s + STUCK_MARGIN_S
        )
        if self.state is State.SERVING and silence > limit_s:
            message = f"the engine loop has not finished a step for {silence:.0f} s"
            return ProbeResult(False, Health("Stuck", message))
        if self.state is State.LOADING:
            message = f"loading {self.config.model.path}"
            return ProbeResult(True, Health("Loading", message, COUNTER.progress()))
        moved = transfer.bytes_moved if transfer is not None else {}
        message = f"instance {self.instance_id}"
        return ProbeResult(True, Health(self.state.value, message, kv=self._kv, kv_bytes=moved))

    def readiness(self) -> ProbeResult:
        """Return the result of the readiness probe: whether requests are accepted."""
        result = self._readiness()
        if self._suspended_at is None:
            return result
        resumed_s = time.monotonic() - self._suspended_at
        return result._replace(body=msgspec.structs.replace(result.body, resumed_s=resumed_s))

    def _readiness(self) -> ProbeResult:
        health = self.health()
        if not health.ok:
            return health
        if self.state is State.LOADING:
            return ProbeResult(False, Health("Loading", f"loading {self.config.model.path}"))
        if self.state is State.STOPPED or self._shutdown or self._stats.draining:
            message = f"{self._stats.num_unfinished} requests and transfers are unfinished"
            return ProbeResult(False, Health("Draining", message))
        if self._stats.sleep_level is not None:
            message = f"the engine sleeps at level {self._stats.sleep_level}; send POST /wake_up"
            return ProbeResult(False, Health("Asleep", message))
        if self._stats.paused:
            message = "the engine is paused; send POST /resume"
            return ProbeResult(False, Health("Paused", message))
        return ProbeResult(True, Health("Ready", f"instance {self.instance_id}"))

    def stats(self) -> EngineStats:
        """Return the engine's stats after the last step."""
        return self._stats

    def drain_status(self, *, start: bool) -> DrainStatus:
        """Return the state of the drain.

        Args:
            start: whether to start the drain first.

        Raises:
            TimeoutError: the loop does not answer.
        """
        if start:
            self._drain_requested = True
        if self.state is not State.SERVING:
            return DrainStatus(draining=self._drain_requested, unfinished=0)
        # GET /drain needs no service key, so it reads the last stats and uses no time of the loop.
        # A drain starts after the loop has handled the ADD messages that were queued before it, so
        # the stats count these requests.
        stats: EngineStats = self._run_in_loop(EngineCore.drain) if start else self._stats
        return DrainStatus(draining=stats.draining, unfinished=stats.num_unfinished)

    def run_admin_call(self, method: str, query: Mapping[str, Sequence[str]]) -> Any:
        """Run a utility method for the admin server, with arguments from a URL's query.

        Returns:
            The method's result, or `AdminCallPending` if its Future is not done within
            ADMIN_TIMEOUT_S.

        Raises:
            UtilityCallError: there is no such method, or its arguments are wrong.
            RuntimeError: the engine does not serve.
            TimeoutError: the loop does not answer. The call may still run.
            Exception: any exception of the method.
        """
        arguments = utility_calls.bind_query(method, query)
        if self.state is not State.SERVING:
            raise RuntimeError(f"the engine is not serving: {self.state.value}")
        if method in FROM_STATS:
            return FROM_STATS[method](self._stats)
        deadline = time.monotonic() + ADMIN_TIMEOUT_S
        result = self._run_in_loop(lambda core: getattr(core, method)(**arguments))
        if not isinstance(result, Future):
            return result
        wait_for_futures([result], timeout=max(0.0, deadline - time.monotonic()))
        if not result.done():
            return AdminCallPending()
        self._run_in_loop(lambda core: None)  # refreshes the stats
        return result.result()

    def _run_in_loop(self, run: Callable[[EngineCore], Any]) -> Any:
        """Run a function in the loop's thread, and return its result.

        Later calls of `stats` include the effect of the function.

        Raises:
            TimeoutError: the loop did not answer within ADMIN_TIMEOUT_S.
            Exception: any exception of the function.
        """
        call = _LoopCall(run)
        self.io.input_queue.put(Input(RequestType.UTILITY, payload=call))
        wait_for_futures([call.future], timeout=ADMIN_TIMEOUT_S)
        if not call.future.done():
            raise TimeoutError(f"the engine loop did not answer within {ADMIN_TIMEOUT_S:g} s")
        return call.future.result()

    def _send_init(self, core: EngineCore) -> None:
        self._hash_sent = core.info.compatibility_hash
        self.io.send_init(
            Init(
                PROTOCOL_VERSION,
                self.instance_id,
                self._hash_sent,
                self.config.kv_transfer.transport,
            )
        )

    # The loop

    def _start_serving(self, core: EngineCore) -> None:
        self._send_init(core)
        self._heartbeat = self._last_progress = time.monotonic()
        self._stats = core.get_stats()
        self.state = State.SERVING
        if self._drain_requested:
            core.drain()
        self._announce(core)

    def _announce(self, core: EngineCore) -> None:
        """Send READY, after which clients may send requests."""
        self.io.send_ready(core.ready)
        logger.info("instance %s serves on port %d", self.instance_id, self.io.port)

    def _run_busy_loop(self, core: EngineCore) -> None:
        busy = False
        while True:
            self._take_inputs(core, wait=not busy)
            if core.info.compatibility_hash != self._hash_sent:  # wake_up has loaded other weights
                self._send_init(core)
            if self._shutdown and self._advance_shutdown(core):
                return
            began = time.monotonic()
            busy = self._step(core)
            ended = time.monotonic()
            self._step_seconds.add(ended - began, ended)
            if events := core.take_kv_events():
                self.io.send_kv_events(events)
            # Reading the workers' counters delays steps in flight, but costs nothing when idle.
            self._update_stats(core, CONNECTOR_STATS_INTERVAL_S if busy else 0.0)
            self._heartbeat = time.monotonic()
            if not (self._stats.num_unfinished and _is_frozen(core, self._stats)):
                self._last_progress = self._heartbeat

    def _update_stats(self, core: EngineCore, max_connector_age_s: float) -> None:
        was_paused = self._stats.paused
        self._stats = core.recent_stats(max_connector_age_s=max_connector_age_s)
        # If only the previous stats report a pause, the call that resumed the engine just ended.
        if was_paused or self._stats.paused:
            self._suspended_at = time.monotonic()

    def _step(self, core: EngineCore) -> bool:
        """Run a step if there are requests. Return whether to run the next step at once."""
        if not core.has_requests:
            return False
        self._deliver(core.step_fn())
        return core.made_progress

    def _advance_shutdown(self, core: EngineCore) -> bool:
        """Start the drain, or check whether it is complete.

        At the drain timeout, after a second signal, or if a pause keeps all requests from running,
        the remaining requests end with the error DRAINING. The gateway continues these requests on
        other engines.

        Returns:
            Whether the process may stop.
        """
        now = time.monotonic()
        if self._shutdown_deadline is None:
            logger.info(
                "the engine shuts down: running requests may take %g s to end (--drain-timeout-s)",
                self.config.drain_timeout_s,
            )
            self._shutdown_deadline = now + self.config.drain_timeout_s
            core.drain()
        stats = core.recent_stats(max_connector_age_s=CONNECTOR_STATS_INTERVAL_S)
        if stats.num_unfinished == 0:
            return True
        frozen = _is_frozen(core, stats)
        if self._shutdown is ShutdownKind.DRAIN and now < self._shutdown_deadline and not frozen:
            return False
        if frozen:
            why = "paused"
        elif now < self._shutdown_deadline:
            why = "second signal"
        else:
            why = "drain timeout"
        logger.warning(
            "shutdown (%s): ending %d requests; the gateway continues them elsewhere",
            why,
            stats.num_requests_running + stats.num_requests_waiting,
        )
        core.fail_all(
            ErrorCode.DRAINING,
            "the engine shut down before the request ended; continue it elsewhere",
        )
        self._deliver(core.take_outputs())
        return True

    def _fail(self, reason: str) -> None:
        """Record a failure and send DEAD to all clients. Callable from any thread.

        Ignore later failures.
        """
        if self.state is not State.FAILED:
            self._failure = reason
            self.state = State.FAILED
            logger.error("the engine failed: %s", reason)
            self.io.send_dead(reason)

    def _on_executor_failure(self, reason: str) -> None:
        """Report the death of a worker to the clients and to the loop.

        The executor's thread calls this method and sends DEAD. The loop could not send DEAD while
        it waits for a step that never ends.
        """
        if self.state is State.SERVING:
            self._fail(reason)
        self.io.input_queue.put(Input(RequestType.EXECUTOR_FAILED, payload=reason))

    def _take_inputs(self, core: EngineCore, *, wait: bool) -> None:
        """Apply all messages in the input queue, and send the outputs that result.

        Args:
            wait: wait up to `idle_interval_s` for the first message.
        """
        try:
            message = (
                self.io.input_queue.get(timeout=self.idle_interval_s)
                if wait
                else self.io.input_queue.get_nowait()
            )
            while True:
                self._take_input(core, message)
                message = self.io.input_queue.get_nowait()
        except queue.Empty:
            pass
        self._deliver(core.take_outputs())

    def _take_input(self, core: EngineCore, message: Input) -> None:
        kind, client, payload, num_bytes = message
        self.io.bytes_taken += num_bytes
        if isinstance(payload, EngineCoreRequest):
            self._add_request(core, client, payload)
        elif isinstance(payload, Abort):
            core.abort_requests(self._owners.ids_to_abort(payload))
        elif isinstance(payload, PrefillResult):
            if self._owners.may_act_on(payload.request_id, client):
                core.add_prefill_result(payload)
        elif isinstance(payload, UtilityRequest):
            with self._calling():
                self._run_utility_call(core, client, payload)
        elif isinstance(payload, _LoopCall):
            with self._calling():
                try:
                    result = payload.run(core)
                    self._update_stats(core, CONNECTOR_STATS_INTERVAL_S)
                    payload.future.set_result(result)
                except Exception as error:
                    payload.future.set_exception(error)
        elif kind is RequestType.EXECUTOR_FAILED:
            raise WorkerDiedError(payload)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        self._in_call = True
        try:
            yield
        finally:
            self._in_call = False
            self._heartbeat = time.monotonic()

    def _run_utility_call(self, core: EngineCore, client: bytes, request: UtilityRequest) -> None:
        def send_result(result: Any, failure_message: str | None) -> None:
            output = UtilityOutput(request.call_id, failure_message, result)
            self.io.send_outputs(client, EngineCoreOutputs(utility_output=output))

        utility_calls.call(core, request.method, request.args, send_result)

    def _add_request(self, core: EngineCore, client: bytes, request: EngineCoreRequest) -> None:
        logger.debug(
            "request %s arrived with %d prompt tokens",
            request.request_id,
            len(request.prompt_token_ids),
        )
        refusal = core.add_request(request)
        if refusal is None:
            self._owners.add(request.request_id, client)
        else:
            logger.info("request %s refused: %s", request.request_id, refusal.error)
            self.io.send_outputs(client, EngineCoreOutputs([refusal]))

    def _deliver(self, outputs: list[EngineCoreOutput]) -> None:
        for client, client_outputs in self._owners.group_by_client(outputs):
            self.io.send_outputs(client, EngineCoreOutputs(client_outputs))

    def _make_pong(self) -> Pong:
        """Return a PONG with the engine's state and request counts, without sequence number.

        `EngineIO` sets the sequence number.
        """
        stats = self._stats
        return Pong(
            sequence=0,
            draining=stats.draining or self._drain_requested or bool(self._shutdown),
            num_running=stats.num_requests_running,
            num_waiting=stats.num_requests_waiting,
            kv_cache_usage=stats.kv_cache_usage,
            paused=stats.paused,
            asleep=bool(stats.sleep_level),
            stalled_s=time.monotonic() - self._last_progress,
            longest_step_s=self._step_seconds.value,
        )


def _is_frozen(core: EngineCore, stats: EngineStats) -> bool:
    """Return whether the engine is paused and none of its requests may run."""
    if core.pause_state is PauseState.PAUSED_NEW:
        return not (stats.num_requests_running or stats.num_requests_swapped)
    return core.pause_state is PauseState.PAUSED_ALL
