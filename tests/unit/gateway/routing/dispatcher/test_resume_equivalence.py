"""A resumed request has the same response as one that is not interrupted."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from baton_protocol.engine_messages import ErrorCode
from support.gateway.fake_engine import FakeEngine
from support.gateway.gateway_rig import GatewayRig

ENGINES = 4
PIECES = st.sampled_from(
    ["a", "b", "ab", "ba", " ", "hello", "é", "你", "🙂", "👨‍👩‍👧", "\n", "\ufffd"]
)
TEXTS = st.lists(PIECES, min_size=2, max_size=12).map("".join)
CODES = st.sampled_from([ErrorCode.DRAINING, ErrorCode.INTERNAL, ErrorCode.KV_LOAD])


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    text = draw(TEXTS)
    stops = draw(
        st.lists(
            st.one_of(TEXTS.map(lambda stop: stop[:3]), _parts_of(text)), max_size=3, unique=True
        )
    )
    return {
        "text": text,
        "planned_errors": draw(
            st.lists(st.tuples(st.integers(0, 9), CODES), min_size=1, max_size=ENGINES - 1)
        ),
        "tokens_per_output": draw(st.sampled_from([1, 1, 2, 5])),
        "fields": {
            "stop": stops or None,
            "stream": draw(st.booleans()),
            "include_stop_str_in_output": draw(st.booleans()),
            "min_tokens": draw(st.sampled_from([0, 0, 3])),
            "max_tokens": draw(st.sampled_from([6, 200, 200])),
            "return_token_ids": draw(st.booleans()),
            "logprobs": draw(st.sampled_from([None, 1])),
            "echo": draw(st.booleans()),
        },
    }


def _parts_of(text: str) -> st.SearchStrategy[str]:
    return st.tuples(st.integers(0, len(text) - 1), st.integers(1, 6)).map(
        lambda span: text[span[0] : sum(span)]
    )


@pytest.fixture
async def group(rig: GatewayRig) -> list[FakeEngine]:
    engines = [rig.engine(f"d{index}", "decode") for index in range(ENGINES)]
    await rig.start(*engines)
    return engines


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@settings(
    max_examples=75, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(case=cases())
async def test_an_interrupted_request_has_the_same_response(
    rig: GatewayRig, group: list[FakeEngine], path: str, case: dict[str, Any]
) -> None:
    fields = dict(case["fields"])
    if "chat" in path:
        fields["logprobs"] = None if fields["logprobs"] is None else True
        del fields["echo"]
    planned_errors = deque(case["planned_errors"])
    for engine in group:
        engine.answer = rig.tokenizer.encode(case["text"], add_special_tokens=False)
        engine.tokens_per_output, engine.planned_errors = case["tokens_per_output"], deque()
        engine.adds.clear()
    assume(group[0].answer)
    uninterrupted = await _answer(rig, path, fields)
    [request] = [request for engine in group for request in engine.adds]
    for engine in group:
        engine.planned_errors = planned_errors
        engine.adds.clear()
    retries = _retries(rig)
    assert await _answer(rig, path, fields) == uninterrupted
    sent = [request for engine in group for request in engine.adds]
    assert len(sent) == 1 + _retries(rig) - retries
    event(f"sent {len(sent)} times")
    for again in sent:
        assert again.generated_token_ids == group[0].answer[: len(again.generated_token_ids)]
        assert again.sampling_params.max_tokens == request.sampling_params.max_tokens
        if again.generated_token_ids:
            assert again.sampling_params.prompt_logprobs is None, "they were sent already"


def _retries(rig: GatewayRig) -> int:
    codes = (ErrorCode.DRAINING, ErrorCode.INTERNAL, ErrorCode.KV_LOAD)
    return sum(
        int(rig.metric("baton:request_retries_total", reason=code.name.lower())) for code in codes
    )


async def _answer(rig: GatewayRig, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return text, logprobs, ids, reasons and usage of the only choice, joined from chunks."""
    prompt = (
        {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "go"}
    )
    body = {"model": "m", "seed": 1, **prompt, **fields}
    if not fields["stream"]:
        status, answer, _ = await rig.post(path, body)
        assert status == 200, answer
        return _joined(answer["usage"], [answer["choices"][0]])
    chunks = await rig.events(path, body | {"stream_options": {"include_usage": True}})
    return _joined(chunks[-1]["usage"], [choice for chunk in chunks for choice in chunk["choices"]])


def _joined(usage: dict[str, Any], parts: list[dict[str, Any]]) -> dict[str, Any]:
    logprobs = [part["logprobs"] for part in parts if part.get("logprobs")]
    return {
        "text": "".join(_text(part) for part in parts),
        "logprobs": [
            item for part in logprobs for item in part.get("content") or part["token_logprobs"]
        ],
        "token_ids": [token_id for part in parts for token_id in part.get("token_ids") or []],
        "reasons": [
            (p["finish_reason"], p.get("stop_reason")) for p in parts if p.get("finish_reason")
        ],
        "usage": usage,
    }


def _text(part: dict[str, Any]) -> str:
    if "text" in part:
        return part["text"]
    return (
        (part.get("delta") or part.get("message"))["content"] or ""
        if part.get("delta") != {}
        else ""
    )
