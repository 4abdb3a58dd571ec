"""Limits on the options of a request, so that one client cannot take a gateway's memory."""

from __future__ import annotations

import pytest

from baton_gateway.access import admission
from baton_gateway.requests.job_builder import MAX_ECHO_CHARACTERS
from baton_gateway.requests.prompts import (
    LONG_TEXT,
    MAX_CHARACTERS_PER_TOKEN,
    MAX_TEXT_CHARACTERS,
    PromptBounds,
    TextBounds,
)
from baton_protocol.sampling_params import MAX_SPEC_LENGTH, MAX_TOKEN_IDS
from baton_text.requests.generation_request import (
    FREE_OPTION_ENTRIES,
    MAX_LOGPROB_ENTRIES,
    MAX_OPTION_ENTRIES,
    MAX_RESPONSE_LOGPROBS,
    MAX_STOP_CHARACTERS,
)
from support.gateway.gateway_rig import GatewayRig, MakeRig
from support.waiting import until

TEXT = {"model": "m", "prompt": "hi"}
LONG = "hello world, the quick brown fox " * 1000


async def test_long_options_of_many_sequences_are_refused(make_rig: MakeRig) -> None:
    rig = make_rig()
    engine = rig.engine("d", "decode")
    engine.max_model_len = 100
    await rig.start(engine)
    ids = [5] * (MAX_OPTION_ENTRIES // 100)
    body = {"prompt": [[6]] * 101, "allowed_token_ids": ids}
    error = await rig.refused("/v1/completions", TEXT | body)
    assert error["param"] == "allowed_token_ids"
    words = {"prompt": [[6]] * 101, "bad_words": ["a" * (MAX_OPTION_ENTRIES // 100)]}
    assert (await rig.refused("/v1/completions", TEXT | words))["param"] == "bad_words"
    status, _, _ = await rig.post(
        "/v1/completions", TEXT | body | {"prompt": [[6]] * 2, "max_tokens": 1}
    )
    assert (status, len(engine.adds[0].sampling_params.allowed_token_ids)) == (200, len(ids))


async def test_the_long_options_of_all_running_requests_are_limited(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rig.engine("d", "decode", "hello world")
    engine.hold_after = 1
    await rig.start(engine)
    ids = [5] * (FREE_OPTION_ENTRIES + 1)
    monkeypatch.setattr(admission, "MAX_TOTAL_OPTION_ENTRIES", 3 * len(ids) - 1)
    body = TEXT | {"allowed_token_ids": ids, "n": 2}
    async with rig.slow_connection("/v1/completions", body):
        await until(lambda: len(engine.adds) == 2, "the request at the engine")
        status, answer, headers = await rig.post("/v1/completions", body)
        assert (status, headers["Retry-After"]) == (429, "1")
        assert "long options" in answer["error"]["message"]
        engine.released.set()
        few = body | {"allowed_token_ids": ids[:FREE_OPTION_ENTRIES]}
        assert (await rig.post("/v1/completions", few))[0] == 200

    async def is_served() -> bool:
        return (await rig.post("/v1/completions", body))[0] == 200

    await until(is_served, "the options of the ended request released")


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({"007": 1.0}, "token ids"),
        ({str(number): 1.0 for number in range(MAX_TOKEN_IDS + 1)}, "at most"),
    ],
    ids=["another spelling of 7", "too many"],
)
async def test_a_logit_bias_has_each_token_once(
    rig: GatewayRig, bias: dict[str, float], message: str
) -> None:
    await rig.start(rig.engine("d", "decode"))
    error = await rig.refused("/v1/completions", TEXT | {"logit_bias": bias})
    assert error["param"] == "logit_bias"
    assert message in error["message"]


async def test_long_stop_strings_are_refused(rig: GatewayRig) -> None:
    await rig.start(rig.engine("d", "decode"))
    error = await rig.refused(
        "/v1/completions", TEXT | {"prompt": "hi", "stop": ["a", "b" * MAX_STOP_CHARACTERS]}
    )
    assert error["param"] == "stop"


async def test_a_response_does_not_repeat_many_long_prompts(rig: GatewayRig) -> None:
    engine = rig.engine("d", "decode")
    engine.max_model_len = 2**20
    await rig.start(engine)
    body = {"prompt": LONG, "echo": True, "n": MAX_ECHO_CHARACTERS // len(LONG) + 1}
    error = await rig.refused("/v1/completions", TEXT | body)
    assert error["param"] == "echo"
    status, answer, _ = await rig.post("/v1/completions", TEXT | body | {"n": 2, "max_tokens": 1})
    assert (status, answer["choices"][1]["text"].startswith(LONG)) == (200, True)


async def test_the_logprobs_of_a_beam_search_are_limited(rig: GatewayRig) -> None:
    engine = rig.engine("d", "decode")
    engine.max_model_len = 20_000
    await rig.start(engine)
    options = {"use_beam_search": True, "n": 64, "logprobs": 20, "stream": True}
    num_tokens = MAX_RESPONSE_LOGPROBS // (21 * 64) + 1
    body = {"prompt": "hi", "max_tokens": num_tokens} | options
    error = await rig.refused("/v1/completions", TEXT | body)
    assert error["param"] == "logprobs"


async def test_the_prompt_logprobs_of_all_candidates_are_limited(rig: GatewayRig) -> None:
    engine = rig.engine("d", "decode")
    engine.max_model_len = 20_000
    await rig.start(engine)
    num_tokens = MAX_LOGPROB_ENTRIES // (21 * 128) + 1
    body = {"prompt": [[5] * num_tokens], "prompt_logprobs": 20, "best_of": 128}
    error = await rig.refused("/v1/completions", TEXT | body)
    assert error["param"] == "prompt_logprobs"


@pytest.mark.parametrize("field", ["guided_json", "guided_regex", "guided_grammar"])
async def test_a_long_specification_is_refused_before_it_is_converted(
    rig: GatewayRig, field: str
) -> None:
    await rig.start(rig.engine("d", "decode"))
    text = "[" * (MAX_SPEC_LENGTH + 1)  # no JSON, so parsing it would fail with another message
    error = await rig.refused("/v1/completions", TEXT | {field: text})
    assert error["param"] == field
    assert f"at most {MAX_SPEC_LENGTH} characters" in error["message"]


async def test_a_prompt_that_is_too_long_ends_the_request_before_the_next_is_tokenized(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.start(rig.engine("d", "decode"))
    encoded: list[str] = []
    encode = rig.tokenizer.encode

    def count(text: str, **options: bool) -> list[int]:
        encoded.append(text)
        return encode(text, **options)

    monkeypatch.setattr(rig.tokenizer, "encode", count)
    prompts = [f"{number} " + "a b " * 300 for number in range(3)]
    error = await rig.refused("/v1/completions", TEXT | {"prompt": prompts})
    assert error["param"] == "prompt"
    assert encoded == prompts[:1]


async def test_echo_does_not_decode_token_ids_that_are_too_many(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rig.engine("d", "decode")
    await rig.start(engine)
    decoded: list[int] = []
    monkeypatch.setattr(rig.tokenizer, "decode", lambda ids, **_: decoded.append(len(ids)) or "")
    ids = [5] * (engine.max_model_len + 1)
    error = await rig.refused("/v1/completions", TEXT | {"prompt": ids, "echo": True})
    assert (error["param"], decoded) == ("prompt", [])


async def test_a_text_that_takes_too_much_memory_is_not_tokenized(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that repeats a character may have few tokens, so this is a limit of its own."""
    engine = rig.engine("d", "decode")
    await rig.start(engine)
    longest = MAX_CHARACTERS_PER_TOKEN * engine.max_model_len
    monkeypatch.setattr(rig.tokenizer, "fewest_tokens", lambda _: 0)
    monkeypatch.setattr(rig.tokenizer, "encode", lambda *_, **__: [5])
    status, _, _ = await rig.post("/v1/completions", TEXT | {"prompt": "a" * longest})
    assert status == 200
    status, answer, _ = await rig.post("/v1/completions", TEXT | {"prompt": "a" * (longest + 1)})
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert f"at most {longest} characters" in answer["error"]["message"]


def test_a_long_context_takes_long_texts() -> None:
    short, middle, long = PromptBounds(8192), PromptBounds(2**17), PromptBounds(2**20)
    assert short.max_characters == MAX_CHARACTERS_PER_TOKEN * 8192
    assert (
        TextBounds(short).max_characters == MAX_CHARACTERS_PER_TOKEN * TextBounds(short).max_tokens
    )
    assert middle.max_characters == TextBounds(middle).max_characters == MAX_TEXT_CHARACTERS
    assert long.max_characters == TextBounds(long).max_characters == LONG_TEXT * 2**20
