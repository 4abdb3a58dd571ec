"""Connections of clients are counted and timed before they cost anything."""

from __future__ import annotations

import asyncio
import gzip
import logging
import resource
import socket
import ssl
import threading
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from baton_gateway import server
from baton_gateway.access import auth_delays
from baton_gateway.cli import main
from baton_gateway.http import connections
from baton_gateway.http.connections import connection_limit
from baton_protocol.options.config import AccessConfig
from support.gateway.certificates import write_certificate
from support.gateway.fake_engine import DEADLINE_S
from support.gateway.gateway_rig import GatewayRig, MakeRig
from support.waiting import until

GET = b"GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n"
STREAM = {"model": "m", "prompt": "go", "max_tokens": 50, "stream": True}
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SWEEP_S", 0.05)


@asynccontextmanager
async def connect(rig: GatewayRig) -> AsyncIterator[Pair]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.url.rsplit(":", 1)[1]))
    try:
        yield reader, writer
    finally:
        writer.close()


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Wait until the gateway closes the connection. Return whether it sent nothing before."""
    async with asyncio.timeout(DEADLINE_S):
        try:
            return await reader.read() == b""
        except ConnectionResetError:
            return True


async def answer(pair: Pair) -> bytes:
    """Send a request over the connection, and return the first line of the response."""
    reader, writer = pair
    writer.write(GET)
    async with asyncio.timeout(DEADLINE_S):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
    return head.splitlines()[0]


def closed(rig: GatewayRig, reason: str) -> float:
    return rig.metric("baton:gateway_closed_connections_total", reason=reason)


async def test_an_unread_compressed_body_is_not_decompressed(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 2 * DEADLINE_S)
    await rig.start(rig.engine("d", "decode"))
    zeros = gzip.compress(bytes(2**24))
    head = f"Content-Encoding: gzip\r\nContent-Length: {len(zeros) + 1}\r\n\r\n".encode()
    async with connect(rig) as (reader, writer):
        writer.write(GET.removesuffix(b"\r\n") + head + zeros)
        async with asyncio.timeout(DEADLINE_S):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            with suppress(ConnectionResetError):
                await reader.read()


async def test_a_connection_that_sends_nothing_is_closed(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.2)
    await rig.start(rig.engine("d", "decode"))
    async with connect(rig) as (reader, _):
        assert await is_closed(reader)
    assert closed(rig, "timeout") == 1
    await until(lambda: not rig.metric("baton:gateway_connections"), "no connection counted")


async def test_a_head_that_arrives_byte_by_byte_has_a_deadline(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.5)
    await rig.start(rig.engine("d", "decode"))
    async with connect(rig) as pair:
        reader, writer = pair
        assert b"200" in await answer(pair)  # the head of a later request has a deadline too
        end = asyncio.create_task(is_closed(reader))
        writer.write(b"GET /v1/models HTTP/1.1\r\nX-Slow: ")

        async def is_ended() -> bool:
            writer.write(b"a")
            return end.done()

        await until(is_ended, "the end of the slow head")
        assert await end
    assert closed(rig, "timeout") == 1


async def test_an_idle_connection_is_closed_after_the_keep_alive_time(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "KEEP_ALIVE_S", 0.5)
    await rig.start(rig.engine("d", "decode"))
    async with connect(rig) as pair:
        for _ in range(2):
            assert b"200" in await answer(pair)
        assert await is_closed(pair[0])


async def test_responses_that_are_not_read_end_the_connection(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client sends requests without reading the responses, which fill the buffers."""
    monkeypatch.setattr(connections, "WRITE_TIMEOUT_S", 1.0)
    await rig.start(rig.engine("d", "decode"))
    num_sent = 0
    async with rig.slow_connection("/tokenize", {"prompt": "a"}) as connection:

        async def is_cut() -> bool:
            nonlocal num_sent
            served = {"endpoint": "/v1/models", "status": "200"}
            if rig.metric("baton:http_requests_total", **served) == num_sent:
                connection.sendall(GET * 1000)
                num_sent += 1000
            return closed(rig, "timeout") == 1

        await until(is_cut, "the end of the connection")


async def test_a_stream_may_last_longer_than_all_deadlines(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HEAD_TIMEOUT_S", "KEEP_ALIVE_S"):
        monkeypatch.setattr(connections, name, 0.2)
    engine = rig.engine("d", "decode", "hello world", hold_after=1)
    await rig.start(engine)
    stream = asyncio.create_task(rig.events("/v1/completions", STREAM))
    await until(lambda: engine.adds, "the request at the engine")
    async with connect(rig) as (reader, _):
        assert await is_closed(reader)
    engine.released.set()
    assert "".join(event["choices"][0]["text"] for event in await stream) == "hello world"


async def test_a_full_gateway_closes_the_longest_idle_connection(make_rig: MakeRig) -> None:
    rig = make_rig(max_connections=4)
    engine = rig.engine("d", "decode", "hello world", hold_after=1)
    await rig.start(engine)
    stream = asyncio.create_task(rig.events("/v1/completions", STREAM))
    await until(lambda: engine.adds, "the request at the engine")
    async with AsyncExitStack() as stack:
        used, *idle = [await stack.enter_async_context(connect(rig)) for _ in range(3)]
        await until(lambda: rig.metric("baton:gateway_connections") == 4, "four connections")
        assert b"200" in await answer(used)
        newest = await stack.enter_async_context(connect(rig))
        assert await is_closed(idle[0][0])
        for pair in (newest, used, idle[1]):
            assert b"200" in await answer(pair)
    assert closed(rig, "evicted") == 1
    engine.released.set()
    assert "".join(event["choices"][0]["text"] for event in await stream) == "hello world"


async def test_a_gateway_without_an_idle_connection_refuses_a_new_one(make_rig: MakeRig) -> None:
    rig = make_rig(max_connections=2)
    engine = rig.engine("d", "decode", "hello world", hold_after=1)
    await rig.start(engine)
    streams = [asyncio.create_task(rig.events("/v1/completions", STREAM)) for _ in range(2)]
    await until(lambda: len(engine.adds) == 2, "the requests at the engine")
    async with connect(rig) as (reader, _):
        assert await is_closed(reader)
    assert closed(rig, "refused") == 1
    engine.released.set()
    for stream in streams:
        assert len(await stream) > 1
    async with connect(rig) as pair:
        assert b"200" in await answer(pair)


async def test_many_idle_connections_do_not_block_a_new_client(make_rig: MakeRig) -> None:
    rig = make_rig(max_connections=20)
    await rig.start(rig.engine("d", "decode", "hello world"))
    async with AsyncExitStack() as stack:
        for _ in range(100):
            await stack.enter_async_context(connect(rig))
            assert rig.metric("baton:gateway_connections") <= 20
        assert await rig.complete() == "hello world"
        await until(lambda: closed(rig, "evicted") >= 81, "the idle connections to be closed")


async def test_connections_in_a_tls_handshake_count(make_rig: MakeRig, tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    write_certificate(folder, "gateway")
    rig = make_rig(max_connections=3, access=AccessConfig(tls_dir=str(folder)))
    await rig.start(rig.engine("d", "decode"))
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    port = int(rig.url.rsplit(":", 1)[1])
    async with AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(connect(rig)) for _ in range(3)]
        await until(lambda: rig.metric("baton:gateway_connections") == 3, "three connections")
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        assert await is_closed(silent[0][0])
        assert b"200" in await answer((reader, writer))
        writer.close()
    # Connections that end during or after the handshake are no longer counted.
    await until(lambda: not rig.metric("baton:gateway_connections"), "no connection counted")
    async with connect(rig) as (reader, writer):
        writer.write(b"this is no TLS\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            assert b"HTTP" not in await reader.read()
    await until(lambda: not rig.metric("baton:gateway_connections"), "no connection counted")


async def test_a_tls_handshake_has_a_deadline(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.3)
    folder = tmp_path / "tls"
    write_certificate(folder, "gateway")
    rig = make_rig(access=AccessConfig(tls_dir=str(folder)))
    await rig.start(rig.engine("d", "decode"))
    async with connect(rig) as (reader, _):
        assert await is_closed(reader)
    await until(lambda: not rig.metric("baton:gateway_connections"), "no connection counted")


def head_without_end(num_bytes: int) -> bytes:
    lines = [b"X-%d: %s\r\n" % (index, b"v" * 4000) for index in range(num_bytes // 4000)]
    return b"GET /v1/models HTTP/1.1\r\nHost: g\r\n" + b"".join(lines)


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"GET /health HTTP/1.1\r\nHost: g\r\n\r\n",
        b"POST /v1/models HTTP/1.1\r\nHost: g\r\nContent-Length: 100\r\n\r\n" + b" " * 100,
    ],
)
async def test_a_large_head_without_an_end_closes_the_connection(
    rig: GatewayRig, first: bytes
) -> None:
    """Clients without a key could keep half a megabyte per connection in memory."""
    await rig.start(rig.engine("d", "decode"))
    async with connect(rig) as (_, writer):
        writer.write(first + head_without_end(2 * connections.MAX_HEAD_BYTES))
        await until(lambda: closed(rig, "large_head") == 1, "the end of the connection")
    await until(lambda: not rig.metric("baton:gateway_connections"), "no connection counted")


async def test_a_head_that_grows_in_parts_closes_the_connection(rig: GatewayRig) -> None:
    await rig.start(rig.engine("d", "decode"))
    async with connect(rig) as (_, writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: g\r\n")

        async def is_cut() -> bool:
            writer.write(b"X: %s\r\n" % (b"v" * 4000))
            return closed(rig, "large_head") == 1

        await until(is_cut, "the end of the connection")


async def test_long_keys_many_requests_and_large_bodies_do_not_count_as_large_heads(
    rig: GatewayRig,
) -> None:
    await rig.start(rig.engine("d", "decode"))
    length = 2**20
    head = b"POST /v1/models HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer %s\r\n" % (b"k" * 4096)
    plain = head + b"Content-Length: %d\r\n\r\n" % length + b" " * length
    chunk = b"%x\r\n%s\r\n" % (2**12, b" " * 2**12)
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 256 + b"0\r\n\r\n"
    async with connect(rig) as pair:
        for request in (plain, chunked) * 10:
            pair[1].write(request)
            async with asyncio.timeout(DEADLINE_S):
                response = await pair[0].readuntil(b"}}")
            assert b"405" in response.splitlines()[0]
        assert b"200" in await answer(pair)


async def test_requests_behind_a_running_one_wait_outside_of_the_gateway(rig: GatewayRig) -> None:
    """A client could keep 32 heads and bodies per connection in memory."""
    engine = rig.engine("d", "decode", "hello world", hold_after=1)
    await rig.start(engine)
    body = b" " * 100_000
    behind = b"POST /health HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    async with rig.slow_connection("/v1/completions", STREAM) as connection:
        await until(lambda: engine.adds, "the request at the engine")
        sending = asyncio.create_task(asyncio.to_thread(connection.sendall, behind * 40))
        (served,) = rig.gateway._connections._open
        transport = served.transport
        assert transport is not None
        await until(lambda: not transport.is_reading(), "a connection that is not read")
        num_bytes = sum(body.total_raw_bytes for _, body in served._messages)
        assert 0 < num_bytes < 2**17
        engine.released.set()
        connection.shutdown(socket.SHUT_RDWR)
        await asyncio.gather(sending, return_exceptions=True)


BODY = b" " * 60_000
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer guess\r\n"
#: Data that a client without a key sends as fast as the gateway reads it.
FLOODS = {
    "nothing": b"",
    "head": head_without_end(connections.MAX_HEAD_BYTES - 4000),
    "body": REQUEST + b"Content-Length: 10000000\r\n\r\n" + BODY * 20,
    "requests": (REQUEST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY) * 20,
    "small requests": (REQUEST + b"\r\n") * 5000,
}


@pytest.mark.parametrize("is_tls", [False, True], ids=["tcp", "tls"])
@pytest.mark.parametrize("flood", FLOODS)
async def test_a_client_without_a_key_cannot_make_a_connection_take_more_memory_than_is_reserved(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flood: str, is_tls: bool
) -> None:
    monkeypatch.setattr(auth_delays, "BURST", 0)
    monkeypatch.setattr(auth_delays, "DELAY_S", 60.0)
    write_certificate(tmp_path / "tls", "gateway")
    (tmp_path / "keys").mkdir()
    access = AccessConfig(
        api_keys_dir=str(tmp_path / "keys"), tls_dir=str(tmp_path / "tls") if is_tls else ""
    )
    rig = make_rig(access=access)
    await rig.start(rig.engine("d", "decode"))
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    address = ("127.0.0.1", int(rig.url.rsplit(":", 1)[1]))

    def attack() -> None:
        client: socket.socket = stack.enter_context(socket.create_connection(address, DEADLINE_S))
        if is_tls:
            client = stack.enter_context(context.wrap_socket(client))
        client.settimeout(0.2)  # the gateway reads no more
        with suppress(TimeoutError, ConnectionError):
            client.sendall(FLOODS[flood])

    with ExitStack() as stack:
        await asyncio.to_thread(attack)
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(10):
            await asyncio.to_thread(attack)
        after, _ = tracemalloc.get_traced_memory()
    assert (after - before) / 10 < connections.CONNECTION_BYTES


@pytest.mark.parametrize("limit", [64, server.METRICS_CONNECTIONS])
async def test_a_burst_of_connections_does_not_evict_a_probe(
    rig: GatewayRig, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connections arrive in one turn of the event loop, before a request was read."""
    monkeypatch.setattr(server, "METRICS_CONNECTIONS", limit)
    await rig.start(rig.engine("d", "decode"))
    address = ("127.0.0.1", rig.gateway.metrics_port)
    with ExitStack() as stack:
        probe = stack.enter_context(socket.create_connection(address, DEADLINE_S))
        probe.sendall(b"GET /health HTTP/1.1\r\nHost: g\r\n\r\n")

        def burst() -> None:
            for _ in range(900):
                connection = stack.enter_context(socket.socket())
                connection.setblocking(False)
                connection.connect_ex(address)

        attack = threading.Thread(target=burst)
        attack.start()
        attack.join()  # blocks the event loop
        response = await asyncio.to_thread(probe.recv, 100)
    assert response.startswith(b"HTTP/1.1 200")


async def test_a_proxy_may_keep_an_idle_connection_for_an_hour(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.start(rig.engine("d", "decode"))
    async with connect(rig) as pair:
        assert b"200" in await answer(pair)
        await rig.skip(3600.0, monkeypatch)
        assert b"200" in await answer(pair)


def test_the_gateway_raises_its_limit_of_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    try:
        assert main(["--model", "/nowhere", "--discovery-file", "/nowhere"]) == 78
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_half_of_the_descriptors_are_left_to_the_engines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert connection_limit(100, 100) == 100
    assert "max_connections" not in caplog.text
    assert connection_limit(4096, 512) == 512
    assert "max_connections is 4096" in caplog.text
    assert "max_concurrent_requests" not in caplog.text
    assert connection_limit(4096, 513) == 512
    assert "max_concurrent_requests is 513, but at most 512 connections" in caplog.text


def test_connections_fit_into_the_memory_of_the_container(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**20, 2**20))
    monkeypatch.setattr(connections, "memory_limit", lambda: 2**30)
    assert connection_limit(4096, 512) == 2048
    assert "on memory (1073741824 bytes) allow 2048 connections at once" in caplog.text
    monkeypatch.setattr(connections, "memory_limit", lambda: None)
    assert connection_limit(4096, 512) == 4096
