"""The log has the text of an engine's exception, and clients get the id of the log line."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from baton_gateway.requests import generator
from baton_protocol.engine_messages import Dead, EngineCoreResponseType, ErrorCode
from support.gateway.fake_engine import FakeEngine
from support.gateway.gateway_rig import GatewayRig, MakeRig, http_session
from support.waiting import until

CANARY = "canary: /var/crash/17, peer 10.0.0.7"


async def response(rig: GatewayRig, *, stream: bool) -> str:
    """Return the headers and the body of the response to a request."""
    body = {"model": "m", "prompt": "go", "max_tokens": 50, "stream": stream}
    async with (
        http_session() as session,
        session.post(f"{rig.url}/v1/completions", json=body) as answer,
    ):
        return json.dumps(dict(answer.headers)) + await answer.text()


def check(answer: str, log: str) -> None:
    """Check that `answer` lacks the canary, and that `log` has it beside the answer's id."""
    assert "canary" not in answer
    found = re.search(r"log has the reason under the id ([\w-]+)\.", answer)
    assert found, answer
    assert [line for line in log.splitlines() if found[1] in line and CANARY in line], log


@pytest.fixture
def rig(make_rig: MakeRig) -> GatewayRig:
    return make_rig(resume_wait_s=0.1, queue_wait_s=0.1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", [ErrorCode.INTERNAL, ErrorCode.KV_LOAD, ErrorCode.DRAINING, None])
async def test_the_text_of_an_engine_error_is_only_in_the_log(
    rig: GatewayRig, code: ErrorCode | None, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = rig.engine("d", "decode")
    engine.refuse = (code, CANARY)  # type: ignore[assignment]  # None: an unknown error
    await rig.start(engine)
    check(await response(rig, stream=stream), caplog.text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_the_cause_of_an_engine_failure_is_only_in_the_log(
    rig: GatewayRig, num_tokens: int, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = rig.engine("d", "decode", "hello world, the quick brown fox")
    engine.hold_after = num_tokens
    await rig.start(engine)
    answer = asyncio.create_task(response(rig, stream=stream))
    await until(lambda: engine.adds, "the request at the engine")
    if num_tokens:
        await until(lambda: rig.metric("baton:gateway_generation_tokens_total") > 0, "a token")
    fail(engine)
    check(await answer, caplog.text)


async def test_the_cause_of_a_failed_attempt_is_only_in_the_log_after_a_shutdown(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(drain_timeout_s=0.1, resume_wait_s=60.0)
    engine = rig.engine("d", "decode", hold_after=1)
    await rig.start(engine)
    answer = asyncio.create_task(response(rig, stream=False))
    await until(lambda: engine.adds, "the request at the engine")
    fail(engine)
    await until(lambda: "trying another" in caplog.text, "the failed attempt")
    await rig.gateway.stop()
    text = await answer
    assert "This gateway shut down" in text
    check(text, caplog.text)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_text_of_a_gateway_exception_is_only_in_the_log(
    rig: GatewayRig,
    stream: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError(CANARY)

    monkeypatch.setattr(generator, "_texts", broken)
    await rig.start(rig.engine("d", "decode"))
    answer = await response(rig, stream=stream)
    assert "canary" not in answer
    found = re.search(r"The gateway failed\. .* under the id ([\w-]+)\.", answer)
    assert found, answer
    assert f"sequence {found[1]} failed" in caplog.text
    assert CANARY in caplog.text


def fail(engine: FakeEngine) -> None:
    """Send DEAD with the canary, as an engine whose step has failed, and answer nothing more."""
    engine.freeze()
    engine._send(engine._last_peer, EngineCoreResponseType.DEAD, Dead(CANARY))
