"""Connect a WebSocket with ports of a pod, for `kubectl port-forward`.

kubectl sends SPDY/3.1 frames in the WebSocket's messages: each connection has a stream for data and
a stream for errors. Other clients use channels, as for exec: each port has a channel for data and a
channel for errors, and one connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from socket import SO_LINGER, SOL_SOCKET

import aiohttp
from aiohttp import web

from pocketkube.kubelet import spdy
from pocketkube.websockets import messages, run_until_closed

logger = logging.getLogger(__name__)

SPDY = "SPDY/3.1+portforward.k8s.io"
CHANNELS = "v4.channel.k8s.io"
PROTOCOLS = (SPDY, CHANNELS)

_READ_BYTES = 32768
#: Maximum number of the client's bytes that wait until the pod reads them, per connection. Beyond
#: it, no message of the WebSocket is read: kubectl has no flow control per connection.
_WAITING_BYTES = 2**22
#: Maximum wait for a pod that does not accept a connection or does not read. The other connections
#: of the WebSocket wait for the same time.
_STALL_S = 5.0

#: Sends bytes to the client.
Send = Callable[[bytes], Awaitable[None]]


async def forward_ports(socket: web.WebSocketResponse, address: str, ports: list[int]) -> None:
    """Forward data between `socket` and the pod until the client closes `socket`.

    With the subprotocol CHANNELS, forwarding also ends when the pod has closed all connections.

    Args:
        address: the pod's address.
        ports: the pod's ports. Each has a channel for data and a channel for errors. Not used with
            the subprotocol SPDY, where the headers of each stream contain the port.
    """
    if socket.ws_protocol == SPDY:
        await _SpdyForward(socket, address).run()
    else:
        await _forward_channels(socket, address, ports)


class _Connection:
    """A connection to a port of the pod.

    Attributes:
        has_stalled: whether the connection was reset because the pod did not read.
    """

    def __init__(self, address: str, port: int, send: Send) -> None:
        self._address = address
        self._port = port
        self._send = send
        #: Set once the connection is open or has failed.
        self._started = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._has_input_ended = False
        self.has_stalled = False

    async def put(self, data: bytes | None) -> None:
        """Send bytes to the pod. None closes the pod's input, and later bytes are dropped.

        Wait while the pod does not read. Reset the connection after `_STALL_S` without a read.
        """
        await self._started.wait()
        writer = self._writer
        if writer is None or writer.is_closing() or self._has_input_ended:
            return
        with contextlib.suppress(OSError):  # run() gets the same error
            if data is None:
                self._has_input_ended = True
                writer.write_eof()
                return
            try:
                for start in range(0, len(data), _READ_BYTES):
                    writer.write(data[start : start + _READ_BYTES])
                    async with asyncio.timeout(_STALL_S):
                        await writer.drain()
            except TimeoutError:
                self.has_stalled = True
                _reset(writer)

    async def run(self) -> str:
        """Connect, and send the pod's bytes to the client until the connection is closed or reset.

        Returns:
            An error message for the client; empty if there was no error.
        """
        try:
            async with asyncio.timeout(_STALL_S):
                reader, self._writer = await asyncio.open_connection(self._address, self._port)
        except (OSError, TimeoutError) as error:
            return self._message(error or "timed out")
        finally:
            self._started.set()
        self._writer.transport.set_write_buffer_limits(_WAITING_BYTES, _WAITING_BYTES)
        try:
            while data := await reader.read(_READ_BYTES):
                await self._send(data)
        except OSError as error:
            return self._message(error)
        finally:
            self._writer.transport.abort()
        return self._message(f"has not read for {_STALL_S:g} s") if self.has_stalled else ""

    def _message(self, error: object) -> str:
        return f"port {self._port} of the pod ({self._address}): {error}"


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with a TCP reset, so that the pod does not treat its input as complete."""
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, linger)
    writer.transport.abort()


async def _forward_channels(socket: web.WebSocketResponse, address: str, ports: list[int]) -> None:
    async def run(number: int, connection: _Connection) -> None:
        if error := await connection.run():
            await socket.send_bytes(bytes([2 * number + 1]) + error.encode())

    def sender(channel: int) -> Send:
        return lambda data: socket.send_bytes(bytes([channel]) + data)

    connections = []
    for number, port in enumerate(ports):
        for channel in (2 * number, 2 * number + 1):
            await socket.send_bytes(bytes([channel]) + port.to_bytes(2, "little"))
        connections.append(_Connection(address, port, sender(2 * number)))

    async def receive() -> None:
        async for data in messages(socket):
            number, is_error = divmod(data[0], 2) if data else (0, 1)
            if not is_error and number < len(connections):
                await connections[number].put(data[1:])

    async def forward() -> None:
        async with asyncio.TaskGroup() as group:
            for number, connection in enumerate(connections):
                group.create_task(run(number, connection))

    if await run_until_closed(socket, receive(), forward()):  # the pod has closed all connections
        await socket.close()


@dataclass(frozen=True)
class _Streams:
    """A connection, the id of its error stream, and the task that runs the connection."""

    connection: _Connection
    errors: int
    task: asyncio.Task[None]


class _SpdyForward:
    """The connections of one `kubectl port-forward`.

    For each connection, kubectl opens a stream for errors, then a stream for data. Both have the
    same header `requestid`.
    """

    def __init__(self, socket: web.WebSocketResponse, address: str) -> None:
        self._socket = socket
        self._address = address
        self._decoder = spdy.FrameDecoder()
        self._encoder = spdy.FrameEncoder()
        #: Request id -> stream of errors, until the stream of data is open.
        self._error_streams: dict[str, int] = {}
        #: Id of the stream for data -> its connection, stream for errors and task.
        self._streams: dict[int, _Streams] = {}

    async def run(self) -> None:
        """Forward until the client closes the socket."""
        try:
            async for data in messages(self._socket):
                for frame in self._decoder.feed(data):
                    await self._receive(frame)
        except spdy.SpdyError as error:
            logger.warning("port-forward to %s ends: %s", self._address, error)
            await self._socket.close(code=aiohttp.WSCloseCode.PROTOCOL_ERROR)
        finally:
            tasks = [streams.task for streams in self._streams.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, frame: spdy.Frame) -> None:
        # Frames are sent in the order in which they are encoded, because the compression of headers
        # has a state. shield() starts its tasks in that order. Without shield(), the cancellation
        # of one task would end all tasks that wait for the socket: in aiohttp they await the same
        # future.
        await asyncio.shield(self._socket.send_bytes(self._encoder.encode(frame)))

    async def _receive(self, frame: spdy.Frame) -> None:
        """Handle a frame: open or end a stream, forward data of a stream, or answer a Ping.

        Raises:
            SpdyError: the frame opens a stream without valid headers.
        """
        match frame:
            case spdy.SynStream(stream, headers):
                await self._send(spdy.SynReply(stream))
                self._open(stream, headers)
            case spdy.Data(stream, data, fin) if streams := self._streams.get(stream):
                await streams.connection.put(data)
                if fin:
                    await streams.connection.put(None)
            case spdy.RstStream(stream) if streams := self._streams.pop(stream, None):
                streams.task.cancel()
                # kubectl waits for the end of the stream for errors.
                await self._send(spdy.Data(streams.errors, b"", fin=True))
            case spdy.PingFrame():
                await self._send(frame)

    def _open(self, stream: int, headers: Mapping[str, str]) -> None:
        try:
            kind, request, port = headers["streamtype"], headers["requestid"], headers["port"]
            if kind == "error":
                self._error_streams[request] = stream
                return
            errors = self._error_streams.pop(request)
            connection = _Connection(
                self._address, int(port), lambda data: self._send(spdy.Data(stream, data))
            )
        except (KeyError, ValueError) as error:
            raise spdy.SpdyError(f"stream {stream} has the headers {headers}: {error!r}") from error
        task = asyncio.create_task(self._run(stream, connection, errors))
        self._streams[stream] = _Streams(connection, errors, task)

    async def _run(self, stream: int, connection: _Connection, errors: int) -> None:
        message = await connection.run()
        end: spdy.Frame = spdy.Data(stream, b"", fin=True)
        if connection.has_stalled:
            # On an error message, kubectl would end with all its connections.
            logger.warning(
                "port-forward resets a connection because the pod does not read: %s", message
            )
            message, end = "", spdy.RstStream(stream, spdy.CANCEL)
        with contextlib.suppress(ConnectionError):  # the client has disconnected
            await self._send(spdy.Data(errors, message.encode(), fin=True))
            await self._send(end)
        self._streams.pop(stream, None)
