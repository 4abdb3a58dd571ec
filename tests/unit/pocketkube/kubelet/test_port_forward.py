"""port-forward over WebSockets, also with the SPDY streams of kubectl."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from socket import SO_RCVBUF, SOL_SOCKET

import aiohttp
import pytest

from pocketkube.kubelet import port_forward, spdy
from support.pocketkube.kubelet_client import V4, Kubelet, channels
from support.waiting import until


@pytest.fixture
async def listen() -> AsyncIterator[Callable[..., Awaitable[int]]]:
    """Return a function that starts a TCP server and returns its port."""
    servers: list[asyncio.Server] = []

    async def start(handle: Callable[..., Awaitable[None]]) -> int:
        servers.append(await asyncio.start_server(handle, "127.0.0.1", 0))
        return int(servers[-1].sockets[0].getsockname()[1])

    yield start
    for server in servers:
        server.close()


async def upper(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data.upper())
    writer.write(b" END")
    writer.close()


async def one_line(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.readline())
    writer.close()


async def test_each_port_has_channels_for_data_and_errors(
    kubelet: Kubelet, listen: Callable[..., Awaitable[int]]
) -> None:
    ports = [await listen(one_line), await listen(one_line), 1]
    query = [("port", str(port)) for port in ports]
    socket = await kubelet.connect("/portForward/ns/p", V4, query)
    await socket.send_bytes(b"\2two\n")
    await socket.send_bytes(b"\0one\n")
    received = await channels(socket)
    for channel in range(6):
        port = ports[channel // 2].to_bytes(2, "little")
        assert received[channel][:2] == port
    data = [received[channel][2:] for channel in range(6)]
    assert data[:5] == [b"one\n", b"", b"two\n", b"", b""]
    assert data[5].startswith(b"port 1 of the pod")


class SpdyClient:
    """The client's end of a port-forward of kubectl."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self._encoder = spdy.FrameEncoder()
        self._decoder = spdy.FrameDecoder()
        self.received: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.replied: set[int] = set()
        self.reset: set[int] = set()
        self.pings: list[int] = []

    async def send(self, *frames: spdy.Frame, size: int = 10**6) -> None:
        """Send the frames in messages of `size` bytes."""
        data = b"".join(map(self._encoder.encode, frames))
        async with asyncio.timeout(30):
            for start in range(0, len(data), size):
                await self.socket.send_bytes(data[start : start + size])

    async def open(self, data: int, errors: int, port: int) -> None:
        headers = {"port": str(port), "requestid": str(data)}
        await self.send(
            spdy.SynStream(errors, {**headers, "streamtype": "error"}),
            spdy.Data(errors, b"", fin=True),
            spdy.SynStream(data, {**headers, "streamtype": "data"}),
            size=7,
        )

    async def until_ended(self, *streams: int) -> None:
        async with asyncio.timeout(30):
            while not (self.ended | self.reset).issuperset(streams):
                for frame in self._decoder.feed(await self.socket.receive_bytes()):
                    match frame:
                        case spdy.Data(stream, data, fin):
                            self.received[stream] = self.received.get(stream, b"") + data
                            if fin:
                                self.ended.add(stream)
                        case spdy.RstStream(stream):
                            self.reset.add(stream)
                        case spdy.SynReply(stream):
                            self.replied.add(stream)
                        case spdy.PingFrame(number):
                            self.pings.append(number)


@pytest.fixture
async def tunnel(kubelet: Kubelet) -> SpdyClient:
    protocol = "SPDY/3.1+portforward.k8s.io"
    return SpdyClient(await kubelet.connect("/portForward/ns/p", protocol))


async def test_connections_of_kubectl_are_streams_of_spdy(
    tunnel: SpdyClient, listen: Callable[..., Awaitable[int]]
) -> None:
    port = await listen(upper)
    await tunnel.open(3, 1, port)
    await tunnel.open(7, 5, port)
    text = b"abcdefgh" * 50_000
    await tunnel.send(
        spdy.PingFrame(9), spdy.Data(7, b"xy"), spdy.Data(3, text), spdy.Data(7, b"z")
    )
    await tunnel.send(spdy.Data(3, b"", fin=True), spdy.Data(7, b"", fin=True))
    await tunnel.until_ended(1, 3, 5, 7)
    assert tunnel.received == {1: b"", 3: text.upper() + b" END", 5: b"", 7: b"XYZ END"}
    assert (tunnel.replied, tunnel.pings) == ({1, 3, 5, 7}, [9])


async def test_a_port_that_refuses_is_an_error_of_its_connection_only(
    tunnel: SpdyClient, listen: Callable[..., Awaitable[int]]
) -> None:
    await tunnel.open(3, 1, 1)
    await tunnel.until_ended(1, 3)
    assert tunnel.received[1].startswith(b"port 1 of the pod")
    await tunnel.open(7, 5, await listen(one_line))
    await tunnel.send(spdy.Data(7, b"line\n"))
    await tunnel.until_ended(5, 7)
    assert (tunnel.received[5], tunnel.received[7]) == (b"", b"line\n")


async def test_a_reset_stream_closes_its_connection(
    tunnel: SpdyClient, listen: Callable[..., Awaitable[int]]
) -> None:
    connected, closed = asyncio.Event(), asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await reader.read()
        closed.set()
        writer.close()

    await tunnel.open(3, 1, await listen(handle))
    async with asyncio.timeout(30):
        await connected.wait()
        await tunnel.send(spdy.RstStream(3, 5))
        await tunnel.until_ended(1)
        await closed.wait()


async def test_a_connection_whose_pod_does_not_read_does_not_stop_the_others(
    tunnel: SpdyClient, listen: Callable[..., Awaitable[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_forward, "_STALL_S", 0.5)
    errors: asyncio.Queue[Exception] = asyncio.Queue()
    reads = asyncio.Event()

    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reads.wait()
        try:
            await reader.read()
        except ConnectionError as error:
            await errors.put(error)
        writer.close()

    await tunnel.open(3, 1, await listen(stall))
    await tunnel.open(7, 5, await listen(one_line))
    await tunnel.send(*[spdy.Data(3, bytes(2**19))] * 64)  # more than all buffers hold
    await tunnel.send(spdy.Data(7, b"line\n"))
    await tunnel.until_ended(1, 3, 5, 7)
    assert (tunnel.reset, tunnel.received) == ({3}, {1: b"", 5: b"", 7: b"line\n"})
    reads.set()
    async with asyncio.timeout(30):
        assert isinstance(await errors.get(), ConnectionResetError)


async def test_a_pod_that_reads_slowly_is_not_reset(
    listen: Callable[..., Awaitable[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_forward, "_STALL_S", 1.0)
    num_read: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def read_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # With a small buffer, the kernel takes more bytes after each read, not after many reads.
        writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_RCVBUF, 2**17)
        total = 0
        while part := await reader.read(2**20):
            total += len(part)
            await asyncio.sleep(0.1 * len(part) / 2**20)  # 10 MiB/s
        num_read.set_result(total)
        writer.close()

    async def ignore(_: bytes) -> None:
        """The pod sends nothing."""

    connection = port_forward._Connection("127.0.0.1", await listen(read_slowly), ignore)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(connection.run())
        await connection.put(bytes(3 * 2**23))
        await connection.put(None)
        assert (connection.has_stalled, await num_read) == (False, 3 * 2**23)


async def test_data_after_the_end_of_a_stream_is_dropped(
    tunnel: SpdyClient, listen: Callable[..., Awaitable[int]]
) -> None:
    answers = asyncio.Event()

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received = await reader.read()
        await answers.wait()
        writer.write(b"%d" % len(received))
        writer.close()

    await tunnel.open(3, 1, await listen(count))
    await tunnel.send(spdy.Data(3, b"ab", fin=True), *[spdy.Data(3, b"c")] * 100)
    await tunnel.open(7, 5, await listen(one_line))
    await tunnel.send(spdy.Data(7, b"line\n"))
    await tunnel.until_ended(5, 7)
    answers.set()
    await tunnel.until_ended(1, 3)
    assert tunnel.received == {1: b"", 3: b"2", 5: b"", 7: b"line\n"}


async def test_a_reset_stream_does_not_end_others_while_the_client_does_not_read(
    tunnel: SpdyClient, listen: Callable[..., Awaitable[int]]
) -> None:
    sent = [0, 0]

    def sender(number: int) -> Callable[..., Awaitable[None]]:
        async def send(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                for _ in range(256):
                    writer.write(bytes(2**16))
                    await writer.drain()
                    sent[number] += 1
            writer.close()

        return send

    await tunnel.open(3, 1, await listen(sender(0)))
    await tunnel.open(7, 5, await listen(sender(1)))
    seen: list[int] = []

    def are_stalled() -> bool:
        before, seen[:] = seen[:], sent
        return before == seen

    await until(are_stalled, "both connections wait for the client", every_s=0.5)
    await tunnel.send(spdy.RstStream(3, spdy.CANCEL))
    await tunnel.until_ended(1, 5, 7)
    assert len(tunnel.received[7]) == 2**24


async def test_invalid_frames_and_headers_end_the_tunnel(kubelet: Kubelet) -> None:
    bad = spdy.FrameEncoder().encode(spdy.SynStream(1, {"streamtype": "data", "port": "80"}))
    for data in (b"\x80\2\0\6\0\0\0\4\0\0\0\1", bad):
        socket = await kubelet.connect("/portForward/ns/p", "SPDY/3.1+portforward.k8s.io")
        await socket.send_bytes(data)
        async with asyncio.timeout(30):
            async for _ in socket:
                pass
        assert socket.close_code == aiohttp.WSCloseCode.PROTOCOL_ERROR
