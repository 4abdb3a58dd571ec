"""A rank's connections to the coordinator and to other ranks, and the link thread. Needs no torch.

coordinator  a DEALER that reconnects. It sends the latest Status every STATUS_INTERVAL_S, and
             at once when a field in `_decisive_fields` changes. It receives Directives.
other ranks  a ROUTER on the pod's address receives StartWaves; one DEALER per rank sends them.

The link thread passes each received message to `deliver`, whatever its generation, and repeats a
StartWave until `end_start` is called.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from baton_engine.bounded_log import SparseLog
from baton_engine.wake_pipe import WakePipe
from baton_protocol.service_key import ServiceKey, watch_handshakes, why_handshake_failed
from baton_protocol.topology import (
    STATUS_INTERVAL_S,
    Directive,
    RankPhase,
    StartWave,
    Status,
    TopologyMember,
)

logger = logging.getLogger(__name__)

#: Interval between two StartWaves of one wave.
REPEAT_INTERVAL_S = 0.2
#: Timeout of a connection in `unreachable`. A living rank accepts it within milliseconds.
PROBE_TIMEOUT_S = 0.5
#: Maximum size of a message: enough for a placement of many layers on many ranks.
MAX_MESSAGE_BYTES = 64 * 2**20
#: Messages to read from one socket before this rank's own messages are sent.
MAX_MESSAGES_PER_TURN = 256
#: First and maximum delay of a reconnection, in milliseconds. The delays are short, because a
#: broken group serves nothing until a restarted coordinator has received the ranks' statuses.
RECONNECT_MS = (50, 200)
#: Interval of ZeroMQ heartbeats. A connection closes after three intervals without an answer.
HEARTBEAT_MS = 1000


class RankLink:
    """The connections of one rank to the coordinator and to other ranks. Thread-safe.

    `start` starts the thread that uses the sockets.
    """

    def __init__(
        self,
        host: str,
        coordinator: str,
        *,
        deliver: Callable[[Directive | StartWave], None],
        amend: Callable[[Status], Status] = lambda status: status,
        key: ServiceKey | None = None,
        wakeup_interval_s: float = STATUS_INTERVAL_S,
    ) -> None:
        """Bind the ROUTER socket for other ranks, and connect the DEALER socket to the coordinator.

        Args:
            host: address to bind.
            coordinator: host:port of the coordinator.
            deliver: called by the link's thread with each received message.
            amend: returns the given status with current values. The link's thread calls `amend`
                each time before it sends the status. `amend` must not block.
            key: key of the service, which all peers must have. None: no authentication.
            wakeup_interval_s: interval between statuses if no field in `_decisive_fields` changes.

        Raises:
            zmq.ZMQError: `host` cannot be bound, or `coordinator` is not an address.
        """
        self._deliver = deliver
        self._amend = amend
        self._key = key
        self._interval_s = wakeup_interval_s
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._encoder = msgspec.msgpack.Encoder()
        self._directives = msgspec.msgpack.Decoder(Directive)
        self._starts = msgspec.msgpack.Decoder(StartWave)
        self._status: Status | None = None
        self._next_status = 0.0
        #: The StartWave to repeat.
        self._start: StartWave | None = None
        self._next_start = 0.0
        self._peers: dict[tuple[str, int], zmq.Socket[bytes]] = {}
        self._log = SparseLog(logger)
        self._wake_pipe = WakePipe()
        context: zmq.Context[Any] = zmq.Context.instance()
        self._router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._coordinator: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self._coordinator_address = coordinator
        self._handshakes = watch_handshakes(self._coordinator)
        try:
            self._router.setsockopt(zmq.LINGER, 0)
            self._router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            if key is not None:
                key.protect_server(self._router)
            self._router.bind(f"tcp://{host}:0")
            # An old status need not be queued, because the next one replaces it.
            _make_sender(self._coordinator, f"tcp://{coordinator}", key, immediate=True)
        except zmq.ZMQError:
            self._close_sockets()
            raise
        endpoint: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(endpoint.rpartition(":")[2])
        self._thread = threading.Thread(target=self._run, name="rank-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def publish(self, status: Status) -> None:
        """Set the status that is sent to the coordinator at regular intervals.

        The status is sent at once if any of its `_decisive_fields` has changed.
        """
        before, self._status = self._status, status
        if before is None or _decisive_fields(before) != _decisive_fields(status):
            self._next_status = 0.0
            self._wake_pipe.wake()

    def set_peers(self, members: Sequence[TopologyMember]) -> None:
        """Set the ranks to which `start_wave` sends. Stop repeating the current StartWave."""
        addresses = [(member.host, member.link_port) for member in members]
        self._submit(lambda: self._connect(addresses))

    def start_wave(self, start: StartWave) -> None:
        """Send a StartWave to the peers, and repeat it until `end_start` is called."""

        def begin() -> None:
            self._start = start
            self._send_start()

        self._submit(begin)

    def end_start(self) -> None:
        """Stop repeating the StartWave."""

        def end() -> None:
            self._start = None

        self._submit(end)

    def close(self) -> None:
        """Send the status of the last `publish` again, and close all sockets. Idempotent."""
        self._commands.put(None)
        self._wake_pipe.wake()
        if self._thread.is_alive():
            self._thread.join()
        elif not self._router.closed:
            self._close_sockets()

    def _submit(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._wake_pipe.wake()

    # In the link's thread

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._router, self._coordinator, self._handshakes, self._wake_pipe.reader):
            poller.register(source, zmq.POLLIN)
        try:
            while True:
                poller.poll(int(self._poll_timeout_s() * 1000) + 1)
                if not self._run_commands():
                    self._send_status()
                    return
                self._receive(self._coordinator, self._directives)
                self._receive(self._router, self._starts)
                self._log_failed_handshakes()
                now = time.monotonic()
                if now >= self._next_status:
                    self._send_status()
                if self._start is not None and now >= self._next_start:
                    self._send_start()
        except Exception:
            logger.exception(
                "the link to the coordinator failed, so this rank sends no more statuses; the "
                "coordinator will declare this rank dead"
            )
        finally:
            self._close_sockets()

    def _poll_timeout_s(self) -> float:
        """Return the seconds until the next Status or StartWave must be sent."""
        due = self._next_status if self._start is None else min(self._next_status, self._next_start)
        return min(max(0.0, due - time.monotonic()), self._interval_s)

    def _run_commands(self) -> bool:
        """Run the commands that other threads have queued. Return False if `close` was called."""
        self._wake_pipe.clear()
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _receive(
        self,
        source: zmq.Socket[bytes],
        decoder: msgspec.msgpack.Decoder[Directive] | msgspec.msgpack.Decoder[StartWave],
    ) -> None:
        for _ in range(MAX_MESSAGES_PER_TURN):
            try:
                frames = source.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) > 2:  # a ROUTER adds the route
                    raise ValueError(f"a message has 1 frame, got {len(frames) - 1}")
                message = decoder.decode(frames[-1])
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                self._log.warning(
                    "this rank dropped a message from the coordinator or another rank, because the "
                    "message cannot be decoded: %s; check that the ranks and the coordinator run "
                    "the same version",
                    error,
                )
                continue
            self._deliver(message)

    def _log_failed_handshakes(self) -> None:
        """Log why handshakes with the coordinator failed.

        A rank without a successful handshake stays STANDBY, and no other log line gives the cause.
        """
        with contextlib.suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self._handshakes.recv_multipart(zmq.NOBLOCK))
                why = why_handshake_failed(event, self._key)
                self._log.warning("the coordinator at %s %s", self._coordinator_address, why)

    def _send_status(self) -> None:
        self._next_status = time.monotonic() + self._interval_s
        if self._status is not None:
            _send(self._coordinator, self._encoder.encode(self._amend(self._status)))

    def _send_start(self) -> None:
        self._next_start = time.monotonic() + REPEAT_INTERVAL_S
        if self._start is not None:
            payload = self._encoder.encode(self._start)
            for peer in self._peers.values():
                _send(peer, payload)

    def _connect(self, addresses: Sequence[tuple[str, int]]) -> None:
        self._start = None
        for address in self._peers.keys() - set(addresses):
            self._peers.pop(address).close(linger=0)
        for host, port in addresses:
            if (host, port) not in self._peers:
                peer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
                self._peers[host, port] = peer
                _make_sender(peer, f"tcp://{host}:{port}", self._key, immediate=False)

    def _close_sockets(self) -> None:
        self._coordinator.disable_monitor()
        self._handshakes.close()
        for sender in [*self._peers.values(), self._coordinator]:
            sender.close(linger=int(self._interval_s * 1000))
        self._peers.clear()
        self._router.close(linger=0)
        self._wake_pipe.close()


def unreachable(members: Sequence[TopologyMember]) -> tuple[str, ...]:
    """Return the instance ids of members whose link port accepts no connection.

    A frozen process still accepts connections. The check takes up to PROBE_TIMEOUT_S per member.
    """
    gone = []
    for member in members:
        try:
            socket.create_connection((member.host, member.link_port), PROBE_TIMEOUT_S).close()
        except OSError:
            gone.append(member.instance_id)
    return tuple(gone)


def _make_sender(
    sender: zmq.Socket[bytes], address: str, key: ServiceKey | None, *, immediate: bool
) -> None:
    first, most = RECONNECT_MS
    if key is not None:
        key.protect_client(sender)
    sender.setsockopt(zmq.LINGER, 0)
    sender.setsockopt(zmq.SNDHWM, 2)
    sender.setsockopt(zmq.IMMEDIATE, int(immediate))
    sender.setsockopt(zmq.RECONNECT_IVL, first)
    sender.setsockopt(zmq.RECONNECT_IVL_MAX, most)
    sender.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    sender.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
    sender.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    sender.connect(address)


def _send(sender: zmq.Socket[bytes], payload: bytes) -> None:
    with contextlib.suppress(zmq.Again):  # no peer, or a full queue: the message is repeated
        sender.send(payload, zmq.NOBLOCK)


def _decisive_fields(status: Status) -> tuple[RankPhase | str | bool | tuple[str, ...], ...]:
    """Return the fields of a status whose changes are sent at once.

    The coordinator needs these fields for its decisions. Other fields may change in every step.
    """
    nonce = status.generation.nonce if status.generation is not None else ""
    return (
        status.phase,
        nonce,
        status.prepared,
        status.commit_seen,
        status.failed,
        status.failure,
        status.suspects,
        status.leaving,
    )
