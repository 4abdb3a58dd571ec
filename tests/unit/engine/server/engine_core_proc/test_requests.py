"""An engine process over real sockets with a fake model: text, refusals, aborts and calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq

from baton_engine.server import engine_io
from baton_protocol.engine_client.engine_client import UtilityError
from baton_protocol.engine_messages import (
    PROTOCOL_VERSION,
    ClientHello,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreResponseType,
    ErrorCode,
    FinishReason,
    KVSide,
    KVTransferParams,
    Ready,
)
from baton_protocol.engine_messages import EngineCoreRequestType as RequestType
from baton_protocol.sampling_params import SamplingParams
from support.engine.engine_fakes import continuation
from support.engine.engine_process import DEADLINE_S, HOST, collect, connect, request, tokens

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
