"""The coordinator's process: a ROUTER that ranks talk to, the controller, HTTP. It keeps nothing that the ranks cannot give back.

A rank sends its Status in one frame, as MessagePack, from a DEALER; every answer is a Directive in one frame. Ranks are known by
the instance id in the Status, never by their connection, which may be another one after every break.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import signal
import socket
import threading
import time

import msgspec
import zmq

from baton_engine.elastic.coordinator.checks import Refusal, check_status, without_excess
from baton_engine.elastic.coordinator.controller import Controller
from baton_engine.elastic.coordinator.controller_config import ControllerConfig
from baton_engine.elastic.coordinator.coordinator_http import CoordinatorServer
from baton_engine.elastic.coordinator.coordinator_metrics import CoordinatorMetrics
from baton_engine.untrusted import SparseLog
from baton_protocol.service_key import ServiceKey, count_refused, watch_handshakes
from baton_protocol.topology import Directive, Status, TopologyRequest, TopologyStatus

logger = logging.getLogger(__name__)

TICK_MS = 50
UNRESPONSIVE_AFTER_S = 5.0
HIGH_WATER_MARK = 64
"""Directives for a rank that does not read them; further ones are dropped, and it is told again when it reports."""
LINGER_S = 2.0
"""Ranks that are deleted together with the coordinator have told it by then."""
MAX_MESSAGE_BYTES = 64 * 2**20
MAX_MESSAGES_PER_TURN = 1024
"""After so many the ranks are answered before more are taken: who sends without end must not keep the others waiting."""
MAX_RANKS = 2**12
"""Processes that may be known at a time."""


class Coordinator:
    def __init__(
        self,
        host: str,
        port: int,
        http_port: int,
        config: ControllerConfig,
        key: ServiceKey | None = None,
    ) -> None:
        """Binds both ports; 0: any free one.

        Args:
            key: only who has it may report, and change something. None: everybody may.

        Raises:
            zmq.ZMQError, OSError: an address is taken.
        """
        self.id = secrets.token_hex(8)
        self.metrics = CoordinatorMetrics()
        self._key = key
        self._lock = threading.Lock()
        """Guards the controller."""
        self._controller = Controller(self.id, lambda: secrets.token_hex(8), config)
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
        self._wake_up, self._woken = socket.socketpair()
        self._wake_up.setblocking(False)
        self._woken.setblocking(False)
        self._decoder = msgspec.msgpack.Decoder(Status)
        self._encoder = msgspec.msgpack.Encoder()
        self._routes: dict[str, bytes] = {}
        """Instance id -> its connection."""
        self._told: dict[str, Directive] = {}
        self._stopped_at: float | None = None
        self._last_tick = time.monotonic()
        self._bad_messages = SparseLog(logger)
        self._refusals = SparseLog(logger)

    # From the HTTP server's threads

    def admits(self, authorization: str | None) -> bool:
        admitted = self._key is None or self._key.admits(authorization)
        if not admitted:
            self.metrics.refused.labels("http").inc()
        return admitted

    def topology(self) -> TopologyStatus:
        with self._lock:
            return self._controller.status(time.monotonic())

    def ask_for(self, request: TopologyRequest) -> Refusal | None:
        with self._lock:
            now = time.monotonic()
            refusal = self._controller.on_request(request, now)
        self._wake()
        return refusal

    def ask_for_rebalance(self) -> None:
        with self._lock:
            self._controller.on_rebalance()
        self._wake()

    def metrics_text(self) -> bytes:
        return self.metrics.text(self.topology())

    def is_healthy(self) -> bool:
        return time.monotonic() - self._last_tick < UNRESPONSIVE_AFTER_S

    # The loop

    def run(self) -> int:
        """Until `stop`, and until ranks that are deleted, too, have gone. Returns the process's exit code."""
        self._server.start()
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._woken.fileno(), zmq.POLLIN)
        try:
            while not self._is_done():
                if self._woken.fileno() in dict(poller.poll(TICK_MS)):
                    self._woken.recv(1024)
                self._turn()
        finally:
            self._close_sockets()
        return 0

    def stop(self) -> None:
        """From any thread, and from signal handlers."""
        self._stopped_at = time.monotonic()
        self._wake()

    def install_signal_handlers(self) -> None:
        """The second one ends the process at once."""

        def handle(*_: object) -> None:
            self.stop()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, handle)

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
        """Takes the messages that are there before time counts against anybody; decides; tells."""
        reported = set()
        self._look_for_strangers()
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
                each: route for each, route in self._routes.items() if self._controller.knows(each)
            }
            directives = {each: self._controller.directive_for(each) for each in self._routes}
        self._told = {
            each: directive for each, directive in self._told.items() if each in directives
        }
        for instance_id, directive in directives.items():
            if directive is not None and (
                instance_id in reported or self._told.get(instance_id) != directive
            ):
                self._tell(instance_id, directive)

    def _receive(self) -> Status | bool | None:
        """A status; False: a bad message; None: there is none."""
        try:
            route, *frames = self._router.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        try:
            (payload,) = frames
            status = self._decoder.decode(payload)
            check_status(status)
            if len(self._routes) >= MAX_RANKS and status.member.instance_id not in self._routes:
                raise ValueError(f"{MAX_RANKS} ranks are known already")
        except (
            ValueError,
            msgspec.DecodeError,
            RecursionError,
            OverflowError,
            MemoryError,
        ) as error:
            self.metrics.bad_messages.inc()
            self._bad_messages.warning("dropped a message that is no status of a rank: %s", error)
            return False
        self.metrics.statuses.inc()
        self._routes[status.member.instance_id] = route
        return without_excess(status)

    def _look_for_strangers(self) -> None:
        count = count_refused(self._handshakes)
        if count:
            self.metrics.refused.labels("ranks").inc(count)
            why = (
                "have a service key, and there is none here"
                if self._key is None
                else "lack this service's key"
            )
            self._refusals.warning(
                "refused %s connections: they are of no ranks, or %s", count, why
            )

    def _tell(self, instance_id: str, directive: Directive) -> None:
        self._told[instance_id] = directive
        try:
            self._router.send_multipart(
                [self._routes[instance_id], self._encoder.encode(directive)], zmq.NOBLOCK
            )
        except zmq.Again:
            logger.warning("%s does not read what it is told", instance_id)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is awake
            self._wake_up.send(b"\0")
