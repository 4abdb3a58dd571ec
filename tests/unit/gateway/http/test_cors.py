"""CORS: browsers let pages of allowed origins call the gateway, and no other pages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from baton_gateway.cli import load_config, main
from baton_protocol.options.config import AccessConfig
from support.gateway.fake_engine import DEADLINE_S
from support.gateway.gateway_rig import GatewayRig, MakeRig, http_session

PAGE = "https://chat.example.com"
KEY = "the-key-of-the-page"
OTHER = "http://chat.example.com"
COMPLETION = {"model": "m", "prompt": "hello", "max_tokens": 2}
ORIGIN = "Access-Control-Allow-Origin"
NAMES = "authorization,content-type,x-stainless-os"


@pytest.fixture
async def rig(make_rig: MakeRig, tmp_path: Path) -> GatewayRig:
    """Return a gateway that needs a key and allows PAGE and another origin."""
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "page").write_text(KEY)
    return await started(
        make_rig, "http://localhost:3000", PAGE, api_keys_dir=str(keys), max_prompt_tokens=99
    )


async def started(make_rig: MakeRig, *origins: str, **access: object) -> GatewayRig:
    rig = make_rig(access=AccessConfig(allowed_origins=origins, **access))
    await rig.start(rig.engine("d", "decode"))
    return rig


async def request(
    rig: GatewayRig, method: str, path: str, *, json: object = None, **headers: str
) -> tuple[int, Mapping[str, str]]:
    """Return the status and the headers of the response."""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        http_session() as session,
        session.request(method, rig.url + path, json=json, headers=headers) as response,
    ):
        await response.read()
        return response.status, response.headers


async def preflight(
    rig: GatewayRig, origin: str, path: str = "/v1/chat/completions", names: str = NAMES
) -> tuple[int, Mapping[str, str]]:
    wanted = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": names}
    return await request(rig, "OPTIONS", path, Origin=origin, **wanted)


async def test_a_preflight_of_an_allowed_origin_needs_no_key(rig: GatewayRig) -> None:
    for path in ("/v1/chat/completions", "/v1/models", "//tokenize/", "/nowhere"):
        status, headers = await preflight(rig, PAGE, path)
        assert status == 204
        assert headers[ORIGIN] == PAGE
        assert headers["Vary"] == "Origin"
        assert headers["Access-Control-Allow-Headers"] == NAMES
        assert headers["Access-Control-Allow-Methods"] == "GET, POST, DELETE"
        assert int(headers["Access-Control-Max-Age"]) > 0
        assert headers["Server"] == "baton"


@pytest.mark.parametrize("names", ["x-" + "a" * 2000, "authorization; x", "é"])
async def test_a_preflight_does_not_repeat_invalid_header_names(
    rig: GatewayRig, names: str
) -> None:
    status, headers = await preflight(rig, PAGE, names=names)
    assert (status, headers[ORIGIN]) == (204, PAGE)
    assert "Access-Control-Allow-Headers" not in headers


async def test_only_a_preflight_is_answered_without_a_key(rig: GatewayRig) -> None:
    assert (await request(rig, "OPTIONS", "/v1/models", Origin=PAGE))[0] == 401
    assert (await request(rig, "GET", "/v1/models", Origin=PAGE))[0] == 401


async def test_responses_errors_and_streams_allow_the_origin(rig: GatewayRig) -> None:
    for json, key, status in (
        (COMPLETION, KEY, 200),
        (COMPLETION | {"stream": True}, KEY, 200),
        (COMPLETION | {"n": 0}, KEY, 400),
        (COMPLETION, "wrong", 401),
    ):
        got, headers = await request(
            rig, "POST", "/v1/completions", json=json, Origin=PAGE, Authorization=f"Bearer {key}"
        )
        assert got == status
        assert (headers[ORIGIN], headers["Vary"]) == (PAGE, "Origin")
        assert headers["Access-Control-Expose-Headers"] == "Retry-After, X-Request-Id"
        assert "Access-Control-Allow-Credentials" not in headers


@pytest.mark.parametrize("origin", [OTHER, "null", f"{PAGE}:8443", "*", ""])
async def test_other_origins_get_no_header(rig: GatewayRig, origin: str) -> None:
    """A preflight has no key, so it gets 401 unless its origin is allowed."""
    refused = await preflight(rig, origin)
    served = await request(rig, "GET", "/v1/models", Origin=origin, Authorization=f"Bearer {KEY}")
    assert (refused[0], served[0]) == (401, 200)
    for _, headers in (refused, served):
        assert not [name for name in headers if name.startswith("Access-Control")]
        assert headers["Vary"] == "Origin", "a cache may give the response to an allowed origin"


async def test_a_star_allows_every_origin(make_rig: MakeRig) -> None:
    rig = await started(make_rig, "*")
    for status, headers in (
        await preflight(rig, OTHER),
        await request(rig, "GET", "/v1/models", Origin="null"),
    ):
        assert status in (200, 204)
        assert headers[ORIGIN] == "*"


async def test_the_response_to_invalid_http_has_the_header(make_rig: MakeRig) -> None:
    rig = await started(make_rig, "*")
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.url.rsplit(":", 1)[1]))
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: g\r\nno header\r\n\r\n")
    async with asyncio.timeout(DEADLINE_S):
        answer = await reader.read()
    writer.close()
    assert b" 400 " in answer.splitlines()[0]
    assert b"Access-Control-Allow-Origin: *\r\n" in answer


async def test_cors_is_off_by_default(make_rig: MakeRig) -> None:
    rig = await started(make_rig)
    status, headers = await preflight(rig, PAGE)
    assert status == 405
    _, more = await request(rig, "GET", "/v1/models", Origin=PAGE)
    assert not [name for name in {*headers, *more} if name.startswith(("Access-Control", "Vary"))]


def test_a_flag_sets_the_origins() -> None:
    config = load_config(["--model", "/m", "--allowed-origins", f"{PAGE}, http://[::1]:3000"])
    assert config.access.allowed_origins == (PAGE, "http://[::1]:3000")


@pytest.mark.parametrize("origin", ["chat.example.com", f"{PAGE}/", "https://Chat.example", "**"])
def test_an_invalid_origin_is_a_fatal_error(
    origin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", "/m", "--allowed-origins", f"{PAGE},{origin}"]) == 78
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("FATAL InvalidConfig: access.allowed_origins must be origins")
    assert origin in last
