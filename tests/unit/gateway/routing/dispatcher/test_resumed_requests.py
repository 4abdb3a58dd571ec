"""Requests are resumed on other engines within the same stream. Repeated failures end them."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from baton_gateway.routing.retry_state import MAX_FAILURES
from baton_protocol.engine_messages import ErrorCode
from baton_protocol.sampling_params import StructuredOutputKind
from support.gateway.fake_engine import FakeEngine, busy
from support.gateway.gateway_rig import GatewayRig, MakeRig
from support.waiting import until

TEXT = "hello world, the quick brown fox"
GO: dict[str, Any] = {"model": "m", "prompt": "go", "max_tokens": 50}
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 50,
}


def decode_engines(rig: GatewayRig, count: int, **options: Any) -> list[FakeEngine]:
    return [rig.engine(f"d{index}", "decode", TEXT, **options) for index in range(count)]


async def ask(rig: GatewayRig, path: str, **fields: Any) -> dict[str, Any]:
    status, body, _ = await rig.post(path, (CHAT if "chat" in path else GO) | fields)
    assert status == 200, body
    return body


async def streamed_text(rig: GatewayRig, path: str, **fields: Any) -> tuple[str, list[Any]]:
    """Return the text of choice 0 and all chunks."""
    client = rig.client()
    create: Any = client.chat.completions.create if "chat" in path else client.completions.create
    chunks = [
        chunk
        async for chunk in await create(**((CHAT if "chat" in path else GO) | fields), stream=True)
    ]
    pieces = [choice for chunk in chunks for choice in chunk.choices if choice.index == 0]
    return "".join((p.delta.content if "chat" in path else p.text) or "" for p in pieces), chunks


async def tokens_at_client(rig: GatewayRig, count: int) -> None:
    await until(
        lambda: rig.metric("baton:gateway_generation_tokens_total") == count,
        f"{count} tokens at the gateway",
    )


async def lose(rig: GatewayRig, engine: FakeEngine, how: str) -> None:
    if how == "dies":
        engine.die()
    elif how == "freezes":
        engine.freeze()
    elif how == "drains":
        engine.retire()
    elif how == "leaves":
        rig.announce(*(other for other in rig.engines if other is not engine))
        await until(
            lambda: len(rig.gateway.pool.available("decode")) == 1, "the engine out of the pool"
        )
        engine.die()


@pytest.mark.parametrize("how", ["dies", "freezes", "drains", "leaves"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_of_a_lost_engine_is_resumed(
    make_rig: MakeRig, how: str, path: str, stream: bool
) -> None:
    rig = make_rig(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.4)
    engines = decode_engines(rig, 2, hold_after=4)
    await rig.start(*engines)
    fields = {
        "seed": 7,
        "presence_penalty": 0.5,
        "min_tokens": 6,
        "guided_regex": ".*",
        "logit_bias": {"5": 1},
    }
    if stream:
        usage = {"stream_options": {"include_usage": True}}
        request: Any = asyncio.create_task(
            streamed_text(rig, path, **(_openai_fields(fields) | usage))
        )
    else:
        request = asyncio.create_task(ask(rig, path, **fields))
    first = await busy(engines)
    await tokens_at_client(rig, 4)
    for engine in engines:
        engine.hold_after = None
    await lose(rig, first, how)
    result = await request
    if stream:
        text, chunks = result
        usage = chunks[-1].usage.model_dump()
    else:
        [choice] = result["choices"]
        text = choice["message"]["content"] if "chat" in path else choice["text"]
        usage = result["usage"]
    assert text == TEXT
    assert usage["completion_tokens"] == len(first.answer)
    [second] = [engine for engine in engines if engine is not first]
    [begun], [resumed] = first.adds, second.adds
    assert resumed.generated_token_ids == first.answer[:4]
    assert resumed.prompt_token_ids == begun.prompt_token_ids
    assert resumed.sampling_params == begun.sampling_params
    assert resumed.sampling_params.structured_output.kind is StructuredOutputKind.REGEX
    assert (resumed.sampling_params.seed, resumed.sampling_params.min_tokens) == (7, 6)
    reason = "draining" if how == "drains" else "engine_lost"
    assert rig.metric("baton:requests_resumed_total", reason=reason) == 1
    assert rig.metric("baton:replayed_tokens_total") == 4


def _openai_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields for the `openai` client, which needs ours in `extra_body`."""
    ours = {name: fields[name] for name in ("min_tokens", "guided_regex")}
    return {name: value for name, value in fields.items() if name not in ours} | {
        "extra_body": ours
    }


@pytest.mark.parametrize(
    "code", [ErrorCode.INTERNAL, ErrorCode.DRAINING, ErrorCode.KV_LOAD, ErrorCode.INVALID]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_running_request_is_resumed_after_any_error(
    rig: GatewayRig, code: ErrorCode, stream: bool
) -> None:
    engines = decode_engines(rig, 2)
    engines[0].planned_errors = engines[1].planned_errors
    engines[0].planned_errors.append((3, code))
    await rig.start(*engines)
    if stream:
        assert (await streamed_text(rig, "/v1/completions"))[0] == TEXT
    else:
        assert (await ask(rig, "/v1/completions"))["choices"][0]["text"] == TEXT
    assert sorted(
        len(request.generated_token_ids) for engine in engines for request in engine.adds
    ) == [0, 3]
    assert rig.metric("baton:requests_resumed_total", reason=code.name.lower()) == 1


async def test_an_engine_lost_after_the_last_token_is_not_replaced(rig: GatewayRig) -> None:
    engine = decode_engines(rig, 1)[0]
    engine.planned_errors.append((3, ErrorCode.DRAINING))
    await rig.start(engine)
    body = await ask(rig, "/v1/completions", max_tokens=3)
    assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (
        3,
        "length",
    )
    assert len(engine.adds) == 1


async def test_a_stream_survives_ten_drained_engines(rig: GatewayRig) -> None:
    """These are twice MAX_FAILURES, without a token between some of them."""
    engines = decode_engines(rig, 2, hold_after=1)
    await rig.start(*engines)
    request = asyncio.create_task(streamed_text(rig, "/v1/completions"))
    await tokens_at_client(rig, 1)
    for operation in range(2 * MAX_FAILURES):
        engine = await busy(engines)
        engine.retire()
        [other] = [e for e in engines if e is not engine]
        await until(
            lambda other=other: other.num_unfinished == 1,
            f"the stream at another engine after operation {operation}",
        )
        engine.admit(operation % 3, 3)
        await rig.connected(*engines)
    for engine in engines:
        engine.release()
    assert (await request)[0] == TEXT
    assert rig.metric("baton:requests_resumed_total", reason="draining") == 2 * MAX_FAILURES


async def test_failures_with_progress_between_them_do_not_end_a_stream(rig: GatewayRig) -> None:
    # Without progress, except before the first error of each kind.
    planned_errors = [tokens for tokens in (1, 2) for _ in range(MAX_FAILURES - 1)]
    assert len(planned_errors) - 2 > MAX_FAILURES
    engines = decode_engines(rig, len(planned_errors) + 1)
    for engine in engines:
        engine.planned_errors = engines[0].planned_errors
    engines[0].planned_errors.extend((tokens, ErrorCode.INTERNAL) for tokens in planned_errors)
    await rig.start(*engines)
    assert (await streamed_text(rig, "/v1/completions"))[0] == TEXT
    assert rig.metric("baton:requests_resumed_total", reason="internal") == len(planned_errors)


async def test_failures_without_progress_end_a_request(rig: GatewayRig) -> None:
    engines = decode_engines(rig, MAX_FAILURES + 2)
    for engine in engines:
        engine.refuse = (ErrorCode.INTERNAL, "the step failed")
    await rig.start(*engines)
    status, body, _ = await rig.post("/v1/completions", GO)
    assert (status, body["error"]["code"]) == (500, "internal_error")
    assert sum(len(engine.adds) for engine in engines) == MAX_FAILURES


async def test_a_request_may_return_to_an_engine_that_is_ready_again(rig: GatewayRig) -> None:
    [engine] = decode_engines(rig, 1, hold_after=2)
    await rig.start(engine)
    request = asyncio.create_task(streamed_text(rig, "/v1/completions"))
    await tokens_at_client(rig, 2)
    engine.retire()
    await rig.connected()
    engine.hold_after = None
    engine.admit(0, 1)
    assert (await request)[0] == TEXT
    assert [len(request.generated_token_ids) for request in engine.adds] == [0, 2]
    assert len({request.request_id for request in engine.adds}) == 2, (
        "both attempts have the same request id"
    )


async def test_a_stream_waits_while_engines_are_full(rig: GatewayRig) -> None:
    engines = decode_engines(rig, 2)
    engines[0].hold_after = 3
    await rig.start(engines[0])
    request = asyncio.create_task(streamed_text(rig, "/v1/completions"))
    await tokens_at_client(rig, 3)
    engines[1].refuse = (ErrorCode.OVERLOADED, "full")
    rig.announce(*engines)
    await rig.connected(*engines)
    engines[0].die()
    await until(lambda: len(engines[1].adds) >= 2, "a second attempt")
    engines[1].refuse = None
    assert (await request)[0] == TEXT


async def test_a_stream_that_finds_no_room_ends_with_an_error(make_rig: MakeRig) -> None:
    rig = make_rig(resume_wait_s=0.2)
    engines = decode_engines(rig, 2, hold_after=3)
    await rig.start(*engines)
    request = asyncio.create_task(streamed_text(rig, "/v1/completions"))
    await tokens_at_client(rig, 3)
    first = await busy(engines)
    for engine in engines:
        engine.refuse = (ErrorCode.OVERLOADED, "full")
    first.die()
    with pytest.raises(openai.APIError, match="full"):
        await request


async def test_samples_are_resumed_together_with_their_own_tokens(rig: GatewayRig) -> None:
    engines = decode_engines(rig, 3, hold_after=3)
    await rig.start(*engines)
    request = asyncio.create_task(ask(rig, "/v1/completions", n=4))
    first = await busy(engines, 4)
    await tokens_at_client(rig, 12)
    first.retire()
    second = await busy([engine for engine in engines if engine is not first])
    await asyncio.wait([request], timeout=0.2)
    assert len(second.adds) == 1, "all samples were sent before the prompt was cached"
    for engine in engines:
        engine.release()
    body = await request
    assert [choice["text"] for choice in body["choices"]] == [TEXT] * 4
    assert sorted(request.sample_index for request in second.adds) == [0, 1, 2, 3]
    assert all(request.generated_token_ids == first.answer[:3] for request in second.adds)
    assert all(request.group_id == "" for request in second.adds)
    [third] = [engine for engine in engines if engine not in (first, second)]
    assert not third.adds
    assert body["usage"]["completion_tokens"] == 4 * len(first.answer)


async def test_samples_without_tokens_are_resumed_as_a_group(rig: GatewayRig) -> None:
    engines = decode_engines(rig, 3, hold_after=0)
    await rig.start(*engines)
    request = asyncio.create_task(ask(rig, "/v1/completions", n=3))
    first = await busy(engines, 3)
    for engine in engines:
        engine.hold_after = None
    first.die()
    await request
    [second] = [engine for engine in engines if engine is not first and engine.adds]
    assert len({request.group_id for request in second.adds} - {""}) == 1
    assert len(second.adds) == 3


async def test_samples_are_resumed_together_several_times(rig: GatewayRig) -> None:
    engines = decode_engines(rig, 4, hold_after=2)
    await rig.start(*engines)
    request = asyncio.create_task(ask(rig, "/v1/completions", n=2))
    first = await busy(engines, 2)
    await tokens_at_client(rig, 4)
    rest = [engine for engine in engines if engine is not first]
    for engine in rest:
        engine.hold_after = 4
    first.die()
    second = await busy(rest, 2)
    await tokens_at_client(rig, 8)
    for engine in engines:
        engine.hold_after = None
    second.die()
    assert [choice["text"] for choice in (await request)["choices"]] == [TEXT] * 2
    used = [engine for engine in rest if engine is not second and engine.adds]
    assert [len(engine.adds) for engine in used] == [2]


async def test_a_sample_that_fails_alone_is_resumed_alone(rig: GatewayRig) -> None:
    engines = decode_engines(rig, 2)
    for engine in engines:
        engine.hold_after = 2
        engine.planned_errors = engines[0].planned_errors
    engines[0].planned_errors.append((1, ErrorCode.INTERNAL))
    await rig.start(*engines)
    request = asyncio.create_task(ask(rig, "/v1/completions", n=3))
    await until(lambda: sum(len(engine.adds) for engine in engines) == 4, "one of three sent again")
    await tokens_at_client(rig, 6)
    for engine in engines:
        engine.release()
    assert [choice["text"] for choice in (await request)["choices"]] == [TEXT] * 3
    assert sorted(len(engine.adds) for engine in engines) == [1, 3]
    [alone] = next(engine for engine in engines if len(engine.adds) == 1).adds
    assert (alone.group_id, alone.generated_token_ids) == ("", engines[0].answer[:1])


@pytest.mark.parametrize("how", ["dies", "freezes", "drains"])
async def test_a_beam_search_is_restarted_on_another_engine(make_rig: MakeRig, how: str) -> None:
    rig = make_rig(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.4)
    engines = decode_engines(rig, 2, hold_after=0)
    await rig.start(*engines)
    request = asyncio.create_task(ask(rig, "/v1/completions", n=2, use_beam_search=True))
    first = await busy(engines)
    for engine in engines:
        engine.hold_after = None
    await lose(rig, first, how)
    body = await request
    assert body["choices"][0]["text"] == TEXT
    assert len(body["choices"]) == 2
    assert [add.generated_token_ids for engine in engines for add in engine.adds] == [[], []]
    assert rig.metric("baton:requests_resumed_total", reason="draining") == 0, (
        "a request without delivered tokens counts as resumed"
    )


async def test_cached_tokens_of_a_resumed_request_are_not_reported(rig: GatewayRig) -> None:
    engines = decode_engines(rig, 2)
    engines[0].planned_errors = engines[1].planned_errors
    engines[0].planned_errors.append((3, ErrorCode.DRAINING))
    for engine in engines:
        engine.cached_tokens = lambda request: 9 if request.generated_token_ids else 1
    await rig.start(*engines)
    body = await ask(rig, "/v1/completions")
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_long_gaps_in_a_stream_are_counted(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton_gateway.metrics.GAP_S", 0.1)
    [engine] = decode_engines(rig, 1, hold_after=3)
    await rig.start(engine)
    request = asyncio.create_task(ask(rig, "/v1/completions"))
    await tokens_at_client(rig, 3)
    began = asyncio.get_running_loop().time()
    await asyncio.wait([request], timeout=0.3)
    silent_s = asyncio.get_running_loop().time() - began
    engine.released.set()
    await request
    assert rig.metric("baton:gateway_stream_gap_seconds_count") == 1
    assert rig.metric("baton:gateway_stream_gap_seconds_sum") >= silent_s
