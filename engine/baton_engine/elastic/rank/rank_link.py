"""A rank's sockets of the elastic group, and their thread: Status out, Directive in, StartWave both ways. No torch.

    coordinator   a DEALER, which reconnects for ever: the latest Status every STATUS_INTERVAL_S, and at once when it changes
    other ranks   a ROUTER on the pod's own address for their StartWaves; one DEALER to each for one's own

The thread knows nothing of generations: it hands on what comes, and repeats what it was given until it is told to stop.
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

from baton_engine.untrusted import SparseLog
from baton_protocol.service_key import ServiceKey, watch_handshakes, why_handshake_failed
from baton_protocol.topology import (
    STATUS_INTERVAL_S,
    Directive,
    Member,
    RankPhase,
    StartWave,
    Status,
)

logger = logging.getLogger(__name__)

REPEAT_INTERVAL_S = 0.2
"""Between two StartWaves of one wave."""
PROBE_TIMEOUT_S = 0.5
MAX_MESSAGE_BYTES = 64 * 2**20
"""A placement of many layers over many ranks is large."""
MAX_MESSAGES_PER_TURN = 256
"""From one socket, before it is looked what is to be sent."""
RECONNECT_MS = (50, 1000)
"""After the first lost connection, and at most."""
HEARTBEAT_MS = 1000


class RankLink:
    """The constructor binds; `start` begins to talk. All methods are for any thread."""

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
        """
        Args:
            host: the one address to bind.
            coordinator: its host:port.
            deliver: called by the link's thread with whatever comes.
            amend: called by the link's thread with each status that it sends: adds what is true now, and must not wait.
            key: only who has it is heard and told. None: everybody is.
            wakeup_interval_s: between statuses that say nothing new.

        Raises:
            zmq.ZMQError: the address cannot be bound, or the coordinator's is none.
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
        self._start: StartWave | None = None
        """Being repeated."""
        self._next_start = 0.0
        self._peers: dict[tuple[str, int], zmq.Socket[bytes]] = {}
        self._log = SparseLog(logger)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
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
            # Statuses that were not sent are not worth sending: the next one says it all.
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
        """What the coordinator is told from now on; at once, if it is news."""
        before, self._status = self._status, status
        if before is None or _news(before) != _news(status):
            self._next_status = 0.0
            self._wake()

    def set_peers(self, members: Sequence[Member]) -> None:
        """Who hears StartWaves from now on. What is being repeated ends."""
        addresses = [(member.host, member.link_port) for member in members]
        self._submit(lambda: self._connect(addresses))

    def start_wave(self, start: StartWave) -> None:
        """Tells the peers, again and again until `end_start`."""

        def begin() -> None:
            self._start = start
            self._send_start()

        self._submit(begin)

    def end_start(self) -> None:
        """All know of the wave, or it is not to be any more."""

        def end() -> None:
            self._start = None

        self._submit(end)

    def close(self) -> None:
        """Sends the last status. Idempotent."""
        self._commands.put(None)
        self._wake()
        if self._thread.is_alive():
            self._thread.join()
        elif not self._router.closed:
            self._close_sockets()

    def _submit(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake anyway; closed: it has ended
            self._wake_writer.send(b"\x00")

    # In the link's thread

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._router, self._coordinator, self._handshakes, self._wake_reader):
            poller.register(source, zmq.POLLIN)
        try:
            while True:
                poller.poll(int(self._patience() * 1000) + 1)
                if not self._obey():
                    self._send_status()
                    return
                self._receive(self._coordinator, self._directives)
                self._receive(self._router, self._starts)
                self._look_at_handshakes()
                now = time.monotonic()
                if now >= self._next_status:
                    self._send_status()
                if self._start is not None and now >= self._next_start:
                    self._send_start()
        except Exception:
            logger.exception("the link to the group failed; this rank will be taken for dead")
        finally:
            self._close_sockets()

    def _patience(self) -> float:
        """Seconds until something is to be sent."""
        due = self._next_status if self._start is None else min(self._next_status, self._next_start)
        return min(max(0.0, due - time.monotonic()), self._interval_s)

    def _obey(self) -> bool:
        """False: it is to end."""
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass
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
                payload = source.recv_multipart(zmq.NOBLOCK)[-1]
            except zmq.Again:
                return
            try:
                message = decoder.decode(payload)
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                self._log.warning("dropped a message that cannot be read: %s", error)
                continue
            self._deliver(message)

    def _look_at_handshakes(self) -> None:
        """Nobody else would say why this rank stands by for ever."""
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
        self._wake_reader.close()
        self._wake_writer.close()


def unreachable(members: Sequence[Member]) -> tuple[str, ...]:
    """Instance ids of those whose process is gone, as far as their sockets tell: a frozen one still has them. Takes a while."""
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
    with contextlib.suppress(zmq.Again):  # nobody is there, or does not read: it is said again
        sender.send(payload, zmq.NOBLOCK)


def _news(status: Status) -> tuple[RankPhase | str | bool | tuple[str, ...], ...]:
    """What a coordinator decides by; the rest changes with every step."""
    nonce = status.generation.nonce if status.generation is not None else ""
    return (
        *(status.phase, nonce, status.prepared, status.commit_seen, status.failed, status.failure),
        *(status.suspects, status.leaving),
    )
