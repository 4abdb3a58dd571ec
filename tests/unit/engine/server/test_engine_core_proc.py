"""An engine process over real sockets with a fake model: protocol, refusals, aborts, drain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq

from baton_engine.server import engine_io
from baton_protocol.engine_client.engine_client import (
    EngineDeadError,
    HandshakeFailedError,
    UtilityError,
)
from baton_protocol.engine_messages import (
    PROTOCOL_VERSION,
    ClientHello,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreResponseType,
    ErrorCode,
    FinishReason,
    Init,
    KVSide,
    KVTransferParams,
    Ping,
    Ready,
    RequestRefused,
)
from baton_protocol.engine_messages import EngineCoreRequestType as RequestType
from baton_protocol.sampling_params import SamplingParams
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
from support.waiting import eventually, until

if TYPE_CHECKING:
    from baton_engine.server.engine_core_proc import EngineCoreProc


@pytest.mark.parametrize(
    "flags", [(), ("--async-scheduling",), ("--pipeline-parallel-size", "2")], ids=str
)
async def test_concurrent_requests_get_their_own_text_with_gapless_offsets(start, flags) -> None:
    async with await connect(start(*flags)) as client:
        prompts = [[1, 2, 3] * n for n in range(1, 9)]
        streams = [client.add(request(f"r{i}", prompt, 20)) for i, prompt in enumerate(prompts)]
        for prompt, stream in zip(prompts, streams, strict=True):
            outputs = await collect(stream)
            assert tokens(outputs) == continuation(prompt, 20, ignore_eos=True)
            assert [output.token_offset for output in outputs] == list(range(20))
            assert outputs[-1].finish_reason is FinishReason.LENGTH


async def test_a_request_with_generated_tokens_continues_after_them(start) -> None:
    async with await connect(start()) as client:
        whole = continuation([5, 6], 10, ignore_eos=True)
        outputs = await collect(client.add(request("r", [5, 6], 10, generated_token_ids=whole[:4])))
        assert tokens(outputs) == whole[4:]
        assert outputs[0].token_offset == 4


async def test_bad_requests_are_refused_with_a_reason_and_the_engine_serves_the_next(start) -> None:
    async with await connect(start("--max-model-len", "32")) as client:
        bad = {
            "long": (request("long", list(range(1, 33))), "32"),
            "vocab": (request("vocab", [100000]), "prompt_token_ids must be in"),
            "empty": (request("empty", []), "must not be empty"),
            "side": (
                request("side", [1], 1, kv_transfer=KVTransferParams(KVSide.PRODUCE, "t", "p")),
                "role is none",
            ),
            "top_p": (EngineCoreRequest("top_p", [1], SamplingParams(top_p=7.0)), "top_p"),
        }
        for bad_request, message in bad.values():
            (output,) = await collect(client.add(bad_request))
            too_long = bad_request.request_id == "long"
            assert output.error_code is (ErrorCode.LENGTH if too_long else ErrorCode.INVALID)
            assert output.finish_reason is (FinishReason.LENGTH if too_long else FinishReason.ERROR)
            assert message in output.error
        assert tokens(await collect(client.add(request("good", [1]))))


async def test_an_abort_ends_the_stream_and_frees_the_blocks(start) -> None:
    async with await connect(start(BATON_FAKE_STEP_S="0.01")) as client:
        stream = client.add(request("r", [1, 2], 200))
        await anext(stream)
        client.abort(["r"])
        outputs = await collect(stream)
        assert outputs[-1].finish_reason is FinishReason.ABORT
        stats = await client.call("get_stats")
        assert stats["kv_cache_usage"] == 0
        assert stats["requests_finished"] == {"abort": 1}


async def test_only_listed_utility_methods_with_valid_arguments_can_be_called(start) -> None:
    async with await connect(start()) as client:
        assert await client.call("reset_prefix_cache") is None
        assert await client.call("reset_prefix_cache", True) is None
        with pytest.raises(UtilityError, match="no utility method 'shutdown'"):
            await client.call("shutdown")
        with pytest.raises(UtilityError, match="takes 0 to 1 arguments"):
            await client.call("pause", "keep", 1)
        with pytest.raises(UtilityError, match=r"pause: .*Invalid enum value 'nonsense'"):
            await client.call("pause", "nonsense")
        with pytest.raises(UtilityError, match="takes 0 arguments"):
            await client.call("get_stats", 1)


async def test_http_reports_loading_ready_and_draining(start) -> None:
    engine = start(BATON_FAKE_LOAD_S="3.0")
    status, body = engine.http("GET", "/ready")
    assert (status, json.loads(body)["reason"]) == (503, "Loading")
    assert engine.http("GET", "/health")[0] == 200
    engine.wait_ready()
    async with await connect(engine) as client:
        assert client.ready is not None
        assert client.ready.max_model_len == 256
        await collect(client.add(request("r", [1, 2, 3])))
        metrics = engine.http("GET", "/metrics")[1]
        assert 'baton:prompt_tokens_computed_total{model_name="nowhere"} 3.0' in metrics
        assert 'baton:generation_tokens_total{model_name="nowhere"} 8.0' in metrics
        for _ in range(2):
            assert json.loads(engine.http("POST", "/drain")[1]) == {
                "draining": True,
                "unfinished": 0,
            }
        assert json.loads(engine.http("GET", "/drain")[1]) == {"draining": True, "unfinished": 0}
        assert json.loads(engine.http("GET", "/ready")[1])["reason"] == "Draining"
        (output,) = await collect(client.add(request("late", [1])))
        assert output.error_code is ErrorCode.DRAINING
        assert engine.http("GET", "/nothing")[0] == 404


async def test_pauses_and_sleeps_are_reported_in_heartbeats_and_by_the_readiness_probe(
    start,
) -> None:
    engine = start(BATON_FAKE_STEP_S="0.01")

    def why_not_ready() -> str:
        status, body = engine.http("GET", "/ready")
        assert status == 503
        return json.loads(body)["reason"]

    def resumed_s() -> float | None:
        return json.loads(engine.http("GET", "/ready")[1]).get("resumed_s")

    assert resumed_s() is None
    async with await connect(engine) as client:
        stream = client.add(request("r", [1, 2], 50))
        await anext(stream)
        assert not client.status or client.status.stalled_s < 2
        await client.call("pause", "keep")
        await until(lambda: client.status and client.status.stalled_s > 2, "a frozen request")
        assert client.status.paused
        assert not client.status.asleep
        assert not client.accepts_requests
        assert why_not_ready() == "Paused"
        paused_s = resumed_s()
        assert paused_s is not None
        assert paused_s < 2, "the time since the last moment of the pause"
        await client.call("resume")
        await collect(stream)
        await until(lambda: client.accepts_requests, "the engine to accept requests again")
        assert client.status.stalled_s < 2
        await client.call("sleep", 1)
        await until(lambda: client.status.asleep, "the sleep in a PONG")
        assert why_not_ready() == "Asleep"
        await client.call("wake_up")
        await until(lambda: client.accepts_requests, "the engine to accept requests again")
        assert engine.http("GET", "/ready")[0] == 200
        before, now = resumed_s(), resumed_s()
        assert before is not None
        assert now is not None
        assert 0 < before < now, "the time since the wake-up grows"


@pytest.mark.parametrize("level", [1, 2])
async def test_clients_learn_the_hash_of_weights_that_changed_in_a_sleep(start, level) -> None:
    async with await connect(start()) as client:
        before = client.init
        await client.call("sleep", level)
        await until(lambda: client.status and client.status.asleep, "the sleep in a PONG")
        await client.call("wake_up")
        await until(lambda: client.accepts_requests, "the engine to accept requests again")
        assert client.init.instance_id == before.instance_id
        changed = client.init.compatibility_hash != before.compatibility_hash
        assert changed == (level == 2)


async def test_requests_that_a_pause_leaves_waiting_make_no_progress(start) -> None:
    async with await connect(start("--max-num-seqs", "1", BATON_FAKE_STEP_S="0.01")) as client:
        running, waiting = (client.add(request(name, [1, 2], 20)) for name in ("r", "w"))
        await anext(running)
        pausing = asyncio.create_task(client.call("pause", "wait"))
        await collect(running)
        await pausing
        await until(lambda: client.status and client.status.stalled_s > 2, "a frozen request")
        await client.call("resume")
        await collect(waiting)


async def test_a_step_that_does_not_end_is_reported_in_heartbeats(start) -> None:
    async with await connect(start(BATON_FAKE_STEP_S="600")) as client:
        client.add(request("r", [1, 2], 50))
        await until(lambda: client.status and client.status.stalled_s > 2, "a stalled loop")
        assert client.dead_reason is None


async def test_sigterm_drains_running_requests_and_exits_with_0(start) -> None:
    engine = start(BATON_FAKE_STEP_S="0.02")
    async with await connect(engine) as client:
        stream = client.add(request("r", [1, 2], 50))
        await anext(stream)
        engine.process.send_signal(signal.SIGTERM)
        assert len(tokens(await collect(stream))) == 49
        assert await asyncio.to_thread(engine.process.wait, DEADLINE_S) == 0


def test_an_engine_with_a_failed_kv_connector_is_neither_healthy_nor_ready(start) -> None:
    engine = start("--executor", "support.engine.engine_fakes.FailedTransferExecutor")
    wait_for(lambda: engine.http("GET", "/health")[0] == 503, "503 of /health", engine)
    for path in ("/health", "/ready"):
        status, body = engine.http("GET", path)
        assert (status, json.loads(body)["reason"]) == (503, "KVTransferFailed")
        assert "a defect" in json.loads(body)["message"]


def test_sigterm_while_the_model_loads_ends_the_process_with_0(start) -> None:
    engine = start(BATON_FAKE_LOAD_S="30")
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(25) == 0


@pytest.mark.parametrize(("drain_timeout_s", "is_paused"), [("0.3", False), ("60", True)])
async def test_requests_that_cannot_end_within_the_drain_timeout_end_with_draining(
    start, drain_timeout_s, is_paused
) -> None:
    engine = start("--drain-timeout-s", drain_timeout_s, BATON_FAKE_STEP_S="0.05")
    async with await connect(engine) as client:
        stream = client.add(request("r", [1, 2], 200))
        await anext(stream)
        if is_paused:  # paused requests cannot end at all
            await client.call("pause", "keep")
        engine.process.send_signal(signal.SIGTERM)
        last = (await collect(stream))[-1]
        assert last.error_code is ErrorCode.DRAINING
        assert await asyncio.to_thread(engine.process.wait, DEADLINE_S) == 0


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


def test_reads_of_the_state_do_not_call_the_loop(monkeypatch) -> None:
    """Clients without the service key may send them, in any number."""
    from baton_engine.server import engine_core_proc
    from baton_protocol.options.config import EngineConfig, ModelConfig

    monkeypatch.setattr(engine_core_proc, "ADMIN_TIMEOUT_S", 0.0)
    config = EngineConfig(model=ModelConfig(path="/nowhere"), engine_port=0)
    proc = engine_core_proc.EngineCoreProc(config, HOST)
    proc.state = engine_core_proc.State.SERVING  # although no loop runs
    try:
        assert proc.drain_status(start=False).unfinished == 0
        assert proc.run_admin_call("is_paused", {}) is False
        assert proc.run_admin_call("is_sleeping", {}) is False
        assert proc.io.input_queue.empty()
        with pytest.raises(TimeoutError, match="did not answer"):
            proc.drain_status(start=True)
    finally:
        proc.io.close()


def test_the_time_since_a_sleep_counts_from_the_end_of_the_wake_up(monkeypatch) -> None:
    from baton_engine.server.engine_core_proc import EngineCoreProc
    from baton_protocol.options.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
    from support.engine.engine_fakes import FakeExecutor

    woken_at = 0.0
    call = FakeExecutor.collective_rpc

    def slow(self, method, *args, **options) -> list:
        nonlocal woken_at
        result = call(self, method, *args, **options)
        if method == "wake_up":
            time.sleep(0.2)  # the time in which weights are read
            woken_at = time.monotonic()
        return result

    monkeypatch.setattr(FakeExecutor, "collective_rpc", slow)
    config = EngineConfig(
        model=ModelConfig(path="/nowhere"),
        cache=CacheConfig(block_size=4, num_blocks=64),
        parallel=ParallelConfig(executor_class="support.engine.engine_fakes.FakeExecutor"),
        engine_port=0,
    )
    proc = EngineCoreProc(config, HOST)
    thread = threading.Thread(target=proc.run)
    thread.start()
    try:
        eventually(lambda: proc.readiness().ok, "the engine to be ready", DEADLINE_S)
        proc.run_admin_call("sleep", {"level": ["1"]})
        proc.run_admin_call("wake_up", {})
        ready = proc.readiness()
        assert (ready.ok, ready.reason) == (True, "Ready")
        assert ready.resumed_s is not None
        assert time.monotonic() - ready.resumed_s >= woken_at > 0
    finally:
        proc.request_shutdown()
        thread.join(DEADLINE_S)
    assert not thread.is_alive()


class TakingCore:
    """Accepts every request, and generates nothing."""

    def __init__(self) -> None:
        self.aborted: list[str] = []

    def abort_requests(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    def add_request(self, request: EngineCoreRequest) -> None:
        return None

    def take_outputs(self) -> list[EngineCoreOutput]:
        return []


@contextlib.contextmanager
def idle_engine() -> Iterator[tuple[EngineCoreProc, Callable[[bytes, bytes], None], zmq.Socket]]:
    """Yield an engine that takes no step, a function that sends to it, and the client's socket."""
    from baton_engine.server.engine_core_proc import EngineCoreProc
    from baton_protocol.options.config import EngineConfig, ModelConfig

    proc = EngineCoreProc(EngineConfig(model=ModelConfig("/nowhere"), engine_port=0), HOST)
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.rcvtimeo = int(DEADLINE_S * 1000)
    proc.io.start()
    try:
        proc.io.send_ready(Ready(max_model_len=4096))
        dealer.connect(f"tcp://{HOST}:{proc.io.port}")
        hello = msgspec.msgpack.encode(ClientHello(PROTOCOL_VERSION, "flood"))
        dealer.send_multipart([RequestType.HELLO, b"", hello])
        while dealer.recv_multipart()[0] != EngineCoreResponseType.READY:
            pass
        yield (
            proc,
            lambda kind, body: dealer.send_multipart([kind, proc.instance_id.encode(), body]),
            dealer,
        )
    finally:
        proc.io.close()
        dealer.close(linger=0)


@pytest.mark.parametrize("limit", ["MAX_QUEUED_MESSAGES", "MAX_QUEUED_BYTES"])
def test_requests_that_the_loop_does_not_take_are_refused_beyond_a_limit(
    monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """A step may take minutes, in which a client can send any number of requests."""

    def add(number: int) -> bytes:
        return msgspec.msgpack.encode(request(f"r{number}", [1] * 1000))

    monkeypatch.setattr(engine_io, limit, 3 if limit == "MAX_QUEUED_MESSAGES" else 3 * len(add(0)))
    decoder = msgspec.msgpack.Decoder(EngineCoreOutputs)
    with idle_engine() as (proc, send, dealer):
        for round_ in range(2):
            for number in range(5):
                send(RequestType.ADD, add(number))
            for number in (3, 4):
                (refusal,) = decoder.decode(dealer.recv_multipart()[2]).outputs
                assert (refusal.request_id, refusal.error_code) == (
                    f"r{number}",
                    ErrorCode.OVERLOADED,
                ), round_
            assert proc.io.input_queue.qsize() == 3
            proc._take_inputs(TakingCore(), wait=False)  # the loop ends a step
            assert proc.io.input_queue.empty()


def test_aborts_that_reach_an_idle_engine_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle engine takes no step, so nothing reads the queue of early aborts."""
    monkeypatch.setattr(engine_io, "MAX_QUEUED_MESSAGES", 5)
    with idle_engine() as (proc, send, dealer):
        for _ in range(12):
            send(RequestType.ABORT, msgspec.msgpack.encode(["r"]))
        for _ in range(2):
            assert dealer.recv_multipart()[0] == EngineCoreResponseType.REFUSED
        assert proc.io.input_queue.qsize() == engine_io.ABORT_FACTOR * 5
        core = TakingCore()
        proc._take_inputs(core, wait=False)
        assert core.aborted == ["r"] * 10
        assert proc.io.aborts.empty()


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


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"model": {"path": "/x"}, "nonsense": 1}', "FATAL InvalidConfig: .*nonsense"),
        (
            '{"model": {"path": "/x"}, "cache": {"block_size": "big"}}',
            r"FATAL InvalidConfig: .*cache\.block_size",
        ),
        (
            '{"model": {"path": "/x"}, "scheduler": {"max_num_seqs": 0}}',
            "FATAL InvalidConfig: .*max_num_seqs",
        ),
        (
            '{"model": {"path": "/x"}, "kv_transfer": {"lease_s": 0}}',
            r"FATAL InvalidConfig: .*kv_transfer\.lease_s",
        ),
        (
            '{"model": {"path": "/does/not/exist"}, "engine_port": 0, "http_port": 0}',
            "FATAL ModelNotFound: .*/does/not/exist",
        ),
    ],
)
def test_configuration_errors_end_with_code_78_and_one_fatal_line(
    tmp_path, content, reason
) -> None:
    config = tmp_path / "engine.json"
    config.write_text(content)
    ended = subprocess.run(
        [sys.executable, "-m", "baton_engine.cli", "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ended.returncode == 78, ended.stderr
    assert re.fullmatch(reason + ".*", ended.stderr.splitlines()[-1])
