"""Connect a WebSocket with ports of a pod, for `kubectl port-forward`.

kubectl sends SPDY/3.1 frames in the WebSocket's messages: each connection has a stream for data and
a stream for errors. Other clients use channels, as for exec: each port has a channel for data and a
channel for errors, and one connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from pocketkube.kubelet import spdy
from pocketkube.websockets import messages, run_until_closed

logger = logging.getLogger(__name__)

SPDY = "SPDY/3.1+portforward.k8s.io"
CHANNELS = "v4.channel.k8s.io"
PROTOCOLS = (SPDY, CHANNELS)

_READ_BYTES = 32768
_CONNECT_S = 10.0
#: Messages of the client that wait for the pod, per connection. A full queue stops the WebSocket.
_WAITING = 16

#: Sends bytes to the client.
Send = Callable[[bytes], Awaitable[None]]


async def forward_ports(socket: web.WebSocketResponse, address: str, ports: list[int]) -> None:
    """Forward until the client closes `socket`.

    Args:
        address: the pod's address.
        ports: the ports of the channels. With SPDY, each stream has its port.
    """
    if socket.ws_protocol == SPDY:
        await _SpdyForward(socket, address).run()
    else:
        await _forward_channels(socket, address, ports)


class _Connection:
    """A connection to a port of the pod."""

    def __init__(self, address: str, port: int, send: Send) -> None:
        self._address = address
        self._port = port
        self._send = send
        #: Bytes for the pod; None for their end.
        self._input: asyncio.Queue[bytes | None] = asyncio.Queue(_WAITING)
        self._has_ended = False

    async def put(self, data: bytes | None) -> None:
        """Send bytes to the pod; None ends them. Wait while the pod does not read."""
        if not self._has_ended:
            await self._input.put(data)

    async def run(self) -> str:
        """Copy bytes in both directions until the pod closes the connection.

        Returns:
            An error message for the client; empty if there was no error.
        """
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(self._address, self._port)
            writing = asyncio.create_task(self._write(writer))
            try:
                while data := await reader.read(_READ_BYTES):
                    await self._send(data)
            finally:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
                writer.close()
        except (OSError, TimeoutError) as error:
            return f"port {self._port} of the pod ({self._address}): {error or 'timed out'}"
        finally:
            self._has_ended = True
            while not self._input.empty():  # put() may wait for a place in the queue
                self._input.get_nowait()
        return ""

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # the reader gets the same error
            while (data := await self._input.get()) is not None:
                writer.write(data)
                await writer.drain()
            writer.write_eof()


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
    """A connection with its two streams, and the task that runs it."""

    connection: _Connection
    errors: int
    task: asyncio.Task[None]


class _SpdyForward:
    """The connections of one kubectl.

    kubectl opens a stream for errors, then a stream for data with the same header `requestid`.
    """

    def __init__(self, socket: web.WebSocketResponse, address: str) -> None:
        self._socket = socket
        self._address = address
        self._decoder = spdy.FrameDecoder()
        self._encoder = spdy.FrameEncoder()
        #: Request id -> stream of errors, until the stream of data is open.
        self._error_streams: dict[str, int] = {}
        #: By the stream of data.
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
        # The compression of headers needs the order of the calls. No other task runs between
        # encode() and the write in send_bytes().
        await self._socket.send_bytes(self._encoder.encode(frame))

    async def _receive(self, frame: spdy.Frame) -> None:
        """Open, feed or end a stream, or answer a Ping, as the client's frame requests.

        Raises:
            SpdyError: the frame opens a stream without valid headers.
        """
        match frame:
            case spdy.SynStream(stream, headers):
                await self._send(spdy.SynReply(stream))
                self._open(stream, headers)
            case spdy.Data(stream, data, fin) if streams := self._streams.get(stream):
                if data:
                    await streams.connection.put(data)
                if fin:
                    await streams.connection.put(None)
            case spdy.RstStream(stream) if streams := self._streams.pop(stream, None):
                streams.task.cancel()
                # kubectl waits for the end of this stream.
                await self._send(spdy.Data(streams.errors, b"", fin=True))
            case spdy.Ping():
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
        with contextlib.suppress(ConnectionError):  # the client has disconnected
            await self._send(spdy.Data(errors, message.encode(), fin=True))
            await self._send(spdy.Data(stream, b"", fin=True))
        self._streams.pop(stream, None)
