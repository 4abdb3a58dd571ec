"""The OpenAI endpoints, used through the `openai` client, with scripted engines."""

from __future__ import annotations

import asyncio

import openai
import pytest

from baton_gateway.endpoints import generation_endpoint
from baton_protocol.engine_messages import KVSide
from baton_text.generation_defaults import GenerationDefaults
from support.gateway.fake_engine import DEADLINE_S, EOS_ID
from support.gateway.gateway_rig import GatewayRig, http_session
from support.waiting import until

TEXT = "hello world, the quick brown fox"
GO = {"model": "m", "prompt": "go"}


async def chat_pieces(client: openai.AsyncOpenAI, **options) -> list:
    stream = await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hi"}], stream=True, **options
    )
    return [chunk async for chunk in stream]


def text_of(chunks: list, index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


async def test_a_completion_has_the_first_token_of_prefill_and_the_rest_of_decode(
    rig: GatewayRig,
) -> None:
    prefill, decode = rig.engine("p", "prefill", TEXT), rig.engine("d", "decode", TEXT)
    await rig.start(prefill, decode)
    answer = await rig.client().completions.create(model="m", prompt="go", max_tokens=50)
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "length"
    prompt_tokens = len(rig.tokenizer.encode("go"))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        prompt_tokens,
        len(decode.answer),
    )

    [produce], [consume] = prefill.adds, decode.adds
    assert produce.kv_transfer.side is KVSide.PRODUCE
    assert consume.kv_transfer.side is KVSide.CONSUME
    assert produce.kv_transfer.transfer_id == consume.kv_transfer.transfer_id
    assert produce.kv_transfer.peer_instance_id == decode.instance_id
    assert consume.kv_transfer.peer_instance_id == prefill.instance_id
    assert (consume.kv_transfer.remote_host, consume.kv_transfer.remote_port) == ("127.0.0.1", 5558)
    assert (produce.sampling_params.max_tokens, consume.sampling_params.max_tokens) == (1, 50)
    assert produce.sampling_params.seed == consume.sampling_params.seed
    [result] = decode.prefill_results.values()
    assert (result.token_ids, result.error) == (prefill.answer[:1], "")
    assert not decode.aborts
    assert rig.metric("baton:prefill_stages_total", outcome="done") == 1
    assert rig.metric("baton:gateway_time_to_first_token_seconds_count") == 1


async def test_the_first_token_is_streamed_before_decode_starts(rig: GatewayRig) -> None:
    prefill = rig.engine("p", "prefill", TEXT)
    decode = rig.engine("d", "decode", TEXT, hold_after=1)
    await rig.start(prefill, decode)
    stream = await rig.client().completions.create(
        model="m", prompt="go", max_tokens=50, stream=True
    )
    first = await anext(aiter(stream))
    assert first.choices[0].text == rig.tokenizer.decode(prefill.answer[:1])
    decode.released.set()
    rest = [chunk.choices[0].text async for chunk in stream]
    assert first.choices[0].text + "".join(rest) == TEXT


async def test_a_chat_streams_role_text_finish_reason_and_usage_in_this_order(
    rig: GatewayRig,
) -> None:
    await rig.start(rig.engine("d", "decode", TEXT))
    chunks = await chat_pieces(
        rig.client(), stream_options={"include_usage": True}, max_completion_tokens=99
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert text_of(chunks) == TEXT
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == [
        "length"
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(rig.engines[0].answer)
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_each_chunk_has_the_usage_so_far(rig: GatewayRig, path: str) -> None:
    await rig.start(rig.engine("d", "decode", TEXT))
    prompt = (
        {"prompt": "go"}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "hi"}]}
    )
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "m", "max_tokens": 99, "stream": True, "stream_options": options, **prompt}
    chunks = await rig.events(path, body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    num_tokens = len(rig.engines[0].answer)  # the engine sends one token per output
    role = [0] if path == "/v1/chat/completions" else []
    assert counts == [*role, *range(1, num_tokens + 1), num_tokens]


async def test_every_token_of_a_stream_has_a_chunk(rig: GatewayRig) -> None:
    """Clients measure the time between tokens by the chunks, even for tokens without text."""
    engine = rig.engine("d", "decode", "你好")
    await rig.start(engine)
    client = rig.client()
    chat = await chat_pieces(client, stop=["zzz"])
    assert len(engine.answer) > len(text_of(chat)) == 2
    assert len(chat) == 1 + len(engine.answer)  # the first one has the role
    options = {"model": "m", "prompt": "go", "max_tokens": len(engine.answer)}
    completion = [chunk async for chunk in await client.completions.create(**options, stream=True)]
    assert len(completion) == len(engine.answer)


async def test_a_chat_renders_the_template_without_more_special_tokens(rig: GatewayRig) -> None:
    engine = rig.engine("d", "decode")
    await rig.start(engine)
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    answer = await rig.client().chat.completions.create(model="m", messages=messages)
    assert answer.choices[0].message.content == "hello world"
    prompt = rig.tokenizer.decode(engine.adds[0].prompt_token_ids)
    assert prompt == "<|system|>be brief\n<|user|>a\nb\n<|assistant|>\n"


async def test_eos_ends_the_response_with_stop_and_is_not_in_the_text(rig: GatewayRig) -> None:
    engine = rig.engine("d", "decode", "hello")
    engine.answer = [*engine.answer, EOS_ID, *engine.answer]
    await rig.start(engine)
    answer = await rig.client().completions.create(
        model="m", prompt="go", max_tokens=50, extra_body={"return_token_ids": True}
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hello", "stop")
    assert answer.choices[0].model_extra["token_ids"][-1] == EOS_ID


async def test_a_first_token_that_ends_the_request_aborts_decode(rig: GatewayRig) -> None:
    prefill, decode = rig.engine("p", "prefill"), rig.engine("d", "decode")
    prefill.answer = [EOS_ID]
    await rig.start(prefill, decode)
    answer = await rig.client().completions.create(model="m", prompt="go", max_tokens=5)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    await until(lambda: decode.aborts == [decode.adds[0].request_id], "ABORT at the decode engine")
    assert not decode.prefill_results


async def test_max_tokens_1_ends_with_the_first_token(rig: GatewayRig) -> None:
    prefill, decode = rig.engine("p", "prefill"), rig.engine("d", "decode")
    await rig.start(prefill, decode)
    answer = await rig.client().completions.create(model="m", prompt="go", max_tokens=1)
    assert answer.usage.completion_tokens == 1
    assert answer.choices[0].finish_reason == "length"
    await until(lambda: decode.aborts, "ABORT at the decode engine")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_token_boundaries_ends_the_text_and_aborts_the_engine(
    rig: GatewayRig, stream: bool
) -> None:
    engine = rig.engine("d", "decode", TEXT)
    engine.answer = [rig.tokenizer.encode(char, add_special_tokens=False)[0] for char in TEXT]
    engine.hold_after = len("hello world, the") + 3
    await rig.start(engine)
    client = rig.client()
    if stream:
        chunks = await chat_pieces(client, stop=["zzz", "lo wor"])
        text, reason = text_of(chunks), chunks[-1].choices[0].finish_reason
    else:
        answer = await client.completions.create(
            model="m", prompt="go", max_tokens=50, stop="lo wor"
        )
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
        assert answer.usage.completion_tokens == len("hello wor")
    assert (text, reason) == ("hel", "stop")
    await until(lambda: engine.aborts, "ABORT at the engine")


async def test_a_stop_string_may_be_kept_in_the_text(rig: GatewayRig) -> None:
    await rig.start(rig.engine("d", "decode", TEXT))
    answer = await rig.client().completions.create(
        model="m",
        prompt="go",
        max_tokens=50,
        stop="world",
        extra_body={"include_stop_str_in_output": True},
    )
    assert answer.choices[0].text == "hello world"


async def test_text_held_back_for_a_stop_string_is_sent_at_the_end(rig: GatewayRig) -> None:
    await rig.start(rig.engine("d", "decode", "hello world"))
    chunks = await chat_pieces(rig.client(), stop=["world!"])
    assert text_of(chunks) == "hello world"


async def test_a_character_of_several_tokens_is_sent_as_a_whole(rig: GatewayRig) -> None:
    engine = rig.engine("d", "decode", "a你🙂b")
    await rig.start(engine)
    assert len(engine.answer) > 4
    chunks = await chat_pieces(rig.client())
    assert text_of(chunks) == "a你🙂b"
    assert not any("\ufffd" in (c.choices[0].delta.content or "") for c in chunks)


async def test_n_samples_are_child_requests_with_their_own_sample_index(rig: GatewayRig) -> None:
    engines = [rig.engine("d0", "decode", TEXT), rig.engine("d1", "decode", TEXT)]
    await rig.start(*engines)
    answer = await rig.client().completions.create(
        model="m", prompt=["go", "on"], n=2, max_tokens=50, seed=7
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.text for choice in answer.choices} == {TEXT}
    adds = [request for engine in engines for request in engine.adds]
    assert sorted(request.sample_index for request in adds) == [0, 0, 1, 1]
    assert {request.sampling_params.seed for request in adds} == {7}
    assert all(engine.adds for engine in engines), "all samples went to one engine"
    assert answer.usage.prompt_tokens == sum(len(rig.tokenizer.encode(p)) for p in ("go", "on"))
    assert answer.usage.completion_tokens == 4 * len(engines[0].answer)


async def test_streamed_samples_carry_their_index(rig: GatewayRig) -> None:
    await rig.start(rig.engine("d", "decode", TEXT))
    chunks = await chat_pieces(rig.client(), n=3)
    assert [text_of(chunks, index) for index in range(3)] == [TEXT] * 3


async def test_logprobs_of_a_chat(rig: GatewayRig) -> None:
    engine = rig.engine("d", "decode", "你")
    await rig.start(engine)
    answer = await rig.client().chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert bytes(byte for item in content for byte in item.bytes).decode() == "你"
    assert [item.logprob for item in content] == [-0.25] * len(engine.answer)
    assert all(len(item.top_logprobs) == 2 for item in content)


async def test_logprobs_of_a_streamed_completion_equal_those_of_a_whole_one(
    rig: GatewayRig,
) -> None:
    await rig.start(rig.engine("d", "decode", TEXT))
    client = rig.client()
    options = {"model": "m", "prompt": "go", "max_tokens": 50, "logprobs": 1}
    whole = (await client.completions.create(**options)).choices[0].logprobs
    assert "".join(whole.tokens) == TEXT
    assert whole.text_offset[:2] == [0, len(whole.tokens[0])]
    for token, logprob, top in zip(
        whole.tokens, whole.token_logprobs, whole.top_logprobs, strict=True
    ):
        assert top[token] == logprob, "the sampled token is missing"
    chunks = [chunk async for chunk in await client.completions.create(**options, stream=True)]
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [token for part in parts for token in part.tokens] == whole.tokens
    assert [offset for part in parts for offset in part.text_offset] == whole.text_offset


async def test_a_whole_response_with_many_logprobs_is_refused(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rig.engine("d", "decode", TEXT)
    await rig.start(engine)
    client = rig.client()
    options = {"model": "m", "prompt": "go", "max_tokens": 50, "logprobs": 1, "n": 2}
    limit = 2 * len(engine.answer) * 2
    monkeypatch.setattr(generation_endpoint, "MAX_RESPONSE_LOGPROBS", limit)
    await client.completions.create(**options)
    monkeypatch.setattr(generation_endpoint, "MAX_RESPONSE_LOGPROBS", limit - 1)
    with pytest.raises(openai.BadRequestError, match="log-probabilities") as refused:
        await client.completions.create(**options)
    assert refused.value.param == "logprobs"
    assert [chunk async for chunk in await client.completions.create(**options, stream=True)]


async def test_token_id_prompts_and_echo(rig: GatewayRig) -> None:
    engine = rig.engine("d", "decode", " world")
    await rig.start(engine)
    ids = rig.tokenizer.encode("hello")
    answer = await rig.client().completions.create(model="m", prompt=ids, echo=True)
    assert engine.adds[0].prompt_token_ids == ids
    assert answer.choices[0].text == "hello world"


async def test_a_missing_seed_is_drawn(rig: GatewayRig) -> None:
    engine = rig.engine("d", "decode")
    await rig.start(engine)
    for _ in range(2):
        await rig.client().completions.create(model="m", prompt="go")
    seeds = [request.sampling_params.seed for request in engine.adds]
    assert seeds[0] != seeds[1]


async def test_a_client_that_disconnects_aborts_its_request(rig: GatewayRig) -> None:
    prefill = rig.engine("p", "prefill", TEXT)
    decode = rig.engine("d", "decode", TEXT, hold_after=1)
    await rig.start(prefill, decode)
    client = rig.client()
    stream = await client.completions.create(model="m", prompt="go", max_tokens=50, stream=True)
    await anext(aiter(stream))
    await stream.close()
    await until(lambda: decode.aborts == [decode.adds[0].request_id], "ABORT after a closed stream")
    waiting = asyncio.create_task(client.completions.create(model="m", prompt="go", max_tokens=50))
    await until(lambda: len(decode.adds) == 2, "the second request at the engine")
    waiting.cancel()
    await until(
        lambda: decode.aborts[1:] == [decode.adds[1].request_id], "ABORT after a closed connection"
    )
    await until(lambda: rig.metric("baton:requests_in_flight") == 0, "no request in flight")


async def test_short_prompts_skip_the_prefill_stage(make_rig) -> None:
    rig = make_rig(prefill_threshold_tokens=5)
    prefill, decode = rig.engine("p", "prefill", TEXT), rig.engine("d", "decode", TEXT)
    await rig.start(prefill, decode)
    await rig.client().completions.create(model="m", prompt=[5, 6, 7, 8])
    assert not prefill.adds
    assert decode.adds[0].kv_transfer is None
    await rig.client().completions.create(model="m", prompt=[5, 6, 7, 8, 9])
    assert len(prefill.adds) == 1


async def test_requests_get_the_sampling_parameters_of_the_checkpoint_that_they_leave_out(
    make_rig,
) -> None:
    defaults = GenerationDefaults(temperature=0.6, top_k=20, repetition_penalty=1.1, max_tokens=7)
    rig = make_rig(defaults=defaults)
    decode = rig.engine("d", "decode", TEXT)
    await rig.start(decode)
    messages = [{"role": "user", "content": "go"}]
    client = rig.client()
    await client.chat.completions.create(model="m", messages=messages)
    await client.chat.completions.create(
        model="m", messages=messages, temperature=0, max_tokens=9, extra_body={"top_k": 3}
    )
    params = [add.sampling_params for add in decode.adds]
    assert [(one.temperature, one.top_k, one.max_tokens) for one in params] == [
        (0.6, 20, 7),
        (0.0, 3, 9),
    ]
    assert all(one.repetition_penalty == 1.1 and one.top_p == 1.0 for one in params)


async def test_choices_report_nan_logits(rig: GatewayRig) -> None:
    decode = rig.engine("d", "decode", TEXT)
    await rig.start(decode)
    client = rig.client()
    [choice] = (await client.completions.create(model="m", prompt="go", max_tokens=3)).choices
    assert "num_nans_in_logits" not in choice.model_extra
    decode.num_nans = 2
    answer = await client.completions.create(model="m", prompt="go", max_tokens=3)
    assert answer.choices[0].model_extra["num_nans_in_logits"] == 2 * 3
    chunks = await chat_pieces(client, max_tokens=3)
    counts = [
        choice.model_extra.get("num_nans_in_logits", 0) for one in chunks for choice in one.choices
    ]
    assert sum(counts) == 2 * 3


@pytest.mark.parametrize("variant", ["{}/", "/{}", "{}///?a=b"])
async def test_extra_slashes_of_a_path_are_ignored_without_a_redirect(
    rig: GatewayRig, variant: str
) -> None:
    await rig.start(rig.engine("d", "decode", TEXT))
    message = {"role": "user", "content": "go"}
    for path, body in (
        ("/v1/chat/completions", {"model": "m", "messages": [message]}),
        ("/v1//completions", GO),
        ("/tokenize", {"prompt": "go"}),
        ("/detokenize", {"tokens": [5]}),
    ):
        status, answer, _ = await rig.post(variant.format(path), body, allow_redirects=False)
        assert status == 200, answer
        endpoint = path.replace("//", "/")
        assert rig.metric("baton:http_requests_total", endpoint=endpoint, status="200") == 1
    for path in ("/v1/models", "/v1/models//m", "/health", "/ready", "/version"):
        assert (await rig.get(variant.format(path)))[0] == 200, path
    for path in ("/v1", "/v1/chatcompletions"):
        assert (await rig.get(variant.format(path)))[0] == 404, path


@pytest.mark.parametrize("target", ["http://h//v1/models/?a=b", "/v1/models?a=//", "//v1/models/"])
async def test_extra_slashes_are_ignored_in_raw_targets(rig: GatewayRig, target: str) -> None:
    await rig.start(rig.engine("d", "decode", TEXT))
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.url.rsplit(":", 1)[1]))
    writer.write(f"GET {target} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n".encode())
    async with asyncio.timeout(DEADLINE_S):
        assert b" 200 " in await reader.readline()
    writer.close()


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
)
async def test_the_model_may_be_left_out(rig: GatewayRig, path: str) -> None:
    await rig.start(rig.engine("d", "decode", TEXT))
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "/detokenize": {"tokens": [5]},
    }
    body = bodies.get(path, {"prompt": "go"})
    for model in ({}, {"model": None}):
        status, answer, _ = await rig.post(path, body | model)
        assert status == 200
        if path.startswith("/v1/"):
            assert answer["model"] == "m"
            [chunk, *_] = await rig.events(path, body | model | {"stream": True})
            assert chunk["model"] == "m"


async def test_the_server_header_names_no_versions(rig: GatewayRig) -> None:
    await rig.start(rig.engine("d", "decode", TEXT))
    for body in ({}, GO, GO | {"stream": True}):
        async with (
            http_session() as session,
            session.post(f"{rig.url}/v1/completions", json=body) as response,
        ):
            assert response.status == (200 if body else 400)
            assert response.headers.getall("Server") == ["baton"]
    assert (await rig.post("/v1/nothing", {}))[2]["Server"] == "baton"
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.url.rsplit(":", 1)[1]))
    writer.write(b"no HTTP\r\n\r\n")
    async with asyncio.timeout(DEADLINE_S):
        head = (await reader.readuntil(b"\r\n\r\n")).splitlines()
    writer.close()
    assert [line for line in head if line.startswith(b"Server:")] == [b"Server: baton"]
