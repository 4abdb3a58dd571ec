"""Clients of an engine without the service key, with invalid messages, or without heartbeats."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq

from baton_engine.server import engine_io
from baton_protocol.engine_client.engine_client import EngineDeadError, HandshakeFailedError
from baton_protocol.engine_messages import (
    PROTOCOL_VERSION,
    ClientHello,
    EngineCoreResponseType,
    Init,
    Ping,
    RequestRefused,
)
from baton_protocol.engine_messages import EngineCoreRequestType as RequestType
from baton_protocol.service_key import ServiceKey
from support.engine.engine_fakes import continuation
from support.engine.engine_process import (
    DEADLINE_S,
    HOST,
    EngineProcess,
    collect,
    connect,
    request,
    tokens,
    wait_for,
)
from support.waiting import eventually

if TYPE_CHECKING:
    pass


class RawClient:
    """A client that can send any frames."""

    def __init__(self, engine: EngineProcess) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"tcp://{HOST}:{engine.engine_port}")

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def receive(self) -> tuple[EngineCoreResponseType, bytes]:
        assert self.socket.poll(2000), "no answer"
        kind, _, payload = self.socket.recv_multipart()
        return EngineCoreResponseType(kind), payload

    def receive_refused(self) -> RequestRefused:
        kind, payload = self.receive()
        assert kind is EngineCoreResponseType.REFUSED
        return msgspec.msgpack.decode(payload, type=RequestRefused)

    def hello(self) -> bytes:
        """Complete the handshake and return the instance id."""
        self.send(
            RequestType.HELLO, b"", msgspec.msgpack.encode(ClientHello(PROTOCOL_VERSION, "raw"))
        )
        instance_id = msgspec.msgpack.decode(self.receive()[1], type=Init).instance_id
        assert self.receive()[0] is EngineCoreResponseType.READY
        return instance_id.encode()


@pytest.fixture
def raw(start) -> Iterator[RawClient]:
    engine = start()
    engine.wait_ready()
    client = RawClient(engine)
    yield client
    client.socket.close()


KEY = ServiceKey(b"the key of this service")


@pytest.mark.parametrize(
    "other_key", [None, ServiceKey(b"the key of another one")], ids=["none", "another"]
)
async def test_an_engine_with_a_service_key_refuses_and_logs_clients_without_it(
    start, tmp_path, other_key
) -> None:
    (tmp_path / "key").write_text("the key of this service\n")
    engine = start("--service-key-file", str(tmp_path / "key"))
    async with await connect(engine, service_key=KEY) as client:
        stream = client.add(request("r", [1, 2, 3], 200))
        for _ in range(3):
            with pytest.raises(EngineDeadError, match="service key"):
                await connect(engine, service_key=other_key)
        assert tokens(await collect(stream)) == continuation([1, 2, 3], 200, ignore_eos=True)
        refused = 'baton:access_refused_total{door="engine"} 3.0'
        wait_for(
            lambda: refused in engine.http("GET", "/metrics")[1],
            "three refusals in the metrics",
            engine,
        )
        wait_for(lambda: "engine port: refused" in engine.text, "the refusals in the log", engine)
        assert engine.text.count("engine port: refused") == 1, (
            "refusals within one minute are one line"
        )
        assert engine.http("POST", "/drain")[0] == 401
        assert not client.status or not client.status.draining
    assert "the key of this service" not in engine.text


async def test_a_client_with_a_service_key_does_not_connect_to_an_engine_without_one(start) -> None:
    with pytest.raises(HandshakeFailedError, match="does not accept our service key, or has none"):
        await connect(start(), service_key=KEY)


def test_invalid_messages_are_refused_and_the_engine_serves_the_next(raw) -> None:
    raw.send(b"junk")
    assert "3 frames" in raw.receive_refused().reason
    nested = b"\x91" * 100_000
    for kind, instance_id in ((RequestType.HELLO, b""), (RequestType.ADD, b"somebody-else")):
        raw.send(kind, instance_id, nested)
        assert raw.receive_refused().request_id == ""
    raw.send(RequestType.HELLO, b"", msgspec.msgpack.encode(ClientHello(99, "raw")))
    assert "protocol 99" in raw.receive_refused().reason
    instance_id = raw.hello()
    raw.send(b"\x77", instance_id, b"")
    assert "unknown message type" in raw.receive_refused().reason
    raw.send(RequestType.ADD, instance_id, msgspec.msgpack.encode(["r1", "no tokens", []]))
    refused = raw.receive_refused()
    assert refused.request_id == "r1"
    assert "ADD cannot be decoded" in refused.reason
    raw.send(RequestType.ADD, instance_id, b"\xff\xff\xc1")
    assert raw.receive_refused().request_id == ""
    raw.send(RequestType.ADD, b"somebody-else", msgspec.msgpack.encode(request("r2", [1])))
    refused = raw.receive_refused()
    assert refused.request_id == "r2"
    assert "for instance somebody-else" in refused.reason
    raw.send(RequestType.PING, instance_id, msgspec.msgpack.encode(Ping(7)))
    assert raw.receive()[0] is EngineCoreResponseType.PONG


def test_a_client_that_sends_a_message_above_the_limit_is_disconnected(start) -> None:
    engine = start()
    engine.wait_ready()
    greedy, other = RawClient(engine), RawClient(engine)
    try:
        monitor = greedy.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        greedy.send(RequestType.HELLO, b"", bytes(engine_io.MAX_MESSAGE_BYTES + 1))
        assert monitor.poll(2000), "still connected"
        other.hello()
    finally:
        greedy.socket.disable_monitor()
        for client in (greedy, other):
            client.socket.close()


@pytest.mark.parametrize(
    ("length", "status"), [("junk", "400"), ("-1", "400"), ("99999999999", "413")]
)
def test_a_request_with_an_invalid_content_length_is_refused_at_once(start, length, status) -> None:
    engine = start()
    engine.wait_ready()
    with socket.create_connection((HOST, engine.http_port), timeout=DEADLINE_S) as connection:
        connection.sendall(
            f"POST /drain HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()
        )
        assert connection.recv(4096).startswith(f"HTTP/1.1 {status} ".encode())
    assert engine.http("GET", "/ready")[0] == 200


def test_a_silent_client_loses_its_requests() -> None:
    from baton_engine.server.engine_core_proc import EngineCoreProc
    from baton_protocol.options.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig

    config = EngineConfig(
        model=ModelConfig(path="/nowhere"),
        cache=CacheConfig(block_size=4, num_blocks=64),
        parallel=ParallelConfig(executor_class="support.engine.engine_fakes.SlowFakeExecutor"),
        engine_port=0,
    )
    proc = EngineCoreProc(config, HOST, client_timeout_s=0.5)
    thread = threading.Thread(target=proc.run)
    thread.start()
    socket = zmq.Context.instance().socket(zmq.DEALER)
    try:
        eventually(lambda: proc.readiness().ok, "the engine to be ready", DEADLINE_S)
        instance_id = proc.instance_id.encode()
        socket.connect(f"tcp://{HOST}:{proc.io.port}")
        socket.send_multipart(
            [
                RequestType.HELLO,
                b"",
                msgspec.msgpack.encode(ClientHello(PROTOCOL_VERSION, "silent")),
            ]
        )
        socket.send_multipart(
            [RequestType.ADD, instance_id, msgspec.msgpack.encode(request("r", [1], 200))]
        )
        eventually(lambda: proc.stats().requests_finished == {"abort": 1}, "the abort", DEADLINE_S)
    finally:
        proc.request_shutdown()
        thread.join(DEADLINE_S)
        socket.close(linger=0)
    assert not thread.is_alive()
