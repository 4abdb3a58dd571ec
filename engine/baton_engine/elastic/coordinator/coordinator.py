"""The coordinator's process: a ROUTER for the ranks, the controller, and HTTP.

A rank sends its Status from a DEALER as one frame of MessagePack, and the reply is a Directive in
one frame. The instance id in the Status identifies a rank, because a rank that reconnects has a new
connection. The coordinator stores nothing, because ranks report all of its state.
"""

from __future__ import annotations

import logging
import secrets
import signal
import threading
import time

import msgspec
import zmq

from baton_engine.bounded_log import SparseLog
from baton_engine.elastic.coordinator.controller_config import ControllerConfig
from baton_engine.elastic.coordinator.coordinator_http import CoordinatorServer
from baton_engine.elastic.coordinator.coordinator_metrics import CoordinatorMetrics
from baton_engine.elastic.coordinator.topology_controller import TopologyController
from baton_engine.elastic.coordinator.topology_validation import (
    OperationRefusal,
    check_status,
    truncate_failure,
)
from baton_engine.wake_pipe import WakePipe
from baton_protocol.service_key import (
    AdminRequest,
    ServiceKey,
    count_refused,
    watch_handshakes,
)
from baton_protocol.topology import Directive, Status, TopologyRequest, TopologyStatus

logger = logging.getLogger(__name__)

#: Maximum time between two turns of the loop, so that deadlines are checked in time.
TICK_MS = 50
#: Time without a turn of the loop after which GET /health answers 503.
UNRESPONSIVE_AFTER_S = 5.0
#: Maximum number of queued directives for a rank that does not read. Later directives are dropped.
#: The next status of the rank is answered with a new directive.
HIGH_WATER_MARK = 64
#: After SIGTERM: time in which ranks that are deleted together with the coordinator can report that
#: they are leaving.
LINGER_S = 2.0
#: Maximum size of a status. Larger messages close the connection. A decoded status takes up to 30
#: times the memory of its message.
MAX_MESSAGE_BYTES = 8 * 2**20
#: Maximum number of messages to read before the ranks are answered, so that one sender cannot block
#: other senders.
MAX_MESSAGES_PER_TURN = 1024
#: Limit of registered processes.
MAX_RANKS = 2**12


class Coordinator:
    """The coordinator process of one expert-parallel group. `run` is its loop.

    HTTP threads call the `TopologyAdmin` methods.
    """

    def __init__(
        self,
        host: str,
        port: int,
        http_port: int,
        config: ControllerConfig,
        key: ServiceKey | None = None,
    ) -> None:
        """Bind the port for ranks and the port for HTTP.

        Args:
            host: address to bind.
            port: port for the ranks. 0: any free port.
            http_port: port for HTTP. 0: any free port.
            config: deadlines and thresholds.
            key: key of the service. Ranks need the key to connect, and HTTP clients need it to
                change the topology. None: no authentication.

        Raises:
            zmq.ZMQError: the address for ranks cannot be bound.
            OSError: the address for HTTP cannot be bound.
        """
        self.metrics = CoordinatorMetrics()
        self._key = key
        #: Guards the controller.
        self._lock = threading.Lock()
        self._controller = TopologyController(lambda: secrets.token_hex(8), config)
        self._router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._router.setsockopt(zmq.IPV6, ":" in host)
        if key is not None:
            key.protect_server(self._router)
        self._handshakes = watch_handshakes(self._router)
        address = f"[{host}]" if ":" in host else host
        try:
            self._router.bind(f"tcp://{address}:{port or '*'}")
            self._server = CoordinatorServer(host, http_port, self)
        except (OSError, zmq.ZMQError):
            self._close_sockets()
            raise
        self.port = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.http_port = self._server.port
        self._wake_pipe = WakePipe()
        self._decoder = msgspec.msgpack.Decoder(Status)
        self._encoder = msgspec.msgpack.Encoder()
        #: ZMQ identity of the connection, by instance id.
        self._routes: dict[str, bytes] = {}
        self._sent: dict[str, Directive] = {}
        self._stopped_at: float | None = None
        self._last_tick = time.monotonic()
        self._bad_messages = SparseLog(logger)
        self._refusals = SparseLog(logger)

    # Called by the HTTP server's threads

    def admits(self, authorization: str | None, request: AdminRequest) -> bool:
        admitted = self._key is None or self._key.admits(authorization, request)
        if not admitted:
            self.metrics.refused.labels("http").inc()
        return admitted

    def topology(self) -> TopologyStatus:
        with self._lock:
            return self._controller.status(time.monotonic())

    def request_topology(self, request: TopologyRequest) -> OperationRefusal | None:
        with self._lock:
            refusal = self._controller.on_request(request)
        self._wake_pipe.wake()
        return refusal

    def request_rebalance(self) -> None:
        with self._lock:
            self._controller.on_rebalance()
        self._wake_pipe.wake()

    def metrics_text(self) -> bytes:
        with self._lock:
            imbalance = self._controller.imbalance
        return self.metrics.text(self.topology(), imbalance)

    def is_healthy(self) -> bool:
        return time.monotonic() - self._last_tick < UNRESPONSIVE_AFTER_S

    # The loop

    def run(self) -> int:
        """Run the loop until it ends after a call of `stop`. Return the exit code 0.

        After `stop`, the loop ends as soon as no rank serves. LINGER_S seconds after `stop`, the
        loop also ends if any serving rank is not shutting down.
        """
        self._server.start()
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_pipe.reader, zmq.POLLIN)
        try:
            while not self._is_done():
                poller.poll(TICK_MS)
                self._wake_pipe.clear()
                self._turn()
        finally:
            self._close_sockets()
        return 0

    def stop(self) -> None:
        """Request the end of the loop. Any thread and any signal handler may call this method."""
        self._stopped_at = time.monotonic()
        self._wake_pipe.wake()

    def install_signal_handlers(self) -> None:
        """Stop on the first SIGTERM or SIGINT. The second signal ends the process at once."""

        def stop_once(*_: object) -> None:
            self.stop()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop_once)

    def _close_sockets(self) -> None:
        self._router.disable_monitor()
        self._handshakes.close()
        self._router.close()

    def _is_done(self) -> bool:
        if self._stopped_at is None:
            return False
        with self._lock:
            leaving = self._controller.leaving()
        lingers = time.monotonic() - self._stopped_at < LINGER_S
        return not leaving or not (all(leaving) or lingers)

    def _turn(self) -> None:
        """Read the waiting statuses, advance the controller, and send directives.

        Statuses are read first. Otherwise, a slow coordinator could declare a rank dead although
        its status has arrived.
        """
        reported = set()
        self._count_refused_connections()
        with self._lock:
            for _ in range(MAX_MESSAGES_PER_TURN):
                status = self._receive()
                if status is None:
                    break
                if isinstance(status, Status):
                    self._controller.on_status(status, time.monotonic())
                    reported.add(status.member.instance_id)
            now = self._last_tick = time.monotonic()
            for ended in self._controller.tick(now):
                self.metrics.on_ended(ended)
            self._routes = {
                each: route
                for each, route in self._routes.items()
                if self._controller.is_registered(each)
            }
            directives = {each: self._controller.directive_for(each) for each in self._routes}
        self._sent = {
            each: directive for each, directive in self._sent.items() if each in directives
        }
        for instance_id, directive in directives.items():
            if directive is not None and (
                instance_id in reported or self._sent.get(instance_id) != directive
            ):
                self._send(instance_id, directive)

    def _receive(self) -> Status | bool | None:
        """Return the next status, False for an invalid message, or None if no message waits."""
        try:
            route, *frames = self._router.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        try:
            (payload,) = frames
            status = self._decoder.decode(payload)
            check_status(status)
            if len(self._routes) >= MAX_RANKS and status.member.instance_id not in self._routes:
                raise ValueError(f"the limit of {MAX_RANKS} ranks is reached")
        except (
            ValueError,
            msgspec.DecodeError,
            RecursionError,
            OverflowError,
            MemoryError,
        ) as error:
            self.metrics.bad_messages.inc()
            self._bad_messages.warning(
                "the coordinator dropped a message that is not a valid status: %s; check that all "
                "ranks run the coordinator's version",
                error,
            )
            return False
        self.metrics.statuses.inc()
        self._routes[status.member.instance_id] = route
        return truncate_failure(status)

    def _count_refused_connections(self) -> None:
        count = count_refused(self._handshakes)
        if count:
            self.metrics.refused.labels("ranks").inc(count)
            why = (
                "use a service key, but this coordinator has none (--service-key-file)"
                if self._key is None
                else "do not have this service's key"
            )
            self._refusals.warning(
                "the coordinator refused %s connections: the clients are not ranks, or %s",
                count,
                why,
            )

    def _send(self, instance_id: str, directive: Directive) -> None:
        self._sent[instance_id] = directive
        try:
            self._router.send_multipart(
                [self._routes[instance_id], self._encoder.encode(directive)], zmq.NOBLOCK
            )
        except zmq.Again:
            logger.warning(
                "the coordinator dropped a directive for the rank with instance id %s, because the "
                "rank does not read its messages; its next status is answered with a new directive",
                instance_id,
            )
