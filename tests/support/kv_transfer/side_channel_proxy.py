"""A man in the middle of the KV side channel: sees every message, and may hold, drop, replace or add one at an exact point.

It relays TCP between a consumer's DEALER and a producer's ROUTER and reads ZMTP (https://rfc.zeromq.org/spec/23) only as far as it
must to find messages. So what else the two see of each other stays true: a closed connection closes on the other side, too, and
ZMQ's own heartbeats pass even where messages are held.
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
    HOLD = enum.auto()
    """It waits for `release`, and whatever follows it in its direction, too."""


@dataclass(eq=False)
class Passing:
    """A message on its way."""

    connection: Connection
    message: ToProducer | ToConsumer | None
    """None: nothing that the side channel knows."""
    frame: bytes
    """The message as it was sent."""
    to_producer: bool


Hook = Callable[[Passing], Verdict]


@dataclass(eq=False)
class Connection:
    """Of one consumer's DEALER."""

    proxy: SideChannelProxy
    consumer: asyncio.StreamWriter
    producer: asyncio.StreamWriter
    held: dict[bool, list[bytes]] = field(default_factory=lambda: {True: [], False: []})
    """By direction: what waits, as ZMTP."""

    def inject(self, frame: bytes, *, to_producer: bool) -> None:
        """Sends a message that nobody sent, now."""
        self.proxy.call(self._write, _zmtp(frame), to_producer)

    def release(self) -> None:
        """Sends on what is held."""
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
    """Listens on a free port of `host`; `address` is what a consumer is told instead of the producer's address.

    A producer names its engine's workers to the consumer. They get proxies of their own, so that nobody is reached around this one.
    """

    def __init__(
        self, host: str, producer: tuple[str, int], hook: Hook = lambda passing: Verdict.PASS
    ) -> None:
        """
        Args:
            producer: host and port of its first worker's side channel.
            hook: sees every message before it goes on and says what becomes of it. The proxy's thread calls it.
        """
        self.host = host
        self.hook = hook
        self.seen: list[Passing] = []
        """In order; appended to before the hook is called."""
        self.failure: BaseException | None = None
        """What a hook raised first."""
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
        """Those of one kind that came by."""
        return [passing for passing in list(self.seen) if isinstance(passing.message, kind)]

    def release(self) -> None:
        """Sends on what is held."""
        for connection in list(self._connections):
            connection.release()

    def reset(self) -> None:
        """Ends all connections and forgets what came by."""
        self.call(self._reset)

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """In the proxy's thread; returns when it is done, or at once within a hook."""
        if threading.current_thread() is self._thread:
            function(*args)
            return

        async def wrapped() -> None:
            function(*args)

        self.run(wrapped())

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def close(self) -> None:
        """Ends all connections and the thread. Raises what a hook raised."""
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
        """One direction, until its sender closes it."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            left = GREETING_BYTES
            while left:  # in pieces: the second half answers the first
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
        frame = passing.frame  # a hook may have replaced it
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
        assert isinstance(description, side_channel.Description)
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
