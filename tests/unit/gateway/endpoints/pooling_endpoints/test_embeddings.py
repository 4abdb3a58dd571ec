"""`/v1/embeddings` over scripted pooling engines: forms of inputs, encodings, limits, failures."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Any

import pytest

from baton_protocol.engine_messages import ErrorCode
from baton_protocol.options.config import AccessConfig
from baton_protocol.pooling_params import Task
from support.gateway.fake_engine import FakeEngine, vector_of
from support.gateway.gateway_rig import GatewayRig, MakeRig
from support.waiting import until


def pooling_engine(rig: GatewayRig, name: str = "d") -> FakeEngine:
    engine = rig.engine(name, "decode")
    engine.pool(Task.EMBED)
    return engine


@pytest.fixture
async def embed_rig(make_rig: MakeRig) -> GatewayRig:
    rig = make_rig()
    await rig.start(pooling_engine(rig))
    return rig


def ids(rig: GatewayRig, text: str) -> list[int]:
    return rig.tokenizer.encode(text)


async def test_the_openai_client_receives_one_embedding_per_text(embed_rig: GatewayRig) -> None:
    texts = ["hello world", "a", "go on"]
    # The client asks for base64.
    response = await embed_rig.client().embeddings.create(model="m", input=texts)
    prompts = [ids(embed_rig, text) for text in texts]
    assert [item.embedding for item in response.data] == [vector_of(each) for each in prompts]
    assert [item.index for item in response.data] == [0, 1, 2]
    assert response.model == "m"
    assert response.object == "list"
    assert response.usage.prompt_tokens == sum(map(len, prompts)) == response.usage.total_tokens


@pytest.mark.parametrize(
    ("given", "num"), [("hello", 1), (["hello", "a"], 2), ([5, 6, 7], 1), ([[5, 6], [7]], 2)]
)
async def test_inputs_are_texts_or_token_ids(embed_rig: GatewayRig, given: Any, num: int) -> None:
    status, body, _ = await embed_rig.post("/v1/embeddings", {"input": given})
    assert status == 200
    items = [given] if num == 1 else given
    prompts = [ids(embed_rig, item) if isinstance(item, str) else item for item in items]
    assert [item["embedding"] for item in body["data"]] == [vector_of(each) for each in prompts]
    assert {item["object"] for item in body["data"]} == {"embedding"}


async def test_base64_has_the_float32_values(embed_rig: GatewayRig) -> None:
    request = {"input": [5, 6], "encoding_format": "base64", "dimensions": 3}
    status, body, _ = await embed_rig.post("/v1/embeddings", request)
    assert status == 200
    encoded = base64.b64decode(body["data"][0]["embedding"])
    assert list(struct.unpack("<3f", encoded)) == vector_of([5, 6])[:3]


async def test_engines_receive_the_parameters_and_no_sampling(make_rig: MakeRig) -> None:
    rig = make_rig()
    engine = pooling_engine(rig)
    engine.cached_tokens = lambda request: len(request.prompt_token_ids) - 1
    await rig.start(engine)
    request = {"input": [[5, 6], [7]], "dimensions": 2, "normalize": False, "cache_salt": "s"}
    status, body, _ = await rig.post("/v1/embeddings", request)
    assert status == 200
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert len(engine.adds) == 2
    for add in engine.adds:
        assert add.pooling_params is not None
        assert (add.pooling_params.dimensions, add.pooling_params.normalize) == (2, False)
        assert add.sampling_params.max_tokens == 1
        assert add.kv_transfer is None
        assert add.cache_salt


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": ""}, "input", None),
        ({"input": []}, "input", None),
        ({"input": [[]]}, "input", None),
        ({"input": ["a", 5]}, "input", None),
        ({"input": [-1]}, "input", None),
        ({"input": [10**9]}, "input", None),
        ({"input": {"a": 1}}, "input", "invalid_type"),
        ({"input": "a", "dimensions": 0}, "dimensions", None),
        ({"input": "a", "dimensions": 5}, "dimensions", None),  # refused by the engine
        ({"input": "a", "dimensions": 2**70}, "dimensions", None),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "invalid_type"),
        ({"input": "a", "priority": -1}, "priority", None),
        ({"input": "a", "cache_salt": "s" * 2000}, "cache_salt", None),
        ({"input": [5] * 257}, "input", "context_length_exceeded"),
        ({"input": "hello world " * 2000}, "input", "context_length_exceeded"),
    ],
)
async def test_invalid_fields_get_400_with_their_name(
    embed_rig: GatewayRig, fields: dict[str, Any], param: str, code: str | None
) -> None:
    status, body, _ = await embed_rig.post("/v1/embeddings", fields)
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, param, code)


async def test_an_input_may_be_as_long_as_the_model_allows(embed_rig: GatewayRig) -> None:
    status, _, _ = await embed_rig.post("/v1/embeddings", {"input": [5] * 256})
    assert status == 200


async def test_other_models_content_types_and_too_many_inputs_are_refused(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(max_concurrent_requests=3)
    await rig.start(pooling_engine(rig))
    assert (await rig.post("/v1/embeddings", {"input": "a", "model": "x"}))[0] == 404
    headers = {"Content-Type": "text/plain"}
    assert (await rig.post("/v1/embeddings", b'{"input": "a"}', headers=headers))[0] == 415
    assert (await rig.post("/v1/embeddings", {"input": ["a"] * 4}))[0] == 400
    assert (await rig.post("/v1/embeddings", {"input": ["a"] * 3}))[0] == 200


async def test_api_keys_and_limits_of_prompts_apply(make_rig: MakeRig, tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "alice").write_text("secret-key-of-alice-0123456789")
    rig = make_rig(access=AccessConfig(api_keys_dir=str(keys), max_prompt_tokens=3))
    await rig.start(pooling_engine(rig))
    assert (await rig.post("/v1/embeddings", {"input": [5]}))[0] == 401
    headers = {"Authorization": "Bearer secret-key-of-alice-0123456789"}
    assert (await rig.post("/v1/embeddings", {"input": [5] * 3}, headers=headers))[0] == 200
    status, body, _ = await rig.post("/v1/embeddings", {"input": [5] * 4}, headers=headers)
    assert (status, body["error"]["code"]) == (400, "prompt_too_long")


async def test_endpoints_of_another_task_are_refused_with_the_task_of_the_model(
    embed_rig: GatewayRig, make_rig: MakeRig
) -> None:
    for path, request in {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/v1/responses": {"input": "a"},
    }.items():
        status, body, _ = await embed_rig.post(path, request)
        assert (status, body["error"]["code"]) == (400, "unsupported_endpoint"), path
        assert "use /v1/embeddings" in body["error"]["message"]
    rig = make_rig()
    await rig.start(rig.engine("g", "decode"))
    status, body, _ = await rig.post("/v1/embeddings", {"input": "a"})
    assert (status, body["error"]["code"]) == (400, "unsupported_endpoint")
    assert "generates text" in body["error"]["message"]


async def test_a_lost_engines_prompts_move_to_another_engine(make_rig: MakeRig) -> None:
    rig = make_rig()
    lost, other = pooling_engine(rig, "d1"), pooling_engine(rig, "d2")
    lost.hold_after = 0
    await rig.start(lost)
    request = asyncio.create_task(rig.post("/v1/embeddings", {"input": [[5, 6], [7]]}))
    await until(lambda: len(lost.adds) == 2, "both prompts sent")
    lost.die()
    rig.announce(other)
    status, body, _ = await request
    assert status == 200
    vectors = [item["embedding"] for item in body["data"]]
    assert vectors == [vector_of([5, 6]), vector_of([7])]


async def test_failures_of_engines_become_statuses(make_rig: MakeRig) -> None:
    rig = make_rig()
    engine = pooling_engine(rig)
    await rig.start(engine)
    for code, status in ((ErrorCode.OVERLOADED, 429), (ErrorCode.LENGTH, 400)):
        engine.refuse = (code, "no")
        assert (await rig.post("/v1/embeddings", {"input": "a"}))[0] == status


async def test_a_client_that_disconnects_aborts_its_prompts(make_rig: MakeRig) -> None:
    rig = make_rig()
    engine = pooling_engine(rig)
    engine.hold_after = 0
    await rig.start(engine)
    request = asyncio.create_task(rig.post("/v1/embeddings", {"input": [[5], [6]]}))
    await until(lambda: len(engine.adds) == 2, "both prompts sent")
    request.cancel()
    await until(lambda: len(engine.aborts) >= 2, "both prompts aborted")
    await until(lambda: rig.gateway.admission.is_idle, "no request in flight")


async def test_a_shutdown_ends_requests_that_still_run(make_rig: MakeRig) -> None:
    rig = make_rig(drain_timeout_s=0.1)
    engine = pooling_engine(rig)
    engine.hold_after = 0
    await rig.start(engine)
    request = asyncio.create_task(rig.post("/v1/embeddings", {"input": "a"}))
    await until(lambda: bool(engine.adds), "the prompt sent")
    await rig.gateway.stop()
    status, body, _ = await request
    assert (status, body["error"]["code"]) == (503, "draining")
