"""X-Request-Id: every response has it, and log lines about a request contain it."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Iterator

import pytest

from baton_gateway.http.request_id import LogFormatter
from baton_protocol.engine_messages import ErrorCode
from support.gateway.fake_engine import DEADLINE_S
from support.gateway.gateway_rig import GatewayRig, http_session

GO = {"prompt": "go", "max_tokens": 5}
HEADER = "X-Request-Id"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Return the gateway's log, in its format."""
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(LogFormatter())
    logger = logging.getLogger("baton_gateway")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


async def response_id(
    rig: GatewayRig, *sent: str, method: str = "POST", path: str, **options
) -> str:
    """Send a request with these headers. Return the id in the response."""
    headers = [(HEADER, value) for value in sent]
    async with (
        http_session() as session,
        session.request(method, rig.url + path, headers=headers, **options) as response,
    ):
        await response.read()
        [found] = response.headers.getall(HEADER)
        return found


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/completions", GO),
        ("POST", "/v1/completions", GO | {"stream": True}),
        ("POST", "/v1/completions", GO | {"n": 0}),
        ("POST", "/tokenize", GO),
        ("POST", "/nowhere", GO),
        ("PUT", "/tokenize", GO),
        ("GET", "/health", None),
    ],
)
async def test_responses_errors_and_streams_have_the_id(
    rig: GatewayRig, method: str, path: str, body: object
) -> None:
    await rig.start(rig.engine("d", "decode"))
    sent = "Client_7:a.b=c+d/e@f-"
    assert await response_id(rig, sent, method=method, path=path, json=body) == sent
    new = {await response_id(rig, method=method, path=path, json=body) for _ in range(2)}
    assert len(new) == 2
    assert all(len(value) == 32 for value in new)


@pytest.mark.parametrize("sent", ["", "x" * 129, "grün", "a\tb", "a b", "a] b", 'a"b', "a,b"])
async def test_an_invalid_id_is_replaced(rig: GatewayRig, sent: str) -> None:
    await rig.start(rig.engine("d", "decode"))
    assert await response_id(rig, "x" * 128, method="GET", path="/version") == "x" * 128
    replaced = await response_id(rig, sent, method="GET", path="/version")
    assert len(replaced) == 32


async def test_log_lines_about_a_request_contain_its_id(rig: GatewayRig, log: io.StringIO) -> None:
    """The lines of concurrent requests, also those of tasks for each sample."""
    engine = rig.engine("d", "decode")
    engine.refuse = (ErrorCode.DRAINING, "not now")
    await rig.start(engine)
    sent = [f"client-{number}" for number in range(3)]
    await asyncio.gather(
        *(response_id(rig, value, path="/v1/completions", json=GO | {"n": 2}) for value in sent)
    )
    lines = [line for line in log.getvalue().splitlines() if "engine d failed" in line]
    about = [line.partition("[")[2].partition("] request cmpl-")[0] for line in lines]
    assert sorted(about) == sorted(sent * 2)
    logging.getLogger("baton_gateway").warning("about no request")
    assert log.getvalue().endswith("WARNING baton_gateway: about no request\n")


async def test_the_response_to_invalid_http_and_its_log_line_have_an_id(
    rig: GatewayRig, caplog: pytest.LogCaptureFixture
) -> None:
    await rig.start(rig.engine("d", "decode"))
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.url.rsplit(":", 1)[1]))
    with caplog.at_level(logging.INFO, "baton_gateway"):
        writer.write(b"no HTTP\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
    writer.close()
    name = head.partition(f"\r\n{HEADER}: ")[2].partition("\r\n")[0]
    assert name
    assert f"[{name}] 127.0.0.1 sent no valid HTTP request" in caplog.text
