"""`/tokenize` and `/detokenize`: results, invalid fields and limits."""

from __future__ import annotations

import pytest

from baton_gateway.requests.prompts import TEXT_FACTOR
from baton_protocol.options.config import AccessConfig
from support.gateway.gateway_rig import GatewayRig, MakeRig


async def test_tokenize_and_detokenize(rig: GatewayRig) -> None:
    await rig.start(rig.engine("d", "decode"))
    ids = rig.tokenizer.encode("hello world")
    _, body, _ = await rig.post("/tokenize", {"prompt": "hello world", "return_token_strs": True})
    assert (body["tokens"], body["count"], body["max_model_len"]) == (ids, len(ids), 256)
    assert "".join(body["token_strs"]) == "hello world"
    _, body, _ = await rig.post(
        "/tokenize", {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    )
    assert rig.tokenizer.decode(body["tokens"]) == "<|user|>hi\n<|assistant|>\n"
    _, body, _ = await rig.post("/detokenize", {"model": "m", "tokens": ids})
    assert body == {"prompt": "hello world"}


async def test_invalid_tokenize_requests_are_refused_with_the_field(rig: GatewayRig) -> None:
    await rig.start(rig.engine("d", "decode"))
    for path, fields, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": [{"role": "wizard", "content": ""}]}, "messages[0].role"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ):
        status, body, _ = await rig.post(path, fields)
        assert (status, body["error"]["param"]) == (400, param)
    status, _, _ = await rig.post("/tokenize", {"model": "other", "prompt": "a"})
    assert status == 404


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt"])
async def test_template_variables_of_tokenize_cannot_replace_its_fields(
    rig: GatewayRig, name: str
) -> None:
    await rig.start(rig.engine("d", "decode"))
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {name: True}}
    status, answer, _ = await rig.post("/tokenize", body)
    assert (status, answer["error"]["param"]) == (400, f"chat_template_kwargs.{name}")


async def test_max_prompt_tokens_also_limits_texts(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(access=AccessConfig(max_prompt_tokens=10))
    await rig.start(rig.engine("d", "decode"))
    status, answer, _ = await rig.post("/tokenize", {"prompt": "z" * 10 * TEXT_FACTOR})
    assert (status, answer["count"]) == (200, 10 * TEXT_FACTOR)
    error = await rig.refused("/tokenize", {"model": "m", "prompt": "z" * (10 * TEXT_FACTOR + 1)})
    assert (error["code"], error["param"]) == ("prompt_too_long", "prompt")
    error = await rig.refused("/detokenize", {"model": "m", "tokens": [5] * (10 * TEXT_FACTOR + 1)})
    assert (error["code"], error["param"]) == ("prompt_too_long", "tokens")
    error = await rig.refused("/v1/completions", {"model": "m", "prompt": "z" * 11})
    assert (error["code"], error["param"]) == ("prompt_too_long", "prompt")


async def test_texts_are_limited_before_an_engine_has_connected(rig: GatewayRig) -> None:
    await rig.start()
    status, answer, _ = await rig.post("/tokenize", {"prompt": "hello world"})
    assert (status, answer["max_model_len"]) == (200, None)
    error = await rig.refused("/detokenize", {"model": "m", "tokens": [5] * (2**17 + 1)})
    assert (error["code"], error["param"]) == ("prompt_too_long", "tokens")


async def test_a_draining_gateway_refuses_tokenization(rig: GatewayRig) -> None:
    await rig.start(rig.engine("d", "decode"))
    rig.gateway.admission.is_closed = True
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        status, answer, _ = await rig.post(path, body)
        assert (status, answer["error"]["code"]) == (503, "draining")
