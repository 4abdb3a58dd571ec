"""The gateway's asyncio client of one engine instance.

A client has one DEALER socket, which never reconnects. When the connection ends, the client treats
the instance as dead, and every request in flight ends with `EngineDeadError`. A restarted pod is
another instance and needs another client.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from baton_protocol.engine_client.heartbeat import (
    HEARTBEAT_INTERVAL_S,
    HEARTBEAT_TIMEOUT_S,
    HeartbeatMonitor,
)
from baton_protocol.engine_client.request_stream import (
    EngineDeadError,
    HandshakeFailedError,
    RequestStream,
)
from baton_protocol.engine_messages import (
    PROTOCOL_VERSION,
    ClientHello,
    Dead,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineCoreResponseType,
    ErrorCode,
    FinishReason,
    Init,
    KVEventBatch,
    Pong,
    PrefillResult,
    Ready,
    RequestRefused,
    UtilityOutput,
    UtilityRequest,
)
from baton_protocol.service_key import HANDSHAKE_FAILED, ServiceKey, why_handshake_failed

__all__ = [
    "EngineClient",
    "EngineDeadError",
    "HandshakeFailedError",
    "RequestStream",
    "UtilityError",
]

logger = logging.getLogger(__name__)

_ready_epochs = itertools.count(1)


class UtilityError(Exception):
    """A utility method failed in the engine. The text is the engine's message."""


class EngineClient:
    """Client of one engine instance.

    The client is not thread-safe. All calls must come from the event loop that called `connect`.

    Args:
        host: host of the engine's ROUTER socket.
        port: port of the engine's ROUTER socket.
        client_id: name of this client in the engine's log.
        service_key: key of the engine's service; None if the service has no key.
        heartbeat_interval_s: seconds between two PINGs.
        heartbeat_timeout_s: seconds without a message after which the engine counts as dead.
        on_kv_events: called with each batch of changes of the engine's prefix cache. None: the
            client does not subscribe. The first batch may have any sequence number. A later gap in
            the sequence numbers means that batches were lost.
        on_available: called each time `accepts_requests` may have become true.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        client_id: str,
        service_key: ServiceKey | None = None,
        heartbeat_interval_s: float = HEARTBEAT_INTERVAL_S,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        on_kv_events: Callable[[KVEventBatch], None] | None = None,
        on_available: Callable[[], None] | None = None,
    ) -> None:
        self.address = f"tcp://{host}:{port}"
        #: The latest READY. An engine of an expert-parallel group sends READY again when its rank
        #: or the size of the group changes.
        self.ready: Ready | None = None
        #: Changes each time the engine becomes ready, to a number that is unique in this process.
        #: Requests that the engine refused before the change may be sent to it again.
        self.ready_epoch = 0
        #: None while the engine is alive and this client is open.
        self.dead_reason: str | None = None
        self._client_id = client_id
        self._service_key = service_key
        self._wants_kv_events = on_kv_events is not None
        self._notify_available = on_available or (lambda: None)
        self._heartbeat = HeartbeatMonitor(heartbeat_interval_s, heartbeat_timeout_s)
        #: Whether requests were abandoned since the engine last made progress.
        self._has_abandoned = False
        self._init: asyncio.Future[Init] | None = None
        self._latest_init: Init | None = None
        self._ready_event = asyncio.Event()
        self._dead_event = asyncio.Event()
        self._streams: dict[str, RequestStream] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._socket: zmq.asyncio.Socket | None = None
        #: Future of the next message; None after the message was passed to `_on_message`.
        self._arriving: asyncio.Future[list[bytes]] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._encoder = msgspec.msgpack.Encoder()
        handlers: list[tuple[EngineCoreResponseType, type, Callable[[Any], None]]] = [
            (EngineCoreResponseType.OUTPUTS, EngineCoreOutputs, self._on_outputs),
            (EngineCoreResponseType.INIT, Init, self._on_init),
            (EngineCoreResponseType.READY, Ready, self._on_ready),
            (EngineCoreResponseType.PONG, Pong, self._on_pong),
            (EngineCoreResponseType.REFUSED, RequestRefused, self._on_refused),
            (EngineCoreResponseType.DEAD, Dead, self._on_dead),
        ]
        if on_kv_events is not None:
            handlers.append((EngineCoreResponseType.KV_EVENTS, KVEventBatch, on_kv_events))
        self._decoders: dict[bytes, tuple[msgspec.msgpack.Decoder[Any], Callable[[Any], None]]] = {
            kind.value: (msgspec.msgpack.Decoder(payload), handle)
            for kind, payload, handle in handlers
        }

    @property
    def init(self) -> Init:
        """The engine's latest INIT. `compatibility_hash` is empty until the model is loaded."""
        if self._latest_init is None:
            raise RuntimeError("EngineClient.connect() has not succeeded yet")
        return self._latest_init

    @property
    def instance_id(self) -> str:
        return self.init.instance_id

    @property
    def num_unfinished(self) -> int:
        """Number of this client's requests in flight."""
        return len(self._streams)

    @property
    def status(self) -> Pong | None:
        """The engine's latest PONG, or None before the first one."""
        return self._heartbeat.status

    @property
    def num_requests(self) -> int:
        """Estimated number of requests at the engine, including requests of other clients."""
        return self._heartbeat.num_requests(self.num_unfinished)

    @property
    def accepts_requests(self) -> bool:
        """Whether new requests may be sent to the engine.

        The engine must be ready and neither draining nor paused. It must not be suspect, as defined
        by `HeartbeatMonitor.is_suspect`.

        False before the first PONG, because the engine may be paused or stalled.
        """
        if self.ready is None or self.dead_reason is not None:
            return False
        return self._heartbeat.accepts_requests and not self._heartbeat.is_suspect

    async def connect(self, timeout_s: float) -> Init:
        """Connect to the engine: send HELLO and return the engine's INIT.

        Raises:
            HandshakeFailedError: the handshake failed, usually because the service keys differ.
            EngineDeadError: the connection failed, or the engine has another protocol version.
            TimeoutError: no INIT arrived within `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        self._init = loop.create_future()
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket = socket
        socket.setsockopt(zmq.LINGER, 0)
        # Sending never blocks. The heartbeat detects a peer that does not read.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        # An interval of 24 days, so ZMQ never reconnects. With -1, ZMQ would drop received messages
        # when the connection ends.
        socket.setsockopt(zmq.RECONNECT_IVL, 2**31 - 1)
        if self._service_key is not None:
            self._service_key.protect_client(socket)
        monitor = socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | HANDSHAKE_FAILED
        )
        socket.connect(self.address)
        self._tasks = [
            loop.create_task(self._receive(), name=f"engine-client-receive {self.address}"),
            loop.create_task(
                self._watch_connection(monitor), name=f"engine-client-monitor {self.address}"
            ),
        ]
        hello = ClientHello(PROTOCOL_VERSION, self._client_id, self._wants_kv_events)
        self._send(EngineCoreRequestType.HELLO, hello, instance_id="")
        try:
            # Before Python 3.12, wait_for loses a cancellation that arrives with the result.
            async with asyncio.timeout(timeout_s):
                init = await asyncio.shield(self._init)
        except TimeoutError:
            await self.close()
            raise TimeoutError(
                f"{self.address} did not answer HELLO within {timeout_s:g} s"
            ) from None
        except BaseException:
            await self.close()
            raise
        self._tasks.append(
            loop.create_task(self._beat(), name=f"engine-client-heartbeat {self.address}")
        )
        return init

    async def wait_ready(self, timeout_s: float) -> Ready:
        """Wait until the engine has sent READY, and return the latest READY.

        Raises:
            EngineDeadError: the engine is dead.
            TimeoutError: no READY arrived within `timeout_s`.
        """
        waits = [
            asyncio.ensure_future(self._ready_event.wait()),
            asyncio.ensure_future(self._dead_event.wait()),
        ]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)
        if self.ready is None:
            raise TimeoutError(f"{self.address} was not ready within {timeout_s:g} s")
        return self.ready

    def add(self, request: EngineCoreRequest) -> RequestStream:
        """Send a request to the engine, and return an iterator over the request's outputs.

        Raises:
            EngineDeadError: the engine is dead.
            ValueError: a request with this id is in flight.
        """
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)
        if request.request_id in self._streams:
            raise ValueError(
                f"request id {request.request_id!r} is already in flight on {self.address}"
            )
        # Send first: a request that cannot be encoded must not leave a stream behind.
        self._send(EngineCoreRequestType.ADD, request)
        stream = self._streams[request.request_id] = RequestStream(request.request_id)
        return stream

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ask the engine to abort requests. Unknown ids are ignored.

        The stream of a request ends with finish_reason ABORT when the engine confirms the abort.
        """
        ids = [request_id for request_id in request_ids if request_id in self._streams]
        if ids and self.dead_reason is None:
            self._send(EngineCoreRequestType.ABORT, ids)

    def abandon_requests(self, reason: str) -> None:
        """End all requests in flight with EngineDeadError, and ask the engine to abort them.

        The connection stays open. Use this method if the engine makes no progress. `ready_epoch`
        changes when the engine makes progress again and accepts requests.

        Args:
            reason: text of the error.
        """
        self.abort(self._streams)
        self._end_streams(EngineDeadError(f"{self.address}: {reason}"))
        self._has_abandoned = True

    def prefill_result(self, result: PrefillResult) -> None:
        """Send the result of a request's prefill stage to this decode engine."""
        if self.dead_reason is None:
            self._send(EngineCoreRequestType.PREFILL_RESULT, result)

    async def call(self, method: str, *args: object, timeout_s: float | None = 10.0) -> Any:
        """Call a utility method in the engine and return the method's result.

        Args:
            method: name of a method in the engine's allow-list.
            args: positional arguments. Trailing arguments with defaults may be omitted.
            timeout_s: longest wait for the result, in seconds; None: no limit. `pause` and `sleep`
                can take long, because they wait for the running requests.

        Raises:
            UtilityError: the method failed.
            EngineDeadError: the engine is dead.
            TimeoutError: no answer arrived within `timeout_s`.
        """
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)
        call_id = next(self._call_ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._send(EngineCoreRequestType.UTILITY, UtilityRequest(call_id, method, list(args)))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise TimeoutError(
                f"{self.address} did not answer {method}() within {timeout_s or 0:g} s"
            ) from None
        finally:
            self._calls.pop(call_id, None)

    async def wait_dead(self) -> str:
        """Wait until the engine is dead or this client is closed, and return the reason."""
        await self._dead_event.wait()
        assert self.dead_reason is not None
        return self.dead_reason

    async def close(self) -> None:
        """Close the connection, and end all requests in flight with EngineDeadError. Idempotent."""
        self._die("the client closed the connection")
        others = [task for task in self._tasks if task is not asyncio.current_task()]
        self._tasks = []
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
            self._socket = None

    def _send(
        self, kind: EngineCoreRequestType, payload: object, *, instance_id: str | None = None
    ) -> None:
        if self._socket is None:
            raise RuntimeError("EngineClient.connect() has not been called")
        identity = self.instance_id if instance_id is None else instance_id
        # Without a high-water mark the returned future is done at once.
        self._socket.send_multipart(
            [kind.value, identity.encode(), self._encoder.encode(payload)], copy=True
        )

    async def _receive(self) -> None:
        assert self._socket is not None
        while self.dead_reason is None:
            # `recv_multipart` already returns a future, which `ensure_future` returns unchanged.
            arriving = self._arriving = asyncio.ensure_future(self._socket.recv_multipart())
            await arriving
            self._pass_received()

    def _pass_received(self) -> None:
        """Pass the message from the future `_arriving` to `_on_message`, if the future is done."""
        if self._arriving is not None and self._arriving.done():
            frames, self._arriving = self._arriving.result(), None
            self._on_message(frames)

    def _on_message(self, frames: list[bytes]) -> None:
        was_suspect = self._heartbeat.record_message()
        try:
            kind, instance_id, payload = frames
            decoder, handle = self._decoders[kind]
            message = decoder.decode(payload)
        except (ValueError, KeyError, msgspec.DecodeError) as error:
            self._die(f"{self.address} sent a message that cannot be read: {error!r}")
            return
        known = self._init is not None and self._init.done()
        if known and instance_id and instance_id.decode(errors="replace") != self.instance_id:
            self._die(
                f"{self.address} is another instance now: {instance_id.decode(errors='replace')}"
            )
            return
        handle(message)
        if was_suspect:
            self._notify_available()

    async def _watch_connection(self, monitor: zmq.asyncio.Socket) -> None:
        event = parse_monitor_message(await monitor.recv_multipart())
        self._pass_remaining()
        if event["event"] & HANDSHAKE_FAILED:
            why = why_handshake_failed(event, self._service_key)
            self._die(f"cannot connect: {self.address} {why}", HandshakeFailedError)
        elif self._init is not None and self._init.done():
            self._die(f"{self.address}: connection lost")
        else:
            self._die(f"{self.address}: cannot connect ({zmq.Event(event['event']).name})")

    def _pass_remaining(self) -> None:
        """Pass the messages that are still in the socket's queue to `_on_message`."""
        assert self._socket is not None
        self._pass_received()
        queue: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        with contextlib.suppress(zmq.Again):
            while self.dead_reason is None:
                self._on_message(queue.recv_multipart(zmq.NOBLOCK))

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        heartbeat = self._heartbeat
        while True:
            began = loop.time()
            self._send(EngineCoreRequestType.PING, heartbeat.begin_interval(self.num_unfinished))
            await asyncio.sleep(heartbeat.interval_s)
            heartbeat.end_interval(loop.time() - began)
            if heartbeat.is_dead(loading=self.ready is None):
                self._die(f"{self.address}: no message for {heartbeat.silence_s:.1f} s")
                return

    def _on_init(self, init: Init) -> None:
        assert self._init is not None
        if init.protocol_version != PROTOCOL_VERSION:
            self._die(
                f"{self.address} has protocol version {init.protocol_version}, "
                f"this client has version {PROTOCOL_VERSION}"
            )
        else:
            self._latest_init = init
            if not self._init.done():
                self._init.set_result(init)

    def _on_ready(self, ready: Ready) -> None:
        self.ready = ready
        if self.status is not None:  # the last PONG came before this READY
            self.status.draining, self.status.stalled_s = False, 0.0
        self._ready_event.set()
        self._ready_again()

    def _on_pong(self, pong: Pong) -> None:
        before, did_accept = self.status, self._heartbeat.accepts_requests
        self._heartbeat.record_pong(pong)
        if before is not None and pong.stalled_s < before.stalled_s and self._has_abandoned:
            did_accept = self._has_abandoned = False  # requests may be sent to this engine again
        if self._heartbeat.accepts_requests and not did_accept:
            self._ready_again()

    def _ready_again(self) -> None:
        self.ready_epoch = next(_ready_epochs)
        self._notify_available()

    def _on_refused(self, refused: RequestRefused) -> None:
        stream = self._streams.pop(refused.request_id, None)
        if stream is not None:
            stream.put(
                EngineCoreOutput(
                    refused.request_id,
                    [],
                    finish_reason=FinishReason.ERROR,
                    error=refused.reason,
                    error_code=ErrorCode.INVALID,
                )
            )
        elif self._init is not None and not self._init.done():
            self._die(f"{self.address} refused the connection: {refused.reason}")
        else:
            logger.warning(
                "engine %s refused a message (request %s): %s",
                self.address,
                refused.request_id or "-",
                refused.reason,
            )

    def _on_dead(self, dead: Dead) -> None:
        self._die(f"{self.address}: engine failed: {dead.reason}")

    def _on_outputs(self, message: EngineCoreOutputs) -> None:
        for output in message.outputs:
            stream = (
                self._streams.pop(output.request_id, None)
                if output.finished
                else self._streams.get(output.request_id)
            )
            if stream is not None:
                stream.put(output)
        if message.utility_output is not None:
            self._on_utility(message.utility_output)

    def _on_utility(self, output: UtilityOutput) -> None:
        future = self._calls.get(output.call_id)
        if future is None or future.done():
            return
        if output.failure_message is not None:
            future.set_exception(UtilityError(output.failure_message))
        else:
            future.set_result(output.result)

    def _die(self, reason: str, kind: type[EngineDeadError] = EngineDeadError) -> None:
        if self.dead_reason is not None:
            return
        self.dead_reason = reason
        self._dead_event.set()
        error = kind(reason)
        if self._init is not None and not self._init.done():
            self._init.set_exception(error)
            # If connect() was cancelled, asyncio would warn of an exception never retrieved.
            self._init.exception()
        self._end_streams(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    def _end_streams(self, error: EngineDeadError) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.put(error)

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        with contextlib.suppress(Exception):
            await self.close()
