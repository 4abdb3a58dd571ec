"""The engine's ROUTER with untrusted clients: names, limits and log lines."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from baton_engine.server import engine_io
from baton_engine.server.access import Access
from baton_engine.server.engine_io import MAX_CLIENT_ID_LENGTH, EngineIO
from baton_protocol.engine_messages import PROTOCOL_VERSION, ClientHello, Pong, RequestRefused
from baton_protocol.engine_messages import EngineCoreRequestType as RequestType
from baton_protocol.engine_messages import EngineCoreResponseType as ResponseType
from baton_protocol.sampling_params import SamplingParams
from support.waiting import eventually

HOST = "127.0.0.1"


@pytest.fixture
def io() -> Iterator[EngineIO]:
    io = EngineIO(HOST, 0, "engine", lambda: Pong(0), access=Access(), client_timeout_s=60.0)
    io.start()
    yield io
    io.close()


class Client:
    """A client that sends frames and reads one response to each."""

    def __init__(self, io: EngineIO) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 60_000
        self.socket.connect(f"tcp://{HOST}:{io.port}")

    def ask(self, *frames: bytes) -> tuple[ResponseType, str]:
        """Send a message. Return the type of the response, and the reason if it is REFUSED."""
        self.socket.send_multipart(frames)
        kind, _, payload = self.socket.recv_multipart()
        is_refused = kind == ResponseType.REFUSED
        reason = msgspec.msgpack.decode(payload, type=RequestRefused).reason if is_refused else ""
        return ResponseType(kind), reason

    def hello(self, client_id: str = "client") -> tuple[ResponseType, str]:
        hello = ClientHello(PROTOCOL_VERSION, client_id)
        return self.ask(RequestType.HELLO.value, b"", msgspec.msgpack.encode(hello))


@pytest.fixture
def connect(io: EngineIO) -> Iterator[Callable[[], Client]]:
    clients: list[Client] = []

    def connect() -> Client:
        clients.append(Client(io))
        return clients[-1]

    yield connect
    for client in clients:
        client.socket.close()


@pytest.mark.parametrize("client_id", ["x" * (MAX_CLIENT_ID_LENGTH + 1), "a\n2026 ERROR forged"])
def test_a_long_or_unprintable_client_id_is_refused(
    connect: Callable[[], Client], client_id: str
) -> None:
    client = connect()
    kind, reason = client.hello(client_id)
    assert kind is ResponseType.REFUSED
    assert "printable" in reason
    assert client.hello()[0] is ResponseType.INIT


def test_beyond_the_limit_only_clients_that_are_gone_are_forgotten(
    connect: Callable[[], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s)
    monkeypatch.setattr(engine_io, "time", clock)
    monkeypatch.setattr(engine_io, "MAX_CLIENTS", 2)
    first, second, third = connect(), connect(), connect()
    assert first.hello()[0] is ResponseType.INIT
    assert second.hello()[0] is ResponseType.INIT
    kind, reason = third.hello()
    assert kind is ResponseType.REFUSED
    assert "limit of 2 clients" in reason
    assert first.hello()[0] is ResponseType.INIT, "a client may send HELLO again"
    passed_s = 100.0
    eventually(lambda: third.hello()[0] is ResponseType.INIT, "room for the third client")


def test_refusals_do_not_fill_the_log_and_their_texts_are_cut(
    connect: Callable[[], Client], caplog: pytest.LogCaptureFixture
) -> None:
    client = connect()
    forged = b"\n2026 ERROR forged" + b"x" * 1000
    for _ in range(100):
        kind, reason = client.ask(RequestType.HELLO.value, b"", b"\xa0" + forged)
        assert kind is ResponseType.REFUSED
        kind, reason = client.ask(RequestType.PING.value, forged[:200], b"")
        assert kind is ResponseType.REFUSED
        assert reason.isprintable()
        assert len(reason) < 400
    lines = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].isprintable()


def test_a_client_that_reads_nothing_loses_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_io, "MAX_UNREAD_MESSAGES", 10)
    io = EngineIO(HOST, 0, "engine", lambda: Pong(0), access=Access(), client_timeout_s=60.0)
    io.start()
    idle, other = Client(io), Client(io)
    try:
        assert idle.hello()[0] is ResponseType.INIT
        add = msgspec.msgpack.encode(["r" * 2**16])

        def is_gone() -> bool:
            """Whether the requests of the client were aborted. Each refusal repeats its id."""
            idle.socket.send_multipart([RequestType.ADD.value, b"another engine", add])
            return not io.aborts.empty()

        eventually(is_gone, "the end of the client", every_s=0.0)
        assert io.aborts.get_nowait().request_ids is None
        assert other.hello()[0] is ResponseType.INIT
    finally:
        for client in (idle, other):
            client.socket.close()
        io.close()


@pytest.mark.parametrize("kind", ["wrong instance", "utility", "bad words"])
def test_a_refused_message_is_not_decoded_to_many_times_its_size(
    connect: Callable[[], Client], kind: str
) -> None:
    """An empty list is one byte of a message and 56 bytes in Python."""
    client = connect()
    client.hello()
    lists: list[list[int]] = [[]] * 2**20
    params = msgspec.to_builtins(SamplingParams())
    params[SamplingParams.__struct_fields__.index("bad_words_token_ids")] = lists
    add = ["r", [1], params]
    payload = msgspec.msgpack.encode([1, "pause", lists] if kind == "utility" else add)
    instance_id = b"another" if kind == "wrong instance" else b"engine"
    type_ = RequestType.UTILITY if kind == "utility" else RequestType.ADD
    tracemalloc.start()
    try:
        assert client.ask(type_.value, instance_id, payload)[0] is ResponseType.REFUSED
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()
