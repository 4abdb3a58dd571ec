"""A proxy of the KV side channel that can hold, drop, replace or inject messages.

For the chaos tests of the hand-off.

The proxy relays TCP between a consumer's DEALER and a producer's ROUTER. It parses ZMTP
(https://rfc.zeromq.org/spec/23) only to find messages. A closed connection is therefore also closed
on the other side, and ZMQ's own heartbeats pass while messages are held.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton_kv_transfer import side_channel
from baton_kv_transfer.side_channel import ToConsumer, ToProducer

GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4


class Verdict(enum.Enum):
    PASS = enum.auto()
    DROP = enum.auto()
    #: The message and all later messages in its direction wait for `release`.
    HOLD = enum.auto()


@dataclass(eq=False)
class Passing:
    """A message in transit."""

    connection: Connection
    #: None if it is not a message of the side channel.
    message: ToProducer | ToConsumer | None
    #: The encoded message.
    frame: bytes
    to_producer: bool


Hook = Callable[[Passing], Verdict]


@dataclass(eq=False)
class Connection:
    """The connection of one consumer's DEALER."""

    proxy: SideChannelProxy
    consumer: asyncio.StreamWriter
    producer: asyncio.StreamWriter
    #: Held ZMTP data by direction.
    held: dict[bool, list[bytes]] = field(default_factory=lambda: {True: [], False: []})

    def inject(self, frame: bytes, *, to_producer: bool) -> None:
        """Send a forged message immediately."""
        self.proxy.call(self._write, _zmtp(frame), to_producer)

    def release(self) -> None:
        """Forward the held messages."""
        self.proxy.call(self._release)

    def close(self) -> None:
        self.proxy.call(self.abort)

    def abort(self) -> None:
        for writer in (self.consumer, self.producer):
            with contextlib.suppress(OSError, RuntimeError):
                writer.close()

    def _release(self) -> None:
        for to_producer, waiting in self.held.items():
            for data in waiting:
                self._write(data, to_producer)
            waiting.clear()

    def _write(self, data: bytes, to_producer: bool) -> None:
        writer = self.producer if to_producer else self.consumer
        if not writer.is_closing():
            writer.write(data)


class SideChannelProxy:
    """A proxy on a free port of `host`. Consumers use `address` instead of the producer's address.

    A producer lists all workers of its engine. The proxy also listens for each of these workers, so
    that no connection bypasses the proxy.
    """

    def __init__(
        self, host: str, producer: tuple[str, int], hook: Hook = lambda passing: Verdict.PASS
    ) -> None:
        """Start the proxy.

        Args:
            producer: host and port of the side channel of the producer's first worker.
            hook: called in the proxy's thread with every message. Returns the message's verdict.
        """
        self.host = host
        self.hook = hook
        #: All messages in order, including the one passed to the hook.
        self.seen: list[Passing] = []
        #: The first exception of a hook.
        self.failure: BaseException | None = None
        self._ports: dict[tuple[str, int], int] = {}
        self._connections: list[Connection] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="side-channel-proxy", daemon=True
        )
        self._thread.start()
        self.port = self.run(self._listen(producer))

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    def messages(self, kind: type[Any]) -> list[Passing]:
        """Return all messages of type `kind` that have reached the proxy."""
        return [passing for passing in list(self.seen) if isinstance(passing.message, kind)]

    def release(self) -> None:
        """Forward the held messages."""
        for connection in list(self._connections):
            connection.release()

    def reset(self) -> None:
        """Close all connections and clear `seen`."""
        self.call(self._reset)

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function in the proxy's thread and wait for it."""
        if threading.current_thread() is self._thread:
            function(*args)
            return

        async def wrapped() -> None:
            function(*args)

        self.run(wrapped())

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def close(self) -> None:
        """Close all connections and end the thread. Raise the first exception of a hook, if any."""
        if not self._thread.is_alive():
            return
        self.run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        if self.failure is not None:
            raise self.failure

    # In the proxy's thread

    async def _listen(self, producer: tuple[str, int]) -> int:
        if producer not in self._ports:

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await self._serve(reader, writer, producer)

            server = await asyncio.start_server(serve, self.host, 0)
            self._ports[producer] = server.sockets[0].getsockname()[1]
        return self._ports[producer]

    async def _serve(
        self,
        from_consumer: asyncio.StreamReader,
        consumer: asyncio.StreamWriter,
        address: tuple[str, int],
    ) -> None:
        try:
            from_producer, producer = await asyncio.open_connection(*address)
        except OSError:
            consumer.close()
            return
        connection = Connection(self, consumer, producer)
        self._connections.append(connection)
        pumps = [
            asyncio.create_task(self._pump(from_consumer, connection, to_producer=True)),
            asyncio.create_task(self._pump(from_producer, connection, to_producer=False)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        connection.abort()
        await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self, reader: asyncio.StreamReader, connection: Connection, *, to_producer: bool
    ) -> None:
        """Relay one direction of a connection until its sender closes the connection."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            left = GREETING_BYTES
            while left:  # in parts, because the second half responds to the first
                greeting = await reader.read(left)
                if not greeting:
                    return
                left -= len(greeting)
                connection._write(greeting, to_producer)
            body = b""
            while True:
                flags = (await reader.readexactly(1))[0]
                size = int.from_bytes(await reader.readexactly(8 if flags & LONG else 1), "big")
                part = await reader.readexactly(size)
                if flags & COMMAND:
                    connection._write(_zmtp(part, flags), to_producer)
                    continue
                body += part
                if not flags & MORE:
                    await self._message(connection, body, to_producer=to_producer)
                    body = b""

    async def _message(self, connection: Connection, frame: bytes, *, to_producer: bool) -> None:
        message: ToProducer | ToConsumer | None = None
        with contextlib.suppress(msgspec.DecodeError):
            decode: Any = (
                side_channel.decode_to_producer if to_producer else side_channel.decode_to_consumer
            )
            message = decode(frame)
        passing = Passing(connection, message, frame, to_producer)
        self.seen.append(passing)
        try:
            verdict = self.hook(passing)
        except BaseException as error:
            self.failure = self.failure or error
            verdict = Verdict.PASS
        frame = passing.frame  # a hook may have changed it
        if (
            isinstance(message, side_channel.Description)
            and verdict is not Verdict.DROP
            and message.ranks
        ):
            frame = await self._reroute(side_channel.decode_to_consumer(frame))
        if verdict is Verdict.HOLD or (verdict is Verdict.PASS and connection.held[to_producer]):
            connection.held[to_producer].append(_zmtp(frame))
        elif verdict is Verdict.PASS:
            connection._write(_zmtp(frame), to_producer)

    async def _reroute(self, description: ToConsumer) -> bytes:
        ranks = [
            msgspec.structs.replace(
                rank, host=self.host, port=await self._listen((rank.host, rank.port))
            )
            for rank in description.ranks
        ]
        return side_channel.encode(msgspec.structs.replace(description, ranks=ranks))

    def _reset(self) -> None:
        for connection in self._connections:
            connection.abort()
        self._connections.clear()
        self.seen.clear()

    async def _end(self) -> None:
        self._reset()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def _zmtp(body: bytes, flags: int = 0) -> bytes:
    flags &= ~(LONG | MORE)
    if len(body) > 255:
        return bytes([flags | LONG]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, len(body)]) + body
