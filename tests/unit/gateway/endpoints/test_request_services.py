"""Invalid requests get OpenAI errors with the field's name and reach no engine."""

from __future__ import annotations

import asyncio
import json
import logging

import openai
import pytest
from aiohttp import web

from baton_gateway import components
from baton_gateway.http.body_budget import MAX_BODY_BYTES
from support.gateway.fake_engine import DEADLINE_S
from support.gateway.gateway_rig import GatewayRig, MakeRig, http_session
from support.waiting import until

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


def message(**fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "hi"} | fields]}


BAD_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    (message(role="wizard"), "messages[0].role"),
    (message(role=3), "messages[0].role"),
    (message(content=None), "messages[0].content"),
    (message(content=[{"type": "image_url", "image_url": {}}]), "messages[0].content[0].type"),
    (message(content=[{"type": "text"}]), "messages[0].content[0].text"),
    (message(tool_calls=[{}]), "messages[0].tool_calls[0].function"),
    (message(role="tool"), "messages"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "ten"}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_completion_tokens": -5}, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 0}, "max_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a"] * 33}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [2**70]}, "stop_token_ids"),
    ({"priority": 2**70}, "priority"),
    ({"priority": -1}, "priority"),
    ({"top_k": 2**70}, "top_k"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": 1}},
        "stream_options.continuous_usage_stats",
    ),
    ({"bad_words": ["word"] * 513}, "bad_words"),
    ({"bad_words": ["w" * 1025]}, "bad_words"),
    ({"cache_salt": "s" * 1025}, "cache_salt"),
    ({"logit_bias": {"1_0": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"use_beam_search": True, "guided_regex": "a"}, "guided_regex"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": {"xml": 1}}, "structured_outputs"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [100000]}, "allowed_token_ids"),
    ({"bad_words": [" "]}, "bad_words"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 3, "n": 2, "stream": True}, "best_of"),
    ({"best_of": 3, "n": 2, "use_beam_search": True}, "best_of"),
    ({"use_beam_search": True, "n": 65}, "n"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"guided_json": {}} | {"guided_regex": "a+"}, "guided_regex"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
]

BAD_COMPLETIONS = [
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, [2]]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [1, 100000]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"suffix": "end"}, "suffix"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
]


@pytest.fixture
async def ready(rig: GatewayRig) -> GatewayRig:
    await rig.start(rig.engine("d", "decode"))
    return rig


async def test_invalid_fields_are_named(ready: GatewayRig) -> None:
    for path, good, cases in (
        ("/v1/chat/completions", CHAT, BAD_CHATS),
        ("/v1/completions", TEXT, BAD_COMPLETIONS),
    ):
        for fields, param in cases:
            error = await ready.refused(path, good | fields)
            assert (error["param"], error["type"]) == (param, "invalid_request_error"), (
                fields,
                error,
            )
            assert param.split(".")[-1].split("[")[0] in error["message"], (fields, error)


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
)
async def test_missing_fields_are_named(
    ready: GatewayRig, path: str, body: dict[str, object]
) -> None:
    name = (body.keys() - {"model"}).pop()
    error = await ready.refused(path, {"model": "m"})
    assert (error["param"], error["message"]) == (name, f"{name} is required")


async def test_fields_of_other_servers_and_nulls_are_ignored(ready: GatewayRig) -> None:
    nulls = {
        "temperature": None,
        "stop": None,
        "max_tokens": None,
        "tools": None,
        "n": None,
        "logit_bias": None,
    }
    harmless = {
        "user": "u",
        "store": False,
        "metadata": {},
        "service_tier": "auto",
        "brand_new_field": [1],
    }
    off = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
    }
    for extra in (nulls, harmless, off):
        status, body, _ = await ready.post("/v1/chat/completions", CHAT | extra)
        assert status == 200, body


async def test_malformed_json_is_refused(ready: GatewayRig) -> None:
    headers = {"Content-Type": "application/json"}
    for body in (b"{", b"", b'{"model": NaN}', b"\xff\xfe", b'{"model": "m\xff"}'):
        status, answer, _ = await ready.post("/v1/completions", body, headers=headers)
        assert (status, answer["error"]["code"]) == (400, "invalid_json"), body
    status, answer, _ = await ready.post("/v1/completions", b"[1]", headers=headers)
    assert status == 400
    assert "JSON object" in answer["error"]["message"]


async def test_json_that_is_nested_too_deeply_is_refused(ready: GatewayRig) -> None:
    for field in ("guided_json", "a_field_nobody_knows"):
        nested = b'{"a": ' * 50_000 + b"1" + b"}" * 50_000
        body = b'{"model": "m", "prompt": "hi", "%s": ' % field.encode() + nested + b"}"
        status, answer, _ = await ready.post(
            "/v1/completions", body, headers={"Content-Type": "application/json"}
        )
        assert (status, answer["error"]["code"]) == (400, "invalid_json")


async def test_a_body_that_contradicts_its_headers_is_refused(ready: GatewayRig) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    status, answer, _ = await ready.post("/v1/completions", b"not gzip", headers=headers)
    assert (status, answer["error"]["code"]) == (400, "invalid_body")


async def test_an_unknown_expectation_is_ignored(ready: GatewayRig) -> None:
    headers = {"Expect": "a-miracle"}
    status, answer, _ = await ready.post("/v1/completions", TEXT, headers=headers)
    assert status == 200, answer
    status, answer, _ = await ready.post("/v1/nothing", TEXT, headers=headers)
    assert (status, answer["error"]["code"]) == (404, "unknown_url")


async def test_expect_100_continue_is_answered(ready: GatewayRig) -> None:
    port = int(ready.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(TEXT).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nExpect: 100-Continue\r\n\r\n"
    )
    writer.write(head.encode())
    async with asyncio.timeout(DEADLINE_S):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert b" 200 " in await reader.readline()
    writer.close()


@pytest.mark.parametrize(
    ("path", "is_anthropic"), [("/v1/messages", True), ("/v1/completions", False)]
)
async def test_a_failure_before_the_handlers_has_the_shape_of_the_api(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, path: str, is_anthropic: bool
) -> None:
    @web.middleware
    async def fail(request: web.Request, handler: object) -> web.StreamResponse:
        raise RuntimeError("a bug")

    monkeypatch.setattr(components, "log_request_id", fail)
    rig = make_rig()
    await rig.start(rig.engine("d", "decode"))
    status, answer, _ = await rig.post(path, CHAT | TEXT)
    assert status == 500
    assert (answer.get("type") == "error") is is_anthropic, answer
    assert answer["error"]["type"] == ("api_error" if is_anthropic else "server_error")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_template_variables_must_not_replace_fields_of_the_request(
    ready: GatewayRig, path: str
) -> None:
    variables = {"chat_template_kwargs": {"add_generation_prompt": False}}
    status, answer, _ = await ready.post(path, CHAT | variables)
    assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs.add_generation_prompt")


async def test_template_variables_may_have_any_name(ready: GatewayRig) -> None:
    status, answer, _ = await ready.post(
        "/v1/chat/completions", CHAT | {"chat_template_kwargs": {"self": 1, "values": 2}}
    )
    assert status == 200, answer


@pytest.mark.parametrize("option", ["request_timeout_s", "client_timeout_s"])
async def test_a_body_that_never_ends_times_out(make_rig: MakeRig, option: str) -> None:
    rig = make_rig(**{option: 0.3})
    await rig.start(rig.engine("d", "decode"))
    port = int(rig.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\n\r\n{"
    )
    writer.write(head)
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), DEADLINE_S)
    assert b"408" in answer
    assert rig.metric("baton:requests_in_flight") == 0
    writer.close()


async def test_an_unknown_model_is_refused(ready: GatewayRig) -> None:
    error = await ready.refused("/v1/completions", TEXT | {"model": "gpt-9"}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'m'" in error["message"]
    with pytest.raises(openai.NotFoundError):
        await ready.client().models.retrieve("org/gpt-9")


async def test_an_invalid_content_type_route_or_method_is_refused(ready: GatewayRig) -> None:
    for path in ("/v1/completions", "/v1/embeddings", "/tokenize"):
        status, answer, _ = await ready.post(
            path, json.dumps(TEXT).encode(), headers={"Content-Type": "text/plain"}
        )
        assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")
    status, answer, _ = await ready.post("/v1/nothing", TEXT)
    assert (status, answer["error"]["code"]) == (404, "unknown_url")
    status, answer, headers = await ready.post("/v1/models", TEXT)
    assert (status, answer["error"]["code"]) == (405, "method_not_allowed")
    assert "GET" in headers["Allow"]
    status, text = await ready.get("/v1/completions")
    assert (status, json.loads(text)["error"]["code"]) == (405, "method_not_allowed")


async def test_a_body_that_is_too_large_is_refused(ready: GatewayRig) -> None:
    body = b'{"model": "m", "prompt": "' + b"a" * MAX_BODY_BYTES + b'"}'
    status, answer, _ = await ready.post(
        "/v1/completions", body, headers={"Content-Type": "application/json"}
    )
    assert (status, answer["error"]["code"]) == (413, "request_too_large")


async def test_prompts_that_do_not_fit_are_refused_with_numbers(ready: GatewayRig) -> None:
    limit = ready.engines[0].max_model_len
    error = await ready.refused("/v1/completions", TEXT | {"prompt": [5] * 200, "max_tokens": 57})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert all(number in error["message"] for number in ("256", "257", "200", "57"))
    for fields in ({}, {"max_tokens": 57}, {"max_tokens": 0, "echo": True}):
        error = await ready.refused("/v1/completions", TEXT | {"prompt": [5] * limit} | fields)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    error = await ready.refused("/v1/completions", TEXT | {"prompt": "far too long " * 100_000})
    assert "at least" in error["message"]  # refused before it was tokenized
    error = await ready.refused(
        "/v1/chat/completions", message(content="a b " * limit) | {"model": "m"}
    )
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    for fields, param in (
        ({"max_tokens": limit}, "max_tokens"),
        ({"max_completion_tokens": limit}, "max_completion_tokens"),
        ({"max_completion_tokens": limit, "max_tokens": 1}, "max_completion_tokens"),
    ):
        error = await ready.refused("/v1/chat/completions", CHAT | fields)
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    for tokens, expected in ((200, 16), (limit - 3, 3)):  # the default is cut to what fits
        status, _, _ = await ready.post("/v1/completions", TEXT | {"prompt": [5] * tokens})
        assert status == 200
        assert ready.engines[0].adds.pop().sampling_params.max_tokens == expected
    status, _, _ = await ready.post("/v1/chat/completions", CHAT)
    assert status == 200
    request = ready.engines[0].adds.pop()
    assert request.sampling_params.max_tokens == limit - len(request.prompt_token_ids)


async def test_a_body_with_invalid_compression_gets_400_and_logs_no_traceback(
    rig: GatewayRig, caplog: pytest.LogCaptureFixture
) -> None:
    await rig.start(rig.engine("D", "decode"))
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    caplog.set_level(logging.INFO, "baton_gateway")
    async with (
        http_session() as session,
        session.post(f"{rig.url}/v1/completions", data=b"no gzip", headers=headers) as response,
    ):
        assert response.status == 400
    await until(lambda: not rig.metric("baton:gateway_connections"), "the end of the connection")
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    "body",
    [
        CHAT | {"model": "\x7f" * 2**20},
        CHAT | message(role="\x7f" * 2**20),
        CHAT | message(content=[{"type": "\x7f" * 2**20}]),
        CHAT | {"response_format": {"type": "\x7f" * 2**20}},
        CHAT | {"tool_choice": "\x7f" * 2**20},
    ],
    ids=["model", "role", "part", "response_format", "tool_choice"],
)
async def test_an_error_quotes_only_the_beginning_of_a_long_value(
    rig: GatewayRig, body: dict[str, object]
) -> None:
    await rig.start(rig.engine("d", "decode"))
    async with (
        http_session() as session,
        session.post(rig.url + "/v1/chat/completions", json=body) as response,
    ):
        assert response.status in (400, 404)
        assert len(await response.read()) < 20_000


@pytest.mark.parametrize("depth", range(900, 1001, 10))
async def test_a_body_of_any_depth_is_served_or_refused(rig: GatewayRig, depth: int) -> None:
    """JSON parsers allow deeper values than encoders. Bodies of these depths once got 500."""
    await rig.start(rig.engine("d", "decode", "hello world"))
    nested = '{"a":' * depth + "1" + "}" * depth
    use = f'{{"type": "tool_use", "id": "x", "name": "f", "input": {nested}}}'
    calls = [{"function": {"name": "f", "arguments": nested}}]
    bodies = {
        "/v1/messages": '{"max_tokens": 5, "messages": [{"role": "user", "content": "a"}, '
        f'{{"role": "assistant", "content": [{use}]}}, {{"role": "user", "content": "b"}}]}}',
        "/v1/chat/completions": json.dumps(
            {"messages": [{"role": "assistant", "tool_calls": calls}]}
        ),
    }
    for path, body in bodies.items():
        headers = {"Content-Type": "application/json"}
        status, _, _ = await rig.post(path, body.encode(), headers=headers)
        assert status in (200, 400), path
