"""Parameters of requests: samples, beam search, prompt logprobs and structured outputs."""

from __future__ import annotations

import asyncio
import json

import pytest

from baton_protocol.engine_messages import ErrorCode
from baton_protocol.sampling_params import (
    RepetitionDetection,
    StructuredOutput,
    StructuredOutputKind,
)
from support.gateway.gateway_rig import GatewayRig
from support.waiting import until

TEXT = "hello world, the quick brown fox"
GO = {"model": "m", "prompt": "go", "max_tokens": 50}


async def test_samples_of_a_prompt_are_sent_to_one_engine_as_a_group(rig: GatewayRig) -> None:
    engines = [rig.engine(f"d{i}", "decode", TEXT) for i in range(3)]
    await rig.start(*engines)
    await rig.completion(prompt=["go", "on"], n=3)
    used = [engine for engine in engines if engine.adds]
    assert len(used) == 2, "each prompt must go to its own engine"
    for engine in used:
        assert len({tuple(add.prompt_token_ids) for add in engine.adds}) == 1
        assert len({add.group_id for add in engine.adds}) == 1
        assert sorted(add.sample_index for add in engine.adds) == [0, 1, 2]
    assert used[0].adds[0].group_id != used[1].adds[0].group_id
    await rig.completion()
    assert next(add for engine in engines for add in engine.adds[-1:] if add.group_id == "")


async def test_best_of_returns_the_most_likely_samples(rig: GatewayRig) -> None:
    engine = rig.engine("d", "decode", TEXT)
    await rig.start(engine)
    body = await rig.completion(prompt=["go", "on"], n=2, best_of=4, return_token_ids=True)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert len(engine.adds) == 8
    assert {add.sampling_params.logprobs for add in engine.adds} == {0}, (
        "logprobs are needed to rank the samples"
    )
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == 8 * len(engine.answer), (
        "tokens of dropped samples were not counted"
    )
    shown = await rig.completion(n=1, best_of=3, logprobs=1)
    assert shown["choices"][0]["logprobs"]["token_logprobs"][0] == pytest.approx(-0.25 / 3)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_beam_search_is_one_engine_request_with_beams_as_choices(
    rig: GatewayRig, streamed: bool
) -> None:
    prefill, decode = rig.engine("p", "prefill", TEXT), rig.engine("d", "decode", TEXT)
    await rig.start(prefill, decode)
    client = rig.client()
    options = {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": True}
    answer = await client.completions.create(**GO, n=3, stream=streamed, extra_body=options)
    if streamed:
        texts = {chunk.choices[0].index: chunk.choices[0].text async for chunk in answer}
    else:
        texts = {choice.index: choice.text for choice in answer.choices}
    expected = [decode.answer[: len(decode.answer) - index] for index in range(3)]
    assert texts == {index: rig.tokenizer.decode(ids) for index, ids in enumerate(expected)}
    assert not prefill.adds, "the beam search must be a single request"
    [add] = decode.adds
    params = add.sampling_params
    assert (params.beam_width, params.length_penalty, params.early_stopping) == (3, 0.5, True)
    assert add.kv_transfer is None
    assert add.group_id == ""


async def test_prompt_logprobs_skip_the_prefill_stage_and_are_requested_once(
    rig: GatewayRig,
) -> None:
    prefill = rig.engine("p", "prefill", TEXT)
    decode = rig.engine("d", "decode", TEXT, hold_after=3)
    await rig.start(prefill, decode)
    asking = asyncio.create_task(rig.completion(prompt=[5, 6, 7], prompt_logprobs=1))
    await until(lambda: decode.adds, "the request at the first engine")
    other = rig.engine("d1", "decode", TEXT)
    rig.announce(prefill, decode, other)
    await until(lambda: len(rig.gateway.pool.available("decode")) == 2, "the second engine")
    await until(lambda: rig.metric("baton:gateway_generation_tokens_total") == 3, "three tokens")
    decode.die()
    [choice] = (await asking)["choices"]
    assert choice["text"] == TEXT
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    assert second["6"] == {"logprob": -1.5, "rank": 2, "decoded_token": rig.tokenizer.decode([6])}
    assert third["7"]["rank"] == 2, "the prompt's token must have its own logprob"
    assert not prefill.adds
    assert other.adds[0].sampling_params.prompt_logprobs is None
    assert len(other.adds[0].generated_token_ids) == 3


@pytest.mark.parametrize(
    "fields", [{"n": 3}, {"n": 2, "best_of": 4}, {"n": 2, "use_beam_search": True}]
)
async def test_prompt_logprobs_are_computed_once_for_all_samples(
    rig: GatewayRig, fields: dict[str, object]
) -> None:
    engine = rig.engine("d", "decode", TEXT)
    await rig.start(engine)
    body = await rig.completion(prompt=[5, 6, 7], prompt_logprobs=1, **fields)
    assert len(body["choices"]) == fields["n"]
    for choice in body["choices"]:
        assert len(choice["prompt_logprobs"]) == 3
        assert choice["prompt_logprobs"] == body["choices"][0]["prompt_logprobs"]
    asked = [add.sampling_params.prompt_logprobs for add in engine.adds]
    assert asked == [1] + [None] * (len(asked) - 1)


async def test_too_many_prompt_logprobs_are_refused(rig: GatewayRig) -> None:
    engine = rig.engine("d", "decode", TEXT)
    await rig.start(engine)
    many = GO | {"prompt": [5] * 220, "n": 128}
    for fields, field in (
        ({"prompt_logprobs": 20}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 20}, "logprobs"),
    ):
        status, body, _ = await rig.post("/v1/completions", many | {"max_tokens": 1} | fields)
        assert (status, body["error"]["param"]) == (400, field), body
    assert not engine.adds


async def test_equal_prompts_without_a_seed_get_different_seeds(rig: GatewayRig) -> None:
    engine = rig.engine("d", "decode", TEXT)
    await rig.start(engine)
    await rig.completion(prompt=["a", "a"])
    assert len({add.sampling_params.seed for add in engine.adds}) == 2
    await rig.completion(prompt=["a", "a"], seed=4)
    assert [add.sampling_params.seed for add in engine.adds[2:]] == [4, 4]


async def test_prompt_logprobs_of_a_chat_are_beside_its_choices(rig: GatewayRig) -> None:
    engine = rig.engine("d", "decode", TEXT)
    await rig.start(engine)
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "m", "messages": messages, "prompt_logprobs": 0}
    _, answer, _ = await rig.post("/v1/chat/completions", body)
    assert len(answer["prompt_logprobs"]) == len(engine.adds[0].prompt_token_ids)


@pytest.mark.parametrize("streamed", [False, True])
async def test_echo_with_logprobs_includes_those_of_the_prompt(
    rig: GatewayRig, streamed: bool
) -> None:
    engine = rig.engine("d", "decode", " world")
    await rig.start(engine)
    options = {"model": "m", "prompt": "hello", "echo": True, "logprobs": 1, "max_tokens": 50}
    answer = await rig.client().completions.create(**options, stream=streamed)
    choices = [chunk.choices[0] async for chunk in answer] if streamed else answer.choices
    assert "".join(choice.text for choice in choices) == "hello world"
    logprobs = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [token for part in logprobs for token in part.tokens]
    values = [value for part in logprobs for value in part.token_logprobs]
    offsets = [offset for part in logprobs for offset in part.text_offset]
    prompt_ids = rig.tokenizer.encode("hello")
    assert "".join(tokens) == "hello world"
    assert values == [None] + [-1.5] * (len(prompt_ids) - 1) + [-0.25] * len(engine.answer)
    assert offsets == [sum(map(len, tokens[:index])) for index in range(len(tokens))]
    assert engine.adds[0].sampling_params.prompt_logprobs == 1


async def test_echo_with_max_tokens_0_returns_the_prompt(rig: GatewayRig) -> None:
    engine = rig.engine("d", "decode", TEXT)
    await rig.start(engine)
    body = await rig.completion(prompt=[5, 6, 7], echo=True, logprobs=0, max_tokens=0)
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == (
        rig.tokenizer.decode([5, 6, 7]),
        "length",
    )
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5, -1.5]
    assert body["usage"]["completion_tokens"] == 0
    assert engine.adds[0].sampling_params.max_tokens == 1


async def test_a_request_that_no_engine_can_fit_is_a_context_length_error(rig: GatewayRig) -> None:
    engine = rig.engine("d", "decode")
    engine.refuse = ErrorCode.LENGTH, "the prompt has 300 tokens, max_model_len is 256"
    await rig.start(engine)
    status, body, _ = await rig.post("/v1/completions", GO)
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert "300 tokens" in body["error"]["message"]
    assert len(engine.adds) == 1, "another engine was tried"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
STRUCTURES = [
    ({"response_format": {"type": "json_object"}}, StructuredOutputKind.JSON_OBJECT, ""),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": SCHEMA},
            }
        },
        StructuredOutputKind.JSON,
        json.dumps(SCHEMA),
    ),
    ({"structured_outputs": {"regex": "a+"}}, StructuredOutputKind.REGEX, "a+"),
    ({"structured_outputs": {"json_object": True}}, StructuredOutputKind.JSON_OBJECT, ""),
    ({"guided_json": SCHEMA}, StructuredOutputKind.JSON, json.dumps(SCHEMA)),
    ({"guided_json": '{"type": "integer"}'}, StructuredOutputKind.JSON, '{"type": "integer"}'),
    ({"guided_regex": "b"}, StructuredOutputKind.REGEX, "b"),
    ({"guided_choice": ["x", "y"]}, StructuredOutputKind.CHOICE, '["x", "y"]'),
    ({"guided_grammar": 'start: "a"'}, StructuredOutputKind.GRAMMAR, 'start: "a"'),
]


async def test_structured_outputs_reach_the_engine_and_errors_name_the_field(
    rig: GatewayRig,
) -> None:
    engine = rig.engine("d", "decode")
    await rig.start(engine)
    for fields, kind, spec in STRUCTURES:
        await rig.completion(**fields)
        assert engine.adds[-1].sampling_params.structured_output == StructuredOutput(kind, spec)
    engine.refuse = ErrorCode.INVALID, "structured_output.spec is not valid: unbalanced"
    for fields, _, _ in STRUCTURES:
        status, body, _ = await rig.post("/v1/completions", GO | fields)
        [field] = fields
        assert (status, body["error"]["param"]) == (400, field)
        assert body["error"]["message"] == f"{field} is not valid: unbalanced"
    for words, param in (
        ("stop_token_ids must", "stop_token_ids"),
        ("beam_width=3 is", "n"),
        ("Who knows", None),
    ):
        engine.refuse = ErrorCode.INVALID, words
        _, body, _ = await rig.post("/v1/completions", GO)
        assert body["error"]["param"] == param


async def test_bad_words_and_allowed_tokens_reach_the_engine(rig: GatewayRig) -> None:
    engine = rig.engine("d", "decode")
    await rig.start(engine)
    detection = {"max_pattern_size": 4, "min_count": 3}
    await rig.completion(
        bad_words=["fox"], allowed_token_ids=[5, 6], repetition_detection=detection, top_k=-1
    )
    params = engine.adds[0].sampling_params
    encoded = [rig.tokenizer.encode(form, add_special_tokens=False) for form in ("fox", " fox")]
    assert params.bad_words_token_ids[0] == encoded[0]
    assert all(
        ids in params.bad_words_token_ids or ids[-len(encoded[0]) :] == encoded[0]
        for ids in encoded
    )
    assert params.allowed_token_ids == [5, 6]
    assert params.repetition_detection == RepetitionDetection(4, 1, 3)


async def test_a_repetition_is_reported_as_the_finish_reason(rig: GatewayRig) -> None:
    engine = rig.engine("d", "decode", TEXT)
    engine.repeats = True
    await rig.start(engine)
    body = await rig.completion()
    assert body["choices"][0]["finish_reason"] == "repetition"


async def test_the_matched_stop_string_is_reported(rig: GatewayRig) -> None:
    await rig.start(rig.engine("d", "decode", TEXT))
    body = await rig.completion(stop=["quick", "zzz"])
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == (
        "stop",
        "quick",
    )
