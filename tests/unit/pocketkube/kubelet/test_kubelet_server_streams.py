"""exec, attach and port-forward of the kubelet's server, over WebSockets."""

import asyncio
import contextlib
import json
import os
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import psutil
import pytest

from pocketkube.certificates import Certificates, create_certificates
from pocketkube.containers import exec_process
from pocketkube.containers.container_log import ContainerLog
from pocketkube.containers.process import ContainerProcess, container_pids, spawn
from pocketkube.kubelet import port_forward, spdy, stats_summary
from pocketkube.kubelet.kubelet_server import KubeletServer
from support.pocketkube.flood import flooding
from support.waiting import until

V4, V5 = "v4.channel.k8s.io", "v5.channel.k8s.io"
SUCCESS = {"metadata": {}, "status": "Success"}


class Kubelet:
    """A kubelet's server with one pod, and a client."""

    def __init__(
        self, server: str, session: aiohttp.ClientSession, container: ContainerProcess
    ) -> None:
        self.server = server
        self.session = session
        self.container = container

    async def connect(
        self, path: str, protocol: str, query: Iterable[tuple[str, str]] = ()
    ) -> aiohttp.ClientWebSocketResponse:
        return await self.session.ws_connect(
            self.server + path, protocols=[protocol], params=list(query)
        )

    async def exec(
        self, *argv: str, protocol: str = V5, streams: str = "output error"
    ) -> aiohttp.ClientWebSocketResponse:
        query = [*(("command", word) for word in argv), *((name, "1") for name in streams.split())]
        return await self.connect("/exec/ns/p/main", protocol, query)


async def channels(socket: aiohttp.ClientWebSocketResponse) -> dict[int, bytes]:
    """Read until the server closes the socket. Return the bytes of each channel."""
    received: dict[int, bytes] = {}
    async with asyncio.timeout(30):
        async for message in socket:
            number = message.data[0]
            received[number] = received.get(number, b"") + message.data[1:]
    assert socket.close_code == aiohttp.WSCloseCode.OK
    return received


def client_context(cluster: Certificates | None) -> ssl.SSLContext:
    """Return the TLS context of an API server; None: of another client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if cluster is not None:
        context.load_cert_chain(cluster.client_certificate, cluster.client_key)
    return context


@pytest.fixture
async def kubelet(
    container: tuple[ContainerProcess, ContainerLog], tmp_path: Path
) -> AsyncIterator[Kubelet]:
    process, log = container
    worker: Any = SimpleNamespace(
        pod={"metadata": {"namespace": "ns", "name": "p", "uid": "u"}},
        runners={
            "main": SimpleNamespace(process=process),
            "ended": SimpleNamespace(process=None),
        },
        runtime=SimpleNamespace(
            pod_ip="127.0.0.1", main={"main": SimpleNamespace(container_id="process://some-id")}
        ),
        log=lambda name, previous: (log.path, log),
    )
    cluster = create_certificates(tmp_path / "cluster", [])
    server = KubeletServer("n", {"uid": worker}, cluster.authority.read_bytes())
    port = await server.start("127.0.0.1")
    connector = aiohttp.TCPConnector(ssl=client_context(cluster))
    async with aiohttp.ClientSession(connector=connector) as session:
        yield Kubelet(f"https://127.0.0.1:{port}", session, process)
    await server.stop()


async def test_a_command_has_the_environment_and_folder_of_the_container(kubelet: Kubelet) -> None:
    socket = await kubelet.exec("sh", "-c", "echo $COLOUR; pwd; echo oops >&2; exit 3")
    received = await channels(socket)
    assert received[1].decode().splitlines() == ["green", str(kubelet.container.cwd)]
    assert received[2] == b"oops\n"
    status = json.loads(received[3])
    assert (status["status"], status["reason"]) == ("Failure", "NonZeroExitCode")
    assert status["details"]["causes"] == [{"reason": "ExitCode", "message": "3"}]


@pytest.mark.parametrize("has_certificate", [False, True])
async def test_clients_without_a_certificate_of_the_cluster_are_refused(
    kubelet: Kubelet, tmp_path: Path, has_certificate: bool
) -> None:
    other = create_certificates(tmp_path / "other", []) if has_certificate else None
    connector = aiohttp.TCPConnector(ssl=client_context(other))
    async with aiohttp.ClientSession(connector=connector) as session:
        for path in (
            "/containerLogs/ns/p/main",
            "/exec/ns/p/main?command=id&output=1",
            "/stats/summary",
        ):
            with pytest.raises(aiohttp.ClientError):
                await session.get(kubelet.server + path)


async def test_the_summary_has_the_usage_of_the_running_container(
    kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats_summary, "WINDOW_S", 0.01)
    async with kubelet.session.get(f"{kubelet.server}/stats/summary") as response:
        summary = await response.json()
    assert summary["node"]["nodeName"] == "n"
    [pod] = summary["pods"]
    assert pod["podRef"] == {"namespace": "ns", "name": "p", "uid": "u"}
    [container] = pod["containers"]
    assert container["name"] == "main"
    assert 0 < container["memory"]["workingSetBytes"] < summary["node"]["memory"]["workingSetBytes"]


async def test_standard_input_ends_with_the_close_message_of_v5(kubelet: Kubelet) -> None:
    socket = await kubelet.exec("cat", streams="input output")
    sent = os.urandom(300_000)
    for start in range(0, len(sent), 50_000):
        await socket.send_bytes(b"\0" + sent[start : start + 50_000])
    await socket.send_bytes(b"\xff\0")
    received = await channels(socket)
    assert received[1] == sent
    assert json.loads(received[3]) == SUCCESS


async def test_v4_clients_may_send_text(kubelet: Kubelet) -> None:
    socket = await kubelet.exec("head", "-n1", protocol=V4, streams="input output")
    assert socket.protocol == V4
    await socket.send_str("\0hello\n")
    assert await channels(socket) == {1: b"hello\n", 3: json.dumps(SUCCESS).encode()}


async def test_input_after_the_end_of_standard_input_is_dropped(kubelet: Kubelet) -> None:
    script = "exec <&-; echo closed; while [ ! -e go ]; do sleep 0.02; done"
    socket = await kubelet.exec("sh", "-c", script, streams="input output")
    assert (await socket.receive(timeout=30)).data == b"\1closed\n"
    for _ in range(3):
        await socket.send_bytes(b"\0" + bytes(200_000))
    (kubelet.container.cwd / "go").touch()
    assert json.loads((await channels(socket))[3]) == SUCCESS


async def test_a_terminal_has_a_size_and_one_output(kubelet: Kubelet) -> None:
    script = "test -t 0 && test -t 2 && echo $TERM; read x; stty size; echo also >&2; exit 4"
    socket = await kubelet.exec("sh", "-c", script, streams="input output error tty")
    assert (await socket.receive(timeout=30)).data == b"\1xterm\r\n"
    await socket.send_bytes(b"\4not a size")
    await socket.send_bytes(b"\4" + json.dumps({"Width": 91, "Height": 17}).encode())
    await socket.send_bytes(b"\0\n")
    received = await channels(socket)
    assert received[1].split() == [b"17", b"91", b"also"]
    assert 2 not in received
    assert json.loads(received[3])["details"]["causes"][0]["message"] == "4"


async def test_control_c_reaches_the_command_in_a_terminal(kubelet: Kubelet) -> None:
    script = "trap 'exit 5' INT; echo ready; while :; do sleep 0.05; done"
    socket = await kubelet.exec("sh", "-c", script, streams="input output tty")
    assert (await socket.receive(timeout=30)).data == b"\1ready\r\n"
    await socket.send_bytes(b"\0\x03")
    received = await channels(socket)
    assert json.loads(received[3])["details"]["causes"][0]["message"] == "5"


async def test_a_command_that_cannot_start_is_an_internal_error(kubelet: Kubelet) -> None:
    status = json.loads((await channels(await kubelet.exec("no-such-command")))[3])
    assert status["reason"] == "InternalError"
    assert "'no-such-command' not found" in status["message"]
    query = [("command", "true"), ("output", "1")]
    socket = await kubelet.connect("/exec/ns/p/ended", V5, query)
    assert "not running" in json.loads((await channels(socket))[3])["message"]


async def test_a_daemon_of_the_command_does_not_delay_the_exit_status(kubelet: Kubelet) -> None:
    received = await channels(await kubelet.exec("sh", "-c", "sleep 600 & echo $!"))
    assert json.loads(received[3]) == SUCCESS
    daemon = psutil.Process(int(received[1]))
    await kubelet.container.finish()
    await until(lambda: not daemon.is_running(), "the daemon ends with the container")


@pytest.mark.parametrize("child", ["yes", "sh -c 'while echo y; do sleep 0.1; done'"])
async def test_a_child_that_continues_to_write_does_not_delay_the_exit_status(
    kubelet: Kubelet, child: str
) -> None:
    received = await channels(await kubelet.exec("sh", "-c", f"{child} & echo hi >&2; exit 3"))
    assert received[2] == b"hi\n"
    assert json.loads(received[3])["details"]["causes"][0]["message"] == "3"


async def test_a_client_that_reads_late_gets_the_output_and_the_exit_status(
    kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket = await kubelet.exec("sh", "-c", "echo $$ > pid; head -c 1000000 /dev/zero; exit 3")
    file = kubelet.container.cwd / "pid"
    pid = int(await until(lambda: file.exists() and file.read_text(), "the pid of the command"))
    await until(lambda: not psutil.pid_exists(pid), "the command has ended")
    loop, clock = asyncio.get_running_loop(), asyncio.get_running_loop().time
    for minutes in (1, 2):
        for _ in range(100):
            await asyncio.sleep(0)
        monkeypatch.setattr(loop, "time", lambda minutes=minutes: clock() + minutes * 60)
    received = await channels(socket)
    assert received[1] == bytes(1_000_000)
    assert json.loads(received[3])["details"]["causes"][0]["message"] == "3"


async def test_a_client_that_leaves_ends_its_command(kubelet: Kubelet) -> None:
    socket = await kubelet.exec("sh", "-c", "sleep 600 & echo $$ $!; wait")
    pids = [int(pid) for pid in (await socket.receive(timeout=30)).data[1:].split()]
    commands = [psutil.Process(pid) for pid in pids]
    assert container_pids()["process://some-id"] == kubelet.container.pid
    await socket.close()
    await until(lambda: not any(c.is_running() for c in commands), "the command has ended")
    assert kubelet.container.is_running


async def test_a_client_that_leaves_during_the_start_ends_its_command(
    kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def spawn_and_leave(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        popen = spawn(*arguments, **options)
        commands.append(psutil.Process(popen.pid))
        asyncio.current_task().cancel()  # as aiohttp does when the client disconnects
        return popen

    monkeypatch.setattr(exec_process, "spawn", spawn_and_leave)
    await kubelet.exec("sleep", "600", streams="input output error")
    await until(lambda: commands and not commands[0].is_running(), "the command has ended")


async def test_a_client_that_leaves_while_the_command_reads_no_input_ends_it(
    kubelet: Kubelet,
) -> None:
    script = "sleep 600 & echo $$ $!; wait"
    socket = await kubelet.exec("sh", "-c", script, streams="input output")
    pids = [int(pid) for pid in (await socket.receive(timeout=30)).data[1:].split()]
    commands = [psutil.Process(pid) for pid in pids]
    async with flooding(socket):
        await kubelet.session.close()  # without a close message
        await until(lambda: not any(c.is_running() for c in commands), "the command has ended")


async def test_attach_follows_the_output_of_the_container(
    kubelet: Kubelet, container: tuple[ContainerProcess, ContainerLog]
) -> None:
    _, log = container
    log.feed("stdout", b"before\n")
    socket = await kubelet.connect("/attach/ns/p/main", V5, [("output", "1")])

    async def received() -> bytes:
        log.feed("stderr", b"again\n")  # until the server follows the log
        try:
            return (await socket.receive(timeout=0.05)).data
        except TimeoutError:
            return b""

    assert await until(received, "a line") == b"\1again\n"
    log.close()
    assert json.loads((await channels(socket))[3]) == SUCCESS


async def test_requests_without_a_known_pod_command_or_protocol_are_refused(
    kubelet: Kubelet,
) -> None:
    for path, protocol, status in (
        ("/exec/ns/other/main?command=true", V5, 404),
        ("/exec/ns/p/main", V5, 400),
        ("/exec/ns/p/main?command=true", "v9.channel.k8s.io", 400),
        ("/portForward/ns/p?port=http", V4, 400),
    ):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await kubelet.connect(path, protocol)
        assert refused.value.status == status, path


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
    monkeypatch.setattr(port_forward, "_STALL_S", 0.5)
    num_read: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def read_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
