"""EngineClient against a scripted ROUTER: its messages, and how it detects a lost engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from baton_protocol.engine_client.engine_client import EngineClient, EngineDeadError, UtilityError
from baton_protocol.engine_messages import (
    PROTOCOL_VERSION,
    Dead,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineCoreResponseType,
    ErrorCode,
    FinishReason,
    Init,
    Pong,
    Ready,
    RequestRefused,
    UtilityOutput,
    UtilityRequest,
)
from baton_protocol.sampling_params import SamplingParams
from support.waiting import until

DEADLINE_S = 60.0


class Router:
    """The engine's side of the connection, one message at a time."""

    def __init__(self, version: int = PROTOCOL_VERSION) -> None:
        self.socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.instance_id = "i1"
        self.version = version
        self.peer = b""

    async def receive(self, kind: EngineCoreRequestType) -> tuple[str, bytes]:
        """Return (instance id, payload) of the next message of this kind. Skip other messages."""
        while True:
            peer, got, identity, payload = await asyncio.wait_for(
                self.socket.recv_multipart(), DEADLINE_S
            )
            self.peer = peer
            if got == kind.value:
                return identity.decode(), payload

    async def send(self, kind: EngineCoreResponseType, payload: Any) -> None:
        await self.socket.send_multipart(
            [self.peer, kind.value, self.instance_id.encode(), msgspec.msgpack.encode(payload)]
        )

    async def accept(self) -> None:
        await self.receive(EngineCoreRequestType.HELLO)
        await self.send(EngineCoreResponseType.INIT, Init(self.version, self.instance_id, "hash"))


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    router = Router()
    yield router
    router.socket.close(linger=0)


async def connected(router: Router, **options: float) -> EngineClient:
    client = EngineClient("127.0.0.1", router.port, client_id="test", **options)
    accept = asyncio.create_task(router.accept())
    await client.connect(DEADLINE_S)
    await accept
    return client


def request(request_id: str = "r") -> EngineCoreRequest:
    return EngineCoreRequest(request_id, [1, 2, 3], SamplingParams())


async def test_outputs_reach_their_stream_in_order_and_the_stream_ends(router) -> None:
    client = await connected(router)
    stream = client.add(request("a"))
    identity, payload = await router.receive(EngineCoreRequestType.ADD)
    assert identity == "i1"
    assert msgspec.msgpack.decode(payload, type=EngineCoreRequest) == request("a")
    first = EngineCoreOutput("a", [5])
    last = EngineCoreOutput("a", [6], token_offset=1, finish_reason=FinishReason.LENGTH)
    stranger = EngineCoreOutput("other", [9])
    await router.send(EngineCoreResponseType.OUTPUTS, EngineCoreOutputs([first, stranger]))
    await router.send(EngineCoreResponseType.OUTPUTS, EngineCoreOutputs([last]))
    assert [output async for output in stream] == [first, last]
    assert client.num_unfinished == 0
    await client.close()


async def test_ready_and_status_follow_from_messages(router) -> None:
    client = await connected(router, heartbeat_interval_s=0.05)
    with pytest.raises(TimeoutError, match="not ready"):
        await client.wait_ready(0.05)
    await router.send(EngineCoreResponseType.READY, Ready(4096))
    assert (await client.wait_ready(DEADLINE_S)).max_model_len == 4096
    await router.receive(EngineCoreRequestType.PING)
    await router.send(EngineCoreResponseType.PONG, Pong(0, draining=True))
    status = await until(lambda: client.status, "the status of the PONG")
    assert status.draining
    await client.close()


async def test_a_later_init_replaces_the_first(router) -> None:
    client = await connected(router)
    assert client.init.compatibility_hash == "hash"
    await router.send(EngineCoreResponseType.INIT, Init(PROTOCOL_VERSION, "i1", "loaded"))
    await router.send(EngineCoreResponseType.READY, Ready(4096))
    await client.wait_ready(DEADLINE_S)
    assert client.init.compatibility_hash == "loaded"
    await client.close()


async def test_a_refused_connection_is_an_error_at_once() -> None:
    with zmq.Context.instance().socket(zmq.ROUTER) as closed:
        port = closed.bind_to_random_port("tcp://127.0.0.1")
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(EngineDeadError, match="cannot connect"):
            await EngineClient("127.0.0.1", port, client_id="test").connect(DEADLINE_S)


async def test_a_lost_connection_fails_every_request(router) -> None:
    client = await connected(router)
    stream = client.add(request())
    await router.receive(EngineCoreRequestType.ADD)
    router.socket.close(linger=0)
    with pytest.raises(EngineDeadError, match="connection lost"):
        await asyncio.wait_for(anext(aiter(stream)), DEADLINE_S)
    assert "connection lost" in await asyncio.wait_for(client.wait_dead(), DEADLINE_S)
    with pytest.raises(EngineDeadError):
        client.add(request("later"))
    await client.close()


async def test_outputs_sent_before_the_connection_is_lost_are_delivered(router) -> None:
    client = await connected(router)
    streams = [client.add(request(f"r{i}")) for i in range(50)]
    for _ in streams:
        await router.receive(EngineCoreRequestType.ADD)
    for i in range(50):
        last = EngineCoreOutput(f"r{i}", [1], finish_reason=FinishReason.STOP)
        await router.send(EngineCoreResponseType.OUTPUTS, EngineCoreOutputs([last]))
    router.socket.close(linger=1000)
    for stream in streams:
        assert [output.finish_reason async for output in stream] == [FinishReason.STOP]
    await client.close()


async def test_outputs_keep_their_order_when_the_connection_is_lost(router, monkeypatch) -> None:
    """The loss is detected after a message was read and before the waiting task has resumed."""
    client = await connected(router)
    stream = client.add(request())
    await router.receive(EngineCoreRequestType.ADD)
    receive = zmq.asyncio.Socket.recv_multipart

    def receive_and_end(socket: zmq.asyncio.Socket) -> asyncio.Future[list[bytes]]:
        arriving: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()

        def pass_on(read: asyncio.Future[list[bytes]]) -> None:
            if not read.cancelled():
                arriving.set_result(read.result())
                client._pass_remaining()

        receive(socket).add_done_callback(pass_on)
        return arriving

    monkeypatch.setattr(zmq.asyncio.Socket, "recv_multipart", receive_and_end)
    for offset in range(20):
        await router.send(
            EngineCoreResponseType.OUTPUTS,
            EngineCoreOutputs([EngineCoreOutput("r", [1], token_offset=offset)]),
        )
    offsets = [(await asyncio.wait_for(anext(stream), DEADLINE_S)).token_offset for _ in range(20)]
    assert offsets == list(range(20))
    await client.close()


async def test_a_silent_engine_is_dead_after_the_heartbeat_timeout(router) -> None:
    client = await connected(router, heartbeat_interval_s=0.02, heartbeat_timeout_s=0.1)
    assert "no message for" in await asyncio.wait_for(client.wait_dead(), DEADLINE_S)
    await client.close()


async def test_a_loading_engine_has_a_longer_heartbeat_timeout(router) -> None:
    client = await connected(router, heartbeat_interval_s=0.02, heartbeat_timeout_s=0.2)
    began = asyncio.get_running_loop().time()
    assert "no message for" in await asyncio.wait_for(client.wait_dead(), DEADLINE_S)
    assert asyncio.get_running_loop().time() - began >= 5 * 0.2
    await client.close()


async def test_a_silent_engine_accepts_no_requests_until_its_next_message(router) -> None:
    calls: list[bool] = []
    client = await connected(
        router,
        heartbeat_interval_s=0.05,
        heartbeat_timeout_s=60.0,
        on_available=lambda: calls.append(client.accepts_requests),
    )
    assert not client.accepts_requests
    await router.send(EngineCoreResponseType.READY, Ready(4096))
    await client.wait_ready(DEADLINE_S)
    assert calls == [False], "accepts requests before the first PONG"
    await router.send(EngineCoreResponseType.PONG, Pong(1))
    await until(lambda: client.accepts_requests, "the engine to accept requests")
    await until(lambda: not client.accepts_requests, "the engine to count as silent")
    calls.clear()
    await router.send(EngineCoreResponseType.PONG, Pong(2))
    await until(lambda: calls == [True], "the engine to accept requests again")
    assert client.dead_reason is None
    await client.close()


async def test_a_paused_engine_accepts_no_requests_until_it_is_resumed(router) -> None:
    calls: list[int] = []
    client = await connected(router, on_available=lambda: calls.append(client.ready_epoch))
    await router.send(EngineCoreResponseType.READY, Ready(4096))
    await router.send(EngineCoreResponseType.PONG, Pong(1, paused=True))
    await until(lambda: client.status is not None, "the PONG")
    assert client.ready is not None
    assert not client.accepts_requests
    before = client.ready_epoch
    await router.send(EngineCoreResponseType.PONG, Pong(2))
    await until(lambda: client.accepts_requests, "the engine to accept requests")
    assert before < client.ready_epoch == calls[-1]
    await client.close()


async def test_each_ready_message_and_each_end_of_draining_raises_the_ready_epoch(router) -> None:
    calls: list[int] = []
    client = await connected(router, on_available=lambda: calls.append(client.ready_epoch))
    await router.send(EngineCoreResponseType.READY, Ready(4096, 1, 4))
    await client.wait_ready(DEADLINE_S)
    await router.send(EngineCoreResponseType.PONG, Pong(1, draining=True))
    await router.send(EngineCoreResponseType.READY, Ready(2048, 0, 3))
    await until(lambda: len(calls) == 2, "the second READY")
    assert client.accepts_requests, "the earlier PONG still counts"
    ready = client.ready
    assert (ready.max_model_len, ready.data_parallel_rank, ready.data_parallel_size) == (2048, 0, 3)
    await router.send(EngineCoreResponseType.PONG, Pong(2, draining=True))
    await router.send(EngineCoreResponseType.PONG, Pong(3, draining=False))
    await router.send(EngineCoreResponseType.PONG, Pong(4, draining=False))
    await until(lambda: len(calls) == 3, "the end of draining")
    assert len(set(calls)) == 3
    await client.close()


async def test_a_stalled_event_loop_does_not_count_as_silence_of_the_engine(router) -> None:
    client = await connected(router, heartbeat_interval_s=0.05, heartbeat_timeout_s=0.3)
    await router.send(EngineCoreResponseType.READY, Ready(4096))
    await client.wait_ready(DEADLINE_S)
    for sequence in range(4):
        await router.send(EngineCoreResponseType.PONG, Pong(sequence))
        time.sleep(1.0)  # noqa: ASYNC251 (this is what is tested)
        await asyncio.sleep(0)
        assert client.dead_reason is None
    await client.close()


async def test_the_error_has_the_reason_of_the_dead_message(router) -> None:
    client = await connected(router)
    stream = client.add(request())
    await router.send(EngineCoreResponseType.DEAD, Dead("out of memory"))
    with pytest.raises(EngineDeadError, match="out of memory"):
        await asyncio.wait_for(anext(aiter(stream)), DEADLINE_S)
    await client.close()


async def test_messages_of_another_instance_at_the_address_are_ignored(router) -> None:
    client = await connected(router)
    router.instance_id = "i2"
    await router.send(EngineCoreResponseType.READY, Ready(1))
    assert "another instance" in await asyncio.wait_for(client.wait_dead(), DEADLINE_S)
    assert client.ready is None
    await client.close()


async def test_a_refused_request_ends_with_an_error_output(router) -> None:
    client = await connected(router)
    stream = client.add(request())
    await router.receive(EngineCoreRequestType.ADD)
    await router.send(EngineCoreResponseType.REFUSED, RequestRefused("wrong shape", "r"))
    output = await asyncio.wait_for(anext(aiter(stream)), DEADLINE_S)
    assert (output.finish_reason, output.error, output.error_code) == (
        FinishReason.ERROR,
        "wrong shape",
        ErrorCode.INVALID,
    )
    await client.close()


async def test_another_protocol_version_is_refused_with_both_versions() -> None:
    router = Router(version=PROTOCOL_VERSION + 1)
    client = EngineClient("127.0.0.1", router.port, client_id="test")
    accept = asyncio.create_task(router.accept())
    with pytest.raises(EngineDeadError, match=f"{PROTOCOL_VERSION + 1}.*{PROTOCOL_VERSION}"):
        await client.connect(DEADLINE_S)
    await accept
    router.socket.close(linger=0)


async def test_utility_calls_return_values_and_errors(router) -> None:
    client = await connected(router)

    async def serve() -> None:
        _, payload = await router.receive(EngineCoreRequestType.UTILITY)
        call = msgspec.msgpack.decode(payload, type=UtilityRequest)
        output = UtilityOutput(call.call_id, result=[call.method, *call.args])
        await router.send(EngineCoreResponseType.OUTPUTS, EngineCoreOutputs(utility_output=output))
        _, payload = await router.receive(EngineCoreRequestType.UTILITY)
        call = msgspec.msgpack.decode(payload, type=UtilityRequest)
        output = UtilityOutput(call.call_id, failure_message="no such method")
        await router.send(EngineCoreResponseType.OUTPUTS, EngineCoreOutputs(utility_output=output))

    server = asyncio.create_task(serve())
    assert await client.call("echo", 1, "x") == ["echo", 1, "x"]
    with pytest.raises(UtilityError, match="no such method"):
        await client.call("nonsense")
    await server
    with pytest.raises(TimeoutError, match=r"slow\(\)"):
        await client.call("slow", timeout_s=0.05)
    await client.close()
