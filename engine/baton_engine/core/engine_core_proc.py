"""EngineCoreProc: an EngineCore as a process. Sockets first, then the model, then the busy loop until it is told to end.

    I/O thread (engine_io)  --input_queue-->  main thread: load, then loop {inputs, step}  --outbox-->  I/O thread
    HTTP thread (admin_server)  --calls on the same input queue-->

Life: LOADING -> SERVING -> (SIGTERM: drain) -> STOPPED, exit 0; or FAILED, with DEAD to all clients and exit 1.
"""

from __future__ import annotations

import enum
import inspect
import logging
import queue
import signal
import time
import typing
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import msgspec

from baton_engine.core.admin_server import Condition, DrainStatus
from baton_engine.core.engine_core import EngineCore
from baton_engine.core.engine_io import CLIENT_TIMEOUT_S, Abort, EngineIO, Input
from baton_engine.core.stats import EngineStats
from baton_engine.executor.base import Executor, executor_name, load_executor_class
from baton_engine.protocol.config import EngineConfig
from baton_engine.protocol.messages import (
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
from baton_engine.protocol.messages import EngineCoreRequestType as RequestType

logger = logging.getLogger(__name__)

UTILITIES = frozenset({"drain", "get_stats", "reset_prefix_cache"})
"""Methods of EngineCore that clients may call."""
IDLE_INTERVAL_S = 1.0
STUCK_AFTER_S = 120.0
"""The loop counts as stuck when a step takes longer."""
ADMIN_TIMEOUT_S = 10.0


class State(enum.Enum):
    LOADING = "Loading"
    SERVING = "Serving"
    STOPPED = "Stopped"
    FAILED = "Failed"


@dataclass(slots=True)
class _LocalCall:
    """Something another thread of this process wants from the loop."""

    run: Callable[[EngineCore], Any]
    future: Future[Any] = field(default_factory=Future)


class EngineCoreProc:
    """One per process. The constructor binds; `run` loads and serves in the calling thread."""

    def __init__(
        self,
        config: EngineConfig,
        host: str,
        *,
        client_timeout_s: float = CLIENT_TIMEOUT_S,
    ) -> None:
        """
        Raises:
            zmq.ZMQError: the engine port cannot be bound.
        """
        self.config = config
        self.instance_id = uuid.uuid4().hex
        self.state = State.LOADING
        self.io = EngineIO(host, config.engine_port, self.instance_id, self._load, client_timeout_s=client_timeout_s)
        self._stats = EngineStats()
        self._owners: dict[str, bytes] = {}
        """Client of each unfinished request."""
        self._heartbeat = time.monotonic()
        self._failure = ""
        self._drain_requested = False
        self._shutdown_requested = False
        self._shutdown_deadline: float | None = None

    def run(self) -> int:
        """Loads the model and serves until `request_shutdown`. Returns the exit code.

        Raises:
            ConfigurationError: the model or the configuration cannot be served; clients have been told.
        """
        self.io.start()
        executor: Executor | None = None
        try:
            executor = load_executor_class(executor_name(self.config))(
                self.config, self.instance_id, self.io.wake_engine
            )
            core = EngineCore(self.config, executor, take_aborts=self._take_aborts)
            self._start_serving(core)
            self._run_busy_loop(core)
            self.state = State.STOPPED
            logger.info("engine stopped")
            return 0
        except Exception as error:
            loading = self.state is State.LOADING
            self._failure = f"{type(error).__name__}: {error}"
            self.state = State.FAILED
            self.io.send_dead(self._failure)
            if loading:
                raise
            logger.exception("the engine loop failed")
            return 1
        finally:
            if executor is not None:
                executor.shutdown()
            self.io.close()

    def request_shutdown(self) -> None:
        """Drain for `drain_timeout_s` at most, then end. From any thread, and from signal handlers; idempotent."""
        self._shutdown_requested = True
        self.io.wake_engine()

    def install_signal_handlers(self) -> None:
        """SIGTERM and SIGINT: drain, then exit 0. While the model loads: exit 0 at once."""

        def handle(signum: int, frame: FrameType | None) -> None:
            if self.state is State.LOADING:
                raise SystemExit(0)
            self.request_shutdown()

        signal.signal(signal.SIGTERM, handle)
        signal.signal(signal.SIGINT, handle)

    # For the admin server's threads

    def health(self) -> Condition:
        """Whether the process can still do its work; if not, only a restart helps."""
        silence = time.monotonic() - self._heartbeat
        if self.state is State.FAILED:
            return Condition(False, "Failed", self._failure)
        transfer = self._stats.kv_transfer
        if transfer is not None and transfer.failure:
            return Condition(False, "KVTransferFailed", transfer.failure)
        if self.state is State.SERVING and silence > STUCK_AFTER_S:
            return Condition(False, "Stuck", f"the engine loop has not finished a step for {silence:.0f} s")
        return Condition(True, self.state.value, f"instance {self.instance_id}")

    def readiness(self) -> Condition:
        """Whether requests are accepted."""
        health = self.health()
        if not health.ok:
            return health
        if self.state is State.LOADING:
            return Condition(False, "Loading", f"loading {self.config.model.path}")
        if self.state is State.STOPPED or self._shutdown_requested or self._stats.draining:
            return Condition(False, "Draining", f"{self._stats.num_unfinished} requests and transfers are unfinished")
        return Condition(True, "Ready", f"instance {self.instance_id}")

    def stats(self) -> EngineStats:
        """As of the last step."""
        return self._stats

    def drain_status(self, *, start: bool) -> DrainStatus:
        """Starts draining if asked to. Raises TimeoutError if the loop does not answer."""
        if start:
            self._drain_requested = True
        if self.state is not State.SERVING:
            return DrainStatus(draining=self._drain_requested, unfinished=0)
        # Asked of the loop itself: ADDs that wait in the input queue must be counted, or refused.
        call = _LocalCall(EngineCore.drain if start else EngineCore.get_stats)
        self.io.input_queue.put(Input(RequestType.UTILITY, payload=call))
        try:
            stats: EngineStats = call.future.result(timeout=ADMIN_TIMEOUT_S)
        except TimeoutError:
            raise TimeoutError(f"the engine loop did not answer within {ADMIN_TIMEOUT_S:g} s") from None
        return DrainStatus(draining=stats.draining, unfinished=stats.num_unfinished)

    # The loop

    def _start_serving(self, core: EngineCore) -> None:
        self.io.send_init(Init(PROTOCOL_VERSION, self.instance_id, core.info.compatibility_hash))
        self._heartbeat = time.monotonic()
        self._stats = core.get_stats()
        self.state = State.SERVING
        if self._drain_requested:
            core.drain()
        self.io.send_ready(core.ready)
        logger.info("instance %s serves on port %d", self.instance_id, self.io.port)

    def _run_busy_loop(self, core: EngineCore) -> None:
        busy = False
        while True:
            self._take_inputs(core, wait=not busy)
            if self._shutdown_requested and self._may_stop(core):
                return
            busy = False
            if core.scheduler.has_work:
                self._deliver(core.step())
                busy = core.scheduler.made_progress
            self._stats = core.get_stats()
            self._heartbeat = time.monotonic()

    def _may_stop(self, core: EngineCore) -> bool:
        """Drains; at the deadline ends what is left in a way that sends it to another pod."""
        if self._shutdown_deadline is None:
            logger.info("shutting down: draining for %g s at most", self.config.drain_timeout_s)
            self._shutdown_deadline = time.monotonic() + self.config.drain_timeout_s
            core.drain()
        if core.get_stats().num_unfinished == 0:
            return True
        if time.monotonic() < self._shutdown_deadline:
            return False
        logger.warning("drain timeout: ending %d requests", len(core.scheduler.requests))
        core.scheduler.fail_all(
            ErrorCode.DRAINING, "the engine shut down before the request ended; continue it elsewhere"
        )
        self._deliver(core.scheduler.take_outputs())
        return True

    def _take_inputs(self, core: EngineCore, *, wait: bool) -> None:
        """Takes in all messages there are; waits for one, at most IDLE_INTERVAL_S, if the loop has nothing else to do."""
        try:
            message = self.io.input_queue.get(timeout=IDLE_INTERVAL_S) if wait else self.io.input_queue.get_nowait()
            while True:
                self._take_input(core, message)
                message = self.io.input_queue.get_nowait()
        except queue.Empty:
            pass
        self._deliver(core.scheduler.take_outputs())

    def _take_input(self, core: EngineCore, message: Input) -> None:
        kind, client, payload = message
        if isinstance(payload, EngineCoreRequest):
            self._add_request(core, client, payload)
        elif isinstance(payload, Abort):
            payload.done = True
            core.abort_requests(self._owned_ids(payload))
        elif isinstance(payload, PrefillResult):
            if self._owners.get(payload.request_id, client) == client:
                core.add_prefill_result(payload)
        elif isinstance(payload, UtilityRequest):
            self.io.send_outputs(client, EngineCoreOutputs(utility_output=_call_utility(core, payload)))
        elif isinstance(payload, _LocalCall):
            payload.future.set_result(payload.run(core))
        elif kind is RequestType.EXECUTOR_FAILED:
            raise RuntimeError(payload)

    def _add_request(self, core: EngineCore, client: bytes, request: EngineCoreRequest) -> None:
        logger.debug("request %s: %d prompt tokens", request.request_id, len(request.prompt_token_ids))
        refusal = core.add_request(request)
        if refusal is None:
            self._owners[request.request_id] = client
        else:
            logger.info("request %s refused: %s", request.request_id, refusal.error)
            self.io.send_outputs(client, EngineCoreOutputs([refusal]))

    def _take_aborts(self) -> Iterable[str]:
        """The fast path: aborts that came while the model ran."""
        request_ids: list[str] = []
        while True:
            try:
                abort = self.io.aborts.get_nowait()
            except queue.Empty:
                return request_ids
            if not abort.done:
                request_ids += self._owned_ids(abort)

    def _owned_ids(self, abort: Abort) -> list[str]:
        """Ids of the abort that its client may end. Ids of ended requests pass: their transfer may still be given up."""
        if abort.request_ids is None:
            return [request_id for request_id, owner in self._owners.items() if owner == abort.client]
        return [id_ for id_ in abort.request_ids if self._owners.get(id_, abort.client) == abort.client]

    def _deliver(self, outputs: list[EngineCoreOutput]) -> None:
        by_client: dict[bytes, list[EngineCoreOutput]] = {}
        for output in outputs:
            client = self._owners.get(output.request_id)
            if client is None:
                continue
            if output.finished:
                del self._owners[output.request_id]
                logger.debug("request %s ended: %s %s", output.request_id, output.finish_reason, output.error)
            by_client.setdefault(client, []).append(output)
        for client, client_outputs in by_client.items():
            self.io.send_outputs(client, EngineCoreOutputs(client_outputs))

    def _load(self) -> Pong:
        stats = self._stats
        return Pong(
            sequence=0,
            draining=stats.draining or self._drain_requested or self._shutdown_requested,
            num_running=stats.num_requests_running,
            num_waiting=stats.num_requests_waiting,
            kv_cache_usage=stats.kv_cache_usage,
        )


def _call_utility(core: EngineCore, request: UtilityRequest) -> UtilityOutput:
    """Calls an allowed method with its arguments converted to their annotated types."""
    if request.method not in UTILITIES:
        message = f"there is no utility method {request.method!r}; there are {', '.join(sorted(UTILITIES))}"
        return UtilityOutput(request.call_id, failure_message=message)
    method = getattr(core, request.method)
    hints = typing.get_type_hints(method)
    names = list(inspect.signature(method).parameters)
    if len(request.args) != len(names):
        message = f"{request.method} takes {len(names)} arguments, got {len(request.args)}"
        return UtilityOutput(request.call_id, failure_message=message)
    try:
        args = [msgspec.convert(value, hints[name]) for name, value in zip(names, request.args, strict=True)]
    except msgspec.ValidationError as error:
        return UtilityOutput(request.call_id, failure_message=f"{request.method}: {error}")
    return UtilityOutput(request.call_id, result=method(*args))
