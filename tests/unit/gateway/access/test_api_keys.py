"""API keys from files and limits per client, over real connections."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from baton_gateway import server
from baton_gateway.access import auth_delays
from baton_gateway.access.api_keys import ApiKeys
from baton_gateway.cli import main
from baton_gateway.errors import APIError
from baton_gateway.http.request_body import INLINE_BODY_BYTES
from baton_protocol.options.config import AccessConfig
from baton_protocol.process.fair_thread_pool import FairThreadPool
from support.gateway.certificates import write_certificate
from support.gateway.fake_engine import DEADLINE_S
from support.gateway.gateway_rig import GatewayRig, MakeRig, http_session
from support.waiting import until

OPEN = {"/", "/health", "/ready"}
COMPLETION = {"model": "m", "prompt": "hello", "max_tokens": 2}


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SECRETS_POLL_S", 0.02)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "team-a").write_text("the-key-of-team-a")
    (folder / "team-b").write_text("the-key-of-team-b\n")
    return folder


@pytest.fixture
async def guarded(make_rig: MakeRig, keys: Path) -> GatewayRig:
    rig = make_rig(access=AccessConfig(api_keys_dir=str(keys), max_concurrent_per_client=2))
    await rig.start(rig.engine("d", "decode"))
    return rig


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_clients_take_turns_in_the_threads_for_large_requests(
    guarded: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients: list[str] = []
    submit = FairThreadPool.submit

    def recorded(pool: FairThreadPool, client: str, call: Callable[[], Any]) -> Any:
        clients.append(client)
        return submit(pool, client, call)

    monkeypatch.setattr(FairThreadPool, "submit", recorded)
    large = COMPLETION | {"user": "x" * INLINE_BODY_BYTES}
    for team in ("team-a", "team-b"):
        clients.clear()
        headers = bearer(f"the-key-of-{team}")
        assert (await guarded.post("/v1/completions", large, headers=headers))[0] == 200
        assert set(clients) == {team}


async def status_of(rig: GatewayRig, **headers: str) -> int:
    async with (
        http_session() as session,
        session.get(f"{rig.url}/v1/models", headers=headers) as response,
    ):
        return response.status


def publish(folder: Path, version: str, entries: dict[str, str]) -> None:
    """Write files as the kubelet does for a Secret: in a new folder, behind a swapped symlink."""
    (folder / f"..{version}").mkdir(parents=True)
    for name, value in entries.items():
        (folder / f"..{version}" / name).write_text(value)
    (folder / "..data_tmp").symlink_to(f"..{version}")
    (folder / "..data_tmp").rename(folder / "..data")
    for name in entries:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")


async def test_a_client_with_a_key_is_served_and_counted_under_its_name(
    guarded: GatewayRig,
) -> None:
    client = guarded.client().with_options(api_key="the-key-of-team-a")
    answer = await client.completions.create(**COMPLETION)
    assert answer.choices[0].finish_reason == "length"
    assert guarded.metric("baton:client_requests_total", client="team-a", status="200") == 1


async def test_an_unknown_key_gets_an_openai_error(guarded: GatewayRig) -> None:
    with pytest.raises(openai.AuthenticationError) as refused:
        await guarded.client().completions.create(**COMPLETION)
    assert refused.value.code == "invalid_api_key"
    assert refused.value.type == "invalid_request_error"
    assert "unused" not in str(refused.value), "the response contains the key"
    assert refused.value.response.headers["WWW-Authenticate"] == "Bearer"
    assert guarded.engines[0].adds == []
    assert (
        guarded.metric("baton:http_requests_total", endpoint="/v1/completions", status="401") == 1
    )


async def test_every_path_except_probes_requires_a_key(
    guarded: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth_delays, "DELAY_S", 0.0)
    routes = {
        (route.method, route.resource.canonical.replace("{model}", "m"))
        for route in guarded.gateway.app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert {
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("GET", "/v1/models"),
        ("GET", "/ready"),
    } <= routes
    async with http_session() as session:
        for method, path in sorted(routes | {("GET", "/nowhere"), ("GET", "/metrics")}):
            for variant in (path, f"/{path}", f"{path}/"):
                async with session.request(method, guarded.url + variant) as response:
                    assert (response.status == 401) is (path not in OPEN), variant
        for path in OPEN:
            async with session.get(guarded.url + path) as response:
                assert response.status == 200, path
                assert await response.text() == ("ok" if path == "/" else "")


async def test_a_client_that_sends_heads_without_bodies_leaves_capacity_for_others(
    make_rig: MakeRig, keys: Path
) -> None:
    rig = make_rig(access=AccessConfig(api_keys_dir=str(keys)), max_concurrent_requests=8)
    await rig.start(rig.engine("d", "decode"))
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer the-key-of-team-a\r\n"
        b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    )
    pairs = [
        await asyncio.open_connection("127.0.0.1", int(rig.url.rsplit(":", 1)[1])) for _ in range(8)
    ]
    for _, writer in pairs:
        writer.write(head)
    refused = {"endpoint": "/v1/completions", "status": "429"}
    await until(lambda: rig.metric("baton:http_requests_total", **refused) == 6, "the refusals")
    for key, status in (
        ("the-key-of-team-b", 200),
        ("the-key-of-team-a", 200),
    ):  # bodies that come with their heads
        body = json.dumps(COMPLETION).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.url.rsplit(":", 1)[1]))
        writer.write(
            head.replace(b"the-key-of-team-a", key.encode()).replace(b"100", b"%d" % len(body))
            + body
        )
        async with asyncio.timeout(DEADLINE_S):
            assert int((await reader.readline()).split()[1]) == status
        writer.close()
    got, _, _ = await rig.post("/v1/completions", COMPLETION, headers=bearer("the-key-of-team-b"))
    assert got == 200
    for _, writer in pairs:
        writer.close()

    async def is_admitted() -> bool:
        return (await rig.post("/tokenize", {"prompt": "a"}, headers=bearer("the-key-of-team-a")))[
            0
        ] == 200

    await until(is_admitted, "the release of the reservations of closed connections")


async def test_requests_without_a_key_do_not_prolong_the_graceful_shutdown(
    make_rig: MakeRig, keys: Path
) -> None:
    access = AccessConfig(api_keys_dir=str(keys))
    rig = make_rig(access=access, drain_quiet_s=0.3, drain_timeout_s=600.0)
    await rig.start(rig.engine("d", "decode"))
    shutdown = asyncio.create_task(rig.gateway.shut_down())

    async def has_ended() -> bool:
        try:
            assert await status_of(rig) == 401
        except aiohttp.ClientError:
            await shutdown
        return shutdown.done()

    await until(has_ended, "the end of the gateway")


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ("Bearer the-key-of-team-b", 200),
        ("bearer the-key-of-team-b", 200),
        ("BEARER   the-key-of-team-b  ", 200),
        ("the-key-of-team-b", 401),
        ("Basic the-key-of-team-b", 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        ("Bearer the-key-of-team-b extra", 401),
        ("Bearer the-key-of-team-", 401),
        ("Bearer the-key-of-team-bb", 401),
        ("Bearer THE-KEY-OF-TEAM-B", 401),
        ("Bearer the-key-of-team-b\x00", 400),
        ("Bearer kéy", 401),
        ("Bearer " + "k" * 20_000, 400),
    ],
)
async def test_only_valid_authorization_headers_are_accepted(
    guarded: GatewayRig, value: str, status: int
) -> None:
    """The request is raw bytes, because client libraries refuse some of these headers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(guarded.url.rsplit(":", 1)[1]))
    request = (
        f"GET /v1/models HTTP/1.1\r\nHost: g\r\nConnection: close\r\nAuthorization: {value}\r\n\r\n"
    )
    writer.write(request.encode())
    async with asyncio.timeout(DEADLINE_S):
        answer = await reader.readline()
    writer.close()
    assert int(answer.split()[1]) == status
    assert await status_of(guarded, **bearer("the-key-of-team-a")) == 200


@pytest.mark.parametrize(
    "line",
    [
        "Authorization: Bearer the-key-of-team-b\x00",
        "Authorization: Bearer the-key-of-team-b" + "k" * 20_000,
        "no header",
    ],
)
async def test_invalid_http_gets_an_openai_error_and_is_not_logged(
    guarded: GatewayRig, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(guarded.url.rsplit(":", 1)[1]))
    with caplog.at_level(logging.DEBUG):
        writer.write(f"GET /v1/models HTTP/1.1\r\nHost: g\r\n{line}\r\n\r\n".encode())
        async with asyncio.timeout(DEADLINE_S):
            answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 400 " in head.splitlines()[0]
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")
    assert b"the-key-of-team-b" not in answer
    assert "the-key-of-team-b" not in caplog.text, "the log contains the key"
    assert "sent no valid HTTP request" in caplog.text


async def test_a_client_that_guesses_keys_is_slowed_and_others_are_not(
    guarded: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth_delays, "DELAY_S", DEADLINE_S)
    for _ in range(auth_delays.BURST):
        assert await status_of(guarded, **bearer("a-wrong-guess-of-a-key")) == 401
    guess = asyncio.create_task(status_of(guarded, **bearer("another-wrong-guess")))
    await until(lambda: guarded.metric("baton:gateway_connections") == 1, "the guess to arrive")
    assert await status_of(guarded, **bearer("the-key-of-team-a")) == 200
    assert not guess.done(), "the guess was answered at once"
    guess.cancel()


async def test_guesses_do_not_take_the_connections_of_others(
    make_rig: MakeRig, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth_delays, "DELAY_S", DEADLINE_S)
    monkeypatch.setattr(auth_delays, "BURST", 0)
    rig = make_rig(access=AccessConfig(api_keys_dir=str(keys)), max_connections=3)
    await rig.start(rig.engine("d", "decode"))
    guesses = [asyncio.create_task(status_of(rig)) for _ in range(3)]
    await until(lambda: rig.metric("baton:gateway_connections") == 3, "the guesses to arrive")
    assert await status_of(rig, **bearer("the-key-of-team-a")) == 200
    for guess in guesses:
        guess.cancel()
    await asyncio.gather(*guesses, return_exceptions=True)


async def test_two_headers_of_one_name_are_refused(guarded: GatewayRig) -> None:
    for name, prefix in (("Authorization", "Bearer "), ("X-Api-Key", "")):
        headers = [(name, f"{prefix}the-key-of-team-a"), (name, f"{prefix}wrong")]
        for order in (headers, headers[::-1]):
            async with (
                http_session() as session,
                session.get(f"{guarded.url}/v1/models", headers=order) as response,
            ):
                assert response.status == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"X-Api-Key": "the-key-of-team-a"}, 200),
        ({"X-Api-Key": "Bearer the-key-of-team-a"}, 401),
        ({"X-Api-Key": "wrong"}, 401),
        ({"X-Api-Key": ""}, 401),
        ({"X-Api-Key": "the-key-of-team-a", "Authorization": "Bearer wrong"}, 401),
        ({"X-Api-Key": "wrong", "Authorization": "Bearer the-key-of-team-a"}, 200),
    ],
)
async def test_without_authorization_the_key_may_be_in_x_api_key(
    guarded: GatewayRig, headers: dict[str, str], status: int
) -> None:
    assert await status_of(guarded, **headers) == status


async def test_a_request_without_a_key_is_refused_before_its_body_is_read(
    guarded: GatewayRig,
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(guarded.url.rsplit(":", 1)[1]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 1000000\r\n\r\n")
    async with asyncio.timeout(DEADLINE_S):
        assert b"401" in await reader.readline()
    writer.close()


def test_invalid_key_files_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    contents = {
        "empty": b"",
        "blank": b" \r\n",
        "lines": b"one-long-key\ntwo-long-key",
        "spaced": b"one-long-key two-long-key",
        "latin": "ein-langer-schlüssel".encode(),
        "mark": b"\xef\xbb\xbfa-key-after-a-mark",
        "long": b"k" * 5000,
        "short": b"fifteen-letters",
        "crlf": b"a-good-key-of-22-chars\r\n",
        "same": b" a-good-key-of-22-chars ",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    with caplog.at_level(logging.INFO, "baton_gateway.access.api_keys"):
        keys = ApiKeys(tmp_path)
    assert keys.client_of(["Bearer a-good-key-of-22-chars"], []) == "crlf"
    for offered in (
        *("", " ", "one-long-key", "two-long-key", "one-long-key two-long-key"),
        *("ein-langer-schlüssel", "a-key-after-a-mark", "k" * 5000, "k" * 4096, "fifteen-letters"),
    ):
        with pytest.raises(APIError):
            keys.client_of([f"Bearer {offered}"], [])
    assert "API keys of 1 clients: crlf" in caplog.text
    for name in contents.keys() - {"crlf"}:
        assert f"API key of client {name} is ignored" in caplog.text
    for key in ("a-good-key-of-22-chars", "fifteen-letters"):
        assert key not in caplog.text, "the log contains the key"


async def test_changed_keys_are_reloaded(make_rig: MakeRig, tmp_path: Path) -> None:
    folder = tmp_path / "secret"
    publish(folder, "1", {"a": "the-first-api-key", "b": "the-other-api-key"})
    rig = make_rig(access=AccessConfig(api_keys_dir=str(folder)))
    await rig.start(rig.engine("d", "decode"))
    assert await status_of(rig, **bearer("the-first-api-key")) == 200

    async def has_status(key: str, status: int) -> bool:
        return await status_of(rig, **bearer(key)) == status

    publish(folder, "2", {"a": "the-second-api-key"})
    await until(lambda: has_status("the-second-api-key", 200), "the new key to be accepted")
    assert await status_of(rig, **bearer("the-first-api-key")) == 401
    assert await status_of(rig, **bearer("the-other-api-key")) == 401, "a removed key was accepted"
    publish(folder, "3", {})
    await until(lambda: has_status("the-second-api-key", 401), "all keys to be refused")
    folder.rename(tmp_path / "gone")
    publish(tmp_path / "gone", "4", {"a": "the-third-api-key"})
    (tmp_path / "gone").rename(folder)
    await until(
        lambda: has_status("the-third-api-key", 200),
        "the folder to be read again after it was missing",
    )


async def test_limits_per_client_leave_capacity_for_others(guarded: GatewayRig) -> None:
    engine = guarded.engines[0]
    engine.hold_after = 1
    greedy = guarded.client().with_options(api_key="the-key-of-team-a")
    modest = guarded.client().with_options(api_key="the-key-of-team-b")
    running = [asyncio.create_task(greedy.completions.create(**COMPLETION)) for _ in range(2)]
    await until(lambda: len(engine.adds) == 2, "both run")
    with pytest.raises(openai.RateLimitError) as refused:
        await greedy.completions.create(**COMPLETION)
    assert refused.value.response.headers["Retry-After"] == "1"
    with pytest.raises(openai.BadRequestError, match="at most 2 sequences"):
        await modest.completions.create(**COMPLETION, n=3)
    other = asyncio.create_task(modest.completions.create(**COMPLETION))
    await until(lambda: len(engine.adds) == 3, "the request of another client")
    engine.released.set()
    await asyncio.gather(*running, other)
    assert (await greedy.completions.create(**COMPLETION, n=2)).choices, (
        "ended requests still count"
    )


async def test_prompt_and_completion_lengths_are_limited(make_rig: MakeRig) -> None:
    rig = make_rig(access=AccessConfig(max_prompt_tokens=40, max_completion_tokens=1))
    await rig.start(rig.engine("d", "decode", "hello world hello world"))
    client = rig.client()
    for prompt in ([5] * 41, "hello world " * 60):
        with pytest.raises(openai.BadRequestError, match="prompts of at most 40 tokens") as long:
            await client.completions.create(model="m", prompt=prompt, max_tokens=1)
        assert (long.value.code, long.value.param) == ("prompt_too_long", "prompt")
    with pytest.raises(openai.BadRequestError, match="generates at most 1 tokens, got 2"):
        await client.completions.create(model="m", prompt=[5] * 40, max_tokens=2)
    with pytest.raises(openai.BadRequestError, match="at most 1 tokens, got 3") as many:
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": ""}], max_completion_tokens=3
        )
    assert many.value.param == "max_completion_tokens"
    answer = await client.completions.create(model="m", prompt=[5] * 40)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (1, "length")


@pytest.mark.parametrize("lowest", [0, -5])
async def test_priorities_do_not_move_a_client_before_others(
    make_rig: MakeRig, lowest: int
) -> None:
    access = AccessConfig() if lowest == 0 else AccessConfig(min_priority=lowest)
    rig = make_rig(access=access)
    engine = rig.engine("d", "decode")
    await rig.start(engine)
    for priority in (-(2**31), lowest - 1):
        for stream in (False, True):
            body = COMPLETION | {"priority": priority, "stream": stream}
            status, answer, _ = await rig.post("/v1/completions", body)
            assert (status, answer["error"]["param"]) == (400, "priority")
            assert f"no priority below {lowest}, got {priority}" in answer["error"]["message"]
    assert engine.adds == []
    for priority in (lowest, 0, 2**31 - 1, None):
        status, _, _ = await rig.post("/v1/completions", COMPLETION | {"priority": priority})
        assert status == 200
    assert [request.priority for request in engine.adds] == [lowest, 0, 2**31 - 1, 0]


async def test_names_of_clients_are_only_on_the_port_of_the_metrics(
    make_rig: MakeRig, keys: Path, tmp_path: Path
) -> None:
    write_certificate(tmp_path / "tls", "gateway")
    rig = make_rig(access=AccessConfig(api_keys_dir=str(keys), tls_dir=str(tmp_path / "tls")))
    await rig.start(rig.engine("d", "decode"))
    secure = rig.url.replace("http:", "https:")
    async with http_session() as session:
        for path in ("/health", "/ready", "/metrics", "/v1/models"):
            headers = bearer("the-key-of-team-a") if path == "/v1/models" else {}
            async with session.get(secure + path, ssl=False, headers=headers) as response:
                assert response.status == (401 if path == "/metrics" else 200)
                assert b"team-a" not in await response.read()
        key = bearer("the-key-of-team-a")
        async with session.get(f"{secure}/metrics", ssl=False, headers=key) as response:
            assert response.status == 404
        # The port of the metrics serves plain HTTP, and only the paths of probes and metrics.
        for path in ("/health", "/ready"):
            async with session.get(rig.metrics_url + path) as response:
                assert response.status == 200
        for path in ("/v1/models", "/v1/completions", "/version"):
            async with session.get(rig.metrics_url + path, headers=key) as response:
                assert response.status == 404
    assert 'baton:client_requests_total{client="team-a",status="200"} 1.0' in await rig.scrape()


async def test_clients_that_fill_their_port_leave_the_port_of_the_probes_free(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(max_connections=1)
    engine = rig.engine("d", "decode", hold_after=1)
    await rig.start(engine)
    stream = asyncio.create_task(rig.complete())
    await until(lambda: engine.adds, "the request at the engine")
    with pytest.raises(aiohttp.ClientError):
        await rig.get("/health")
    async with http_session() as session, session.get(f"{rig.metrics_url}/health") as response:
        assert response.status == 200
    engine.released.set()
    await stream


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--api-keys-dir", "/nowhere/keys"], "FATAL InvalidAccess: API keys or certificate: "),
        (["--tls-dir", "/nowhere/tls"], "FATAL InvalidAccess: API keys or certificate: "),
        (
            ["--max-prompt-tokens", "0"],
            "FATAL InvalidConfig: access.max_prompt_tokens must be positive",
        ),
        (
            ["--max-concurrent-per-client", "1"],
            "FATAL InvalidConfig: access.max_concurrent_per_client needs",
        ),
    ],
)
def test_invalid_access_settings_are_a_fatal_error(
    flags: list[str], text: str, tokenizer_folder: Path, capsys: pytest.CaptureFixture[Any]
) -> None:
    assert main(["--model", str(tokenizer_folder), "--discovery-file", "f", *flags]) == 78
    assert text in capsys.readouterr().err.strip().splitlines()[-1]
