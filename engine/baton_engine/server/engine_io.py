"""The engine's ROUTER socket and its I/O thread.

The I/O thread decodes the messages of clients, encodes outputs, and answers HELLO and PING itself.
Two queues connect the thread to the engine's loop. `input_queue` carries clients' messages to the
loop, and an outbox carries the messages of the `send_*` methods to the thread. A message that
cannot be decoded gets the response REFUSED and does not end the thread.
"""

from __future__ import annotations

import enum
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import zmq

from baton_engine.bounded_log import SparseLog, one_line
from baton_engine.scheduling.request_limits import refusal_of
from baton_engine.server.access import Access
from baton_engine.server.output_buffers import OutputBuffers
from baton_engine.wake_pipe import WakePipe
from baton_protocol.engine_messages import (
    PROTOCOL_VERSION,
    ClientHello,
    Dead,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreResponseType,
    ErrorCode,
    Init,
    KVEvent,
    KVEventBatch,
    Ping,
    Pong,
    PrefillResult,
    Ready,
    RequestRefused,
    UtilityRequest,
)
from baton_protocol.engine_messages import EngineCoreRequestType as RequestType
from baton_protocol.engine_messages import EngineCoreResponseType as ResponseType
from baton_protocol.service_key import count_refused, watch_handshakes

logger = logging.getLogger(__name__)

#: After this time without any message, including PING, a client is gone and its requests are
#: aborted.
CLIENT_TIMEOUT_S = 20.0
#: After this time without any message, the state of a client is removed.
CLIENT_FORGOTTEN_S = 600.0
#: Maximum time between two checks for clients that are gone.
POLL_INTERVAL_S = 1.0
#: Time in which queued messages are sent after `close`.
CLOSE_LINGER_MS = 2000
#: Limit for one message. ZMQ disconnects a client that exceeds the limit. A prompt of a million
#: tokens has about 5 MB.
MAX_MESSAGE_BYTES = 64 * 2**20
#: Limits on the messages in the input queue, which the engine's loop reads between two steps.
#: Further messages are refused. For ABORT messages, which free memory, the limits are ABORT_FACTOR
#: times as high.
MAX_QUEUED_BYTES = 2 * MAX_MESSAGE_BYTES
MAX_QUEUED_MESSAGES = 2**14
ABORT_FACTOR = 2
#: Limit on recorded clients, including clients that are gone but not yet removed.
MAX_CLIENTS = 2**12
MAX_CLIENT_ID_LENGTH = 256
#: Limit on the messages that one client has not read. If a client exceeds the limit, its requests
#: are aborted, and the client must send HELLO again.
MAX_UNREAD_MESSAGES = 2**16

#: Maximum size in bytes of messages of the types in _SMALL. Decoded arguments of UTILITY, which may
#: be any values, take about 60 times the memory of the message.
_SMALL_BYTES = 2**16
_SMALL = (RequestType.HELLO, RequestType.PING, RequestType.UTILITY)
#: Maximum length of the frame with the instance id, in bytes.
_INSTANCE_FRAME_LIMIT = 256
#: Exceptions of decoding untrusted bytes.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Input(NamedTuple):
    """One message for the engine's loop."""

    type: RequestType
    #: ZMQ routing id. Empty for messages from inside the process.
    client: bytes = b""
    #: The struct of the message type, `Abort` for ABORT, or a reason for EXECUTOR_FAILED.
    payload: Any = None
    #: Size of the encoded payload. 0 for messages from inside the process.
    num_bytes: int = 0


@dataclass(slots=True)
class Abort:
    """An ABORT message. It is put into both `EngineIO.input_queue` and `EngineIO.aborts`.

    The loop reads `aborts` during a step, so an ABORT does not wait for the earlier messages in
    `input_queue`. Both queues hold the ABORT messages in the same order.
    """

    client: bytes
    #: None: all requests of a client that is gone.
    request_ids: list[str] | None
    #: Whether the message was taken from `aborts`.
    taken: bool = False


@dataclass(slots=True)
class _Client:
    client_id: str
    wants_kv_events: bool = False
    #: Time of the last message, by the monotonic clock.
    last_message_at: float = field(default_factory=time.monotonic)
    gone: bool = False


class _Identified(msgspec.Struct, array_like=True):
    """The first field of a message. Decoding skips the other fields."""

    request_id: str


class _Close(enum.Enum):
    CLOSE = enum.auto()


_MESSAGE_TYPES: dict[bytes, Any] = {
    RequestType.HELLO: ClientHello,
    RequestType.PING: Ping,
    RequestType.ADD: EngineCoreRequest,
    RequestType.ABORT: list[str],
    RequestType.PREFILL_RESULT: PrefillResult,
    RequestType.UTILITY: UtilityRequest,
}


class EngineIO:
    """Owns the ROUTER socket and the I/O thread. The engine's thread calls `send_*` and `close`."""

    def __init__(
        self,
        host: str,
        port: int,
        instance_id: str,
        make_pong: Callable[[], Pong],
        *,
        access: Access,
        client_timeout_s: float,
    ) -> None:
        """Bind the port.

        Args:
            port: 0 selects a free port. The attribute `port` contains the bound port.
            make_pong: returns a PONG message with the engine's state and request counts. The I/O
                thread sets the sequence number.
            access: checks whether clients have the service key.
            client_timeout_s: after this time without a message, a client is gone and its requests
                are aborted.

        Raises:
            zmq.ZMQError: the address cannot be bound.
        """
        self.input_queue: queue.SimpleQueue[Input] = queue.SimpleQueue()
        #: Bytes of all messages that were taken from `input_queue`. Only the loop writes it.
        self.bytes_taken = 0
        #: Bytes of all messages that were put into `input_queue`. Only the I/O thread writes it.
        self._bytes_queued = 0
        #: The ABORT messages that are also in `input_queue`: see `Abort`.
        self.aborts: queue.SimpleQueue[Abort] = queue.SimpleQueue()
        self._instance_id = instance_id.encode()
        self._make_pong = make_pong
        self._client_timeout_s = client_timeout_s
        self._access = access
        self._clients: dict[bytes, _Client] = {}
        self._refusals = SparseLog(logger)
        self._init = Init(PROTOCOL_VERSION, instance_id, compatibility_hash="")
        self._ready: Ready | None = None
        self._outbox: queue.SimpleQueue[tuple[ResponseType, bytes | None, Any] | _Close] = (
            queue.SimpleQueue()
        )
        self._wake_pipe = WakePipe()
        self._buffers = OutputBuffers()
        self._num_kv_batches = 0
        self._decoders = {
            kind: msgspec.msgpack.Decoder(struct) for kind, struct in _MESSAGE_TYPES.items()
        }

        self._router = _open_router(client_timeout_s)
        self._handshakes: zmq.Socket[bytes] | None = None
        if self._access.key is not None:
            self._access.key.protect_server(self._router)
            self._handshakes = watch_handshakes(self._router)
        try:
            self._router.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError:
            self._close_sockets(linger_ms=0)
            raise
        endpoint: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(endpoint.rpartition(":")[2])
        self._thread = threading.Thread(target=self._run, name="engine-io", daemon=True)

    # For the engine's thread

    def start(self) -> None:
        self._thread.start()

    def send_init(self, init: Init) -> None:
        """Set the INIT message and send it to all clients. Later clients receive this INIT too."""
        self._send(ResponseType.INIT, None, init)

    def send_ready(self, ready: Ready) -> None:
        """Send READY to all clients and start to accept requests."""
        self._send(ResponseType.READY, None, ready)

    def send_outputs(self, client: bytes, outputs: EngineCoreOutputs) -> None:
        self._send(ResponseType.OUTPUTS, client, outputs)

    def send_kv_events(self, events: list[KVEvent]) -> None:
        """Send changes of the prefix cache to the clients that subscribe to them.

        Batches are numbered even without subscribers, so that a later subscriber can detect a gap.
        """
        self._send(ResponseType.KV_EVENTS, None, KVEventBatch(self._num_kv_batches, events))
        self._num_kv_batches += 1

    def send_dead(self, reason: str) -> None:
        """Send DEAD to all clients. Callable from any thread."""
        self._send(ResponseType.DEAD, None, Dead(reason))

    def wake_engine(self) -> None:
        """Wake the engine's loop. Callable from any thread and from signal handlers."""
        self.input_queue.put(Input(RequestType.WAKEUP))

    def close(self) -> None:
        """Send the queued messages, close the socket and end the thread.

        Messages that are not sent within CLOSE_LINGER_MS are dropped.
        """
        self._outbox.put(_Close.CLOSE)
        self._wake_pipe.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=CLOSE_LINGER_MS / 1000)
        elif not self._router.closed:  # never started
            self._close_sockets(linger_ms=0)

    def _close_sockets(self, linger_ms: int) -> None:
        if self._handshakes is not None:
            self._router.monitor(None, 0)  # ends the monitor
            self._handshakes.close()
        self._router.close(linger=linger_ms)

    def _send(self, kind: EngineCoreResponseType, client: bytes | None, message: Any) -> None:
        self._outbox.put((kind, client, message))
        self._wake_pipe.wake()

    # In the I/O thread

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._router, zmq.POLLIN)
            poller.register(self._wake_pipe.reader, zmq.POLLIN)
            if self._handshakes is not None:
                poller.register(self._handshakes, zmq.POLLIN)
            while True:
                poller.poll(int(min(POLL_INTERVAL_S, self._client_timeout_s / 4) * 1000))
                if not self._send_outbox():
                    break
                self._receive_all()
                self._expire_clients()
                if self._handshakes is not None and (refused := count_refused(self._handshakes)):
                    self._access.refused("engine", refused)
        except Exception as error:
            logger.exception("the I/O thread failed; the engine ends")
            self.input_queue.put(
                Input(RequestType.EXECUTOR_FAILED, payload=f"I/O thread failed: {error!r}")
            )
        finally:
            self._close_sockets(linger_ms=CLOSE_LINGER_MS)
            self._wake_pipe.close()

    def _send_outbox(self) -> bool:
        """Send all messages of the outbox. Return False if `close` was called."""
        self._wake_pipe.clear()
        while True:
            try:
                item = self._outbox.get_nowait()
            except queue.Empty:
                return True
            if isinstance(item, _Close):
                return False
            kind, client, message = item
            if isinstance(message, Init):
                self._init = message
            elif isinstance(message, Ready):
                self._ready = message
            self._send_message(
                [client] if client is not None else self._audience(kind), kind, message
            )

    def _audience(self, kind: ResponseType) -> list[bytes]:
        """Return the clients that receive a broadcast of this message type."""
        if kind is ResponseType.KV_EVENTS:
            return [client for client, state in self._clients.items() if state.wants_kv_events]
        return list(self._clients)

    def _send_message(self, clients: list[bytes], kind: ResponseType, message: Any) -> None:
        if not clients:
            return
        instance_id = b"" if kind is ResponseType.REFUSED else self._instance_id
        with self._buffers.encode(message) as payload:
            for client in clients:
                try:
                    self._router.send_multipart(
                        [client, kind.value, instance_id], zmq.DONTWAIT | zmq.SNDMORE
                    )
                    payload.send(self._router)
                except zmq.ZMQError as error:
                    if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                        raise
                    state = self._clients.get(client)
                    if state is not None and not state.gone:
                        self._client_gone(client, state, "it reads no messages, or is disconnected")
                    if error.errno == zmq.EAGAIN:  # if kept, its next message logs this again
                        self._clients.pop(client, None)

    def _reply(self, client: bytes, kind: ResponseType, message: Any) -> None:
        self._send_message([client], kind, message)

    def _refuse(self, client: bytes, reason: str, request_id: str = "") -> None:
        reason = one_line(reason)  # may contain text of the client
        self._refusals.warning("a message of client %s is refused: %s", self._name(client), reason)
        self._reply(client, ResponseType.REFUSED, RequestRefused(reason, request_id))

    def _receive_all(self) -> None:
        for _ in range(1000):  # a limit, so that outputs are not delayed
            try:
                frames = self._router.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._receive(frames[0], frames[1:])

    def _receive(self, client: bytes, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) > _INSTANCE_FRAME_LIMIT:
            self._refuse(
                client, f"a message has 3 frames (type, instance id, payload), got {len(frames)}"
            )
            return
        kind, instance_id, payload = frames
        decoder = self._decoders.get(kind)
        if decoder is None:
            self._refuse(
                client,
                f"unknown message type {kind[:8]!r}; this engine has protocol {PROTOCOL_VERSION}",
            )
            return
        if kind in _SMALL and len(payload) > _SMALL_BYTES:
            self._refuse(
                client,
                f"{RequestType(kind).name} has at most {_SMALL_BYTES} bytes, got {len(payload)}",
            )
            return
        state = self._clients.get(client)
        if kind != RequestType.HELLO:
            if instance_id != self._instance_id:
                self._refuse(
                    client,
                    f"the message is for instance {instance_id.decode(errors='replace')}, this is "
                    f"{self._instance_id.decode()}; connect again",
                    _request_id(kind, payload),
                )
                return
            if state is None:
                self._refuse(client, "the first message must be HELLO", _request_id(kind, payload))
                return
        try:
            message = decoder.decode(payload)
        except _UNREADABLE as error:
            self._refuse(
                client,
                f"{RequestType(kind).name} cannot be decoded: {error}",
                _request_id(kind, payload),
            )
            return
        if state is not None:
            state.last_message_at = time.monotonic()
            state.gone = False
        self._handle(client, RequestType(kind), message, len(payload))

    def _handle(self, client: bytes, kind: RequestType, message: Any, num_bytes: int) -> None:
        if kind is RequestType.HELLO:
            self._hello(client, message)
        elif kind is RequestType.PING:
            pong = self._make_pong()
            pong.sequence = message.sequence
            self._reply(client, ResponseType.PONG, pong)
        elif self._ready is None:
            reason = f"{kind.name} before READY: the model is still loading"
            self._refuse(client, reason, getattr(message, "request_id", ""))
        elif self._is_full(num_bytes, ABORT_FACTOR if kind is RequestType.ABORT else 1):
            self._refuse_for_now(client, kind, message)
        elif kind is RequestType.ABORT:
            self._abort(client, message, num_bytes)
        else:
            self._bytes_queued += num_bytes
            self.input_queue.put(Input(kind, client, message, num_bytes))

    def _is_full(self, num_bytes: int, factor: int) -> bool:
        """Return whether the input queue has no room for one more message of `num_bytes` bytes.

        The limits of the queue are multiplied by `factor`.
        """
        queued = self._bytes_queued - self.bytes_taken
        return (
            queued + num_bytes > factor * MAX_QUEUED_BYTES
            or self.input_queue.qsize() >= factor * MAX_QUEUED_MESSAGES
        )

    def _refuse_for_now(self, client: bytes, kind: RequestType, message: Any) -> None:
        reason = "the engine's input queue is full; retry later"
        if isinstance(message, EngineCoreRequest):
            refusal = refusal_of(message, ErrorCode.OVERLOADED, reason)
            self._reply(client, ResponseType.OUTPUTS, EngineCoreOutputs([refusal]))
        else:
            self._refuse(client, f"{kind.name}: {reason}", getattr(message, "request_id", ""))

    def _hello(self, client: bytes, hello: ClientHello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            self._refuse(
                client,
                f"the client has protocol {hello.protocol_version}, this engine {PROTOCOL_VERSION}",
            )
            return
        if len(hello.client_id) > MAX_CLIENT_ID_LENGTH or not hello.client_id.isprintable():
            self._refuse(
                client, f"a client id has at most {MAX_CLIENT_ID_LENGTH} printable characters"
            )
            return
        if client not in self._clients and not self._has_room():
            self._refuse(client, f"the limit of {MAX_CLIENTS} clients is reached; retry later")
            return
        self._clients[client] = _Client(hello.client_id, hello.kv_events)
        logger.info("client %s connected", hello.client_id)
        self._reply(client, ResponseType.INIT, self._init)
        if self._ready is not None:
            self._reply(client, ResponseType.READY, self._ready)

    def _has_room(self) -> bool:
        """Return whether another client can be added.

        At the limit of MAX_CLIENTS, forget the client that has been gone longest, if any is gone.
        """
        if len(self._clients) < MAX_CLIENTS:
            return True
        gone = [client for client, state in self._clients.items() if state.gone]
        if gone:
            del self._clients[min(gone, key=lambda client: self._clients[client].last_message_at)]
        return bool(gone)

    def _abort(self, client: bytes, request_ids: list[str] | None, num_bytes: int = 0) -> None:
        abort = Abort(client, request_ids)
        self._bytes_queued += num_bytes
        self.aborts.put(abort)
        self.input_queue.put(Input(RequestType.ABORT, client, abort, num_bytes))

    def _expire_clients(self) -> None:
        now = time.monotonic()
        for client, state in list(self._clients.items()):
            silence = now - state.last_message_at
            if silence > self._client_timeout_s and not state.gone:
                self._client_gone(client, state, f"no message for {silence:.0f} s")
            elif silence > CLIENT_FORGOTTEN_S:
                del self._clients[client]

    def _client_gone(self, client: bytes, state: _Client, why: str) -> None:
        logger.warning("client %s is gone (%s): its requests are aborted", state.client_id, why)
        state.gone = True
        self._abort(client, None)

    def _name(self, client: bytes) -> str:
        state = self._clients.get(client)
        return state.client_id if state is not None else client.hex()


def _open_router(client_timeout_s: float) -> zmq.Socket[bytes]:
    router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDHWM, MAX_UNREAD_MESSAGES)
    router.setsockopt(zmq.RCVHWM, 0)
    router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    router.setsockopt(zmq.LINGER, CLOSE_LINGER_MS)
    router.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(client_timeout_s * 1000))
    router.setsockopt(zmq.HANDSHAKE_IVL, 10000)
    return router


def _request_id(kind: bytes, payload: bytes) -> str:
    """Return the request id in an encoded message, or "" if the message has no readable id."""
    if kind not in (RequestType.ADD, RequestType.PREFILL_RESULT):
        return ""
    try:
        return msgspec.msgpack.decode(payload, type=_Identified).request_id
    except _UNREADABLE:
        return ""
