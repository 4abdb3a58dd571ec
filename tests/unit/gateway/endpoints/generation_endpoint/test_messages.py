"""Anthropic's /v1/messages and count_tokens, through the `anthropic` client."""

from __future__ import annotations

from typing import Any

import anthropic
import msgspec
import pytest

from baton_protocol.options.config import AccessConfig
from baton_text.requests.messages_request import InputMessage
from support.gateway.fake_engine import DEADLINE_S
from support.gateway.gateway_rig import GatewayRig, MakeRig

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ADD: dict[str, Any] = {"name": "add", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "hi"}
ANSWER = (
    '<think>Two calls.</think>\n\nI look.\n<tool_call>\n{"name": "get_weather", "arguments": '
    '{"city": "Malmö"}}\n</tool_call>\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n'
    "</tool_call>"
)
THINKING = {"type": "enabled", "budget_tokens": 1024}
EXPECTED = [
    {"type": "thinking", "thinking": "Two calls.", "signature": ""},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "name": "get_weather", "input": {"city": "Malmö"}},
    {"type": "tool_use", "name": "add", "input": {"a": 1}},
]


@pytest.fixture
def rig(make_rig: MakeRig) -> GatewayRig:
    return make_rig(tool_parser="hermes", reasoning_parser="think")


def client_of(rig: GatewayRig, **options: Any) -> anthropic.AsyncAnthropic:
    fields = {"api_key": "unused", **options}
    return anthropic.AsyncAnthropic(base_url=rig.url, max_retries=0, timeout=DEADLINE_S, **fields)


def fields_of(**options: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 200, "messages": [USER], **options}


def blocks_of(message: anthropic.types.Message) -> list[dict[str, Any]]:
    """Return the blocks without what the API may add. Each call must have an id of its own."""
    blocks = [block.model_dump(exclude_none=True) for block in message.content]
    ids = [block.pop("id") for block in blocks if block["type"] == "tool_use"]
    assert len(set(ids)) == len(ids)
    return blocks


async def test_a_message_has_reasoning_text_and_calls(rig: GatewayRig) -> None:
    await rig.start(rig.answering(ANSWER))
    async with client_of(rig) as client:
        fields = fields_of(tools=[WEATHER, ADD], thinking=THINKING)
        message = await client.messages.create(**fields)
    assert blocks_of(message) == EXPECTED
    assert (message.role, message.type, message.model) == ("assistant", "message", "m")
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    assert message.usage.output_tokens > 10
    assert message.usage.input_tokens > 0


async def test_a_stream_makes_the_same_message(rig: GatewayRig) -> None:
    await rig.start(rig.answering(ANSWER))
    async with client_of(rig) as client:
        fields = fields_of(tools=[WEATHER, ADD], thinking=THINKING)
        whole = await client.messages.create(**fields)
        async with client.messages.stream(**fields) as stream:
            kinds = [event.type async for event in stream]
            message = await stream.get_final_message()
    assert blocks_of(message) == blocks_of(whole) == EXPECTED
    assert message.stop_reason == whole.stop_reason
    assert message.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4


async def test_a_limit_above_the_rest_of_the_context_is_lowered(make_rig: MakeRig) -> None:
    rig = make_rig(access=AccessConfig(max_completion_tokens=200))
    engine = rig.answering("ok")
    await rig.start(engine)
    async with client_of(rig) as client:
        message = await client.messages.create(**fields_of(max_tokens=128_000))
        await client.messages.create(**fields_of(max_tokens=128_000, system="hello " * 60))
    assert message.stop_reason == "end_turn"
    short, long = engine.adds
    assert short.sampling_params.max_tokens == 200
    assert long.sampling_params.max_tokens == engine.max_model_len - len(long.prompt_token_ids)


FORM = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"const": 1}}}}


async def test_a_text_follows_a_schema(rig: GatewayRig) -> None:
    engine = rig.answering('<think>Hm.</think>{"a": 1}')
    await rig.start(engine)
    async with client_of(rig) as client:
        for options in ({"output_config": {"format": FORM}}, {"output_format": FORM}):
            message = await client.messages.create(**fields_of(extra_body=options))
            assert blocks_of(message) == [{"type": "text", "text": '{"a": 1}'}]
    first, second = [request.sampling_params.structured_output for request in engine.adds]
    assert first == second
    assert '{"a": {"const": 1}}' in first.spec


async def test_the_budget_limits_the_thinking(rig: GatewayRig) -> None:
    engine = rig.answering("<think>Hm.</think>Yes.")
    await rig.start(engine)
    async with client_of(rig) as client:
        await client.messages.create(**fields_of(thinking=THINKING))
    assert "[max_tokens=1024]" in engine.adds[0].sampling_params.structured_output.spec


async def test_arguments_without_utf_8_are_empty(rig: GatewayRig) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": "\\ud800"}}\n</tool_call>'
    await rig.start(rig.answering(call))
    async with client_of(rig) as client:
        message = await client.messages.create(**fields_of(tools=[ADD]))
    assert blocks_of(message) == [{"type": "tool_use", "name": "add", "input": {}}]


async def test_reasoning_is_sent_only_if_the_request_asks_for_it(rig: GatewayRig) -> None:
    await rig.start(rig.answering("<think>Hm.</think>Yes."))
    async with client_of(rig) as client:
        for options in ({}, {"thinking": {"type": "disabled"}}):
            message = await client.messages.create(**fields_of(**options))
            assert blocks_of(message) == [{"type": "text", "text": "Yes."}]
            async with client.messages.stream(**fields_of(**options)) as stream:
                assert blocks_of(await stream.get_final_message()) == blocks_of(message)


@pytest.mark.parametrize(
    ("options", "text", "reason", "sequence"),
    [
        ({}, "one two", "end_turn", None),
        ({"max_tokens": 1}, None, "max_tokens", None),
        ({"stop_sequences": ["two"]}, "one ", "stop_sequence", "two"),
    ],
)
async def test_a_message_has_its_stop_reason(
    rig: GatewayRig, options: Any, text: str | None, reason: str, sequence: str | None
) -> None:
    await rig.start(rig.answering("one two"))
    async with client_of(rig) as client:
        message = await client.messages.create(**fields_of(**options))
        async with client.messages.stream(**fields_of(**options)) as stream:
            streamed = await stream.get_final_message()
    for each in (message, streamed):
        assert (each.stop_reason, each.stop_sequence) == (reason, sequence)
        assert text is None or blocks_of(each) == [{"type": "text", "text": text}]


@pytest.mark.usefixtures("agent_template")
async def test_an_agent_runs_five_turns(rig: GatewayRig) -> None:
    """Each result of a tool goes back to the model. The prompts grow by the calls and results."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    engine = rig.answering(call)
    await rig.start(engine)
    messages: list[Any] = [USER]
    async with client_of(rig) as client:
        for turn in range(5):
            fields = fields_of(tools=[ADD], messages=messages, max_tokens=100)
            message = await client.messages.create(**fields)
            [block] = message.content
            result = {"type": "tool_result", "tool_use_id": block.id, "content": str(turn)}
            messages.append({"role": "assistant", "content": message.content})
            messages.append({"role": "user", "content": [result]})
    lengths = [len(request.prompt_token_ids) for request in engine.adds]
    assert lengths == sorted(set(lengths))
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == lengths[-1]


async def test_a_stream_continues_on_another_engine(rig: GatewayRig) -> None:
    """The first engine is lost within the arguments of a call."""
    first, second = rig.answering(ANSWER, "a"), rig.answering(ANSWER, "b")
    begun = rig.tokenizer.encode(ANSWER.partition("Malm")[0], add_special_tokens=False)
    for engine in (first, second):
        engine.hold_after = len(begun)
    await rig.start(first, second)
    async with client_of(rig) as client:
        fields = fields_of(tools=[WEATHER, ADD], thinking=THINKING)
        async with client.messages.stream(**fields) as stream:
            async for event in stream:
                holding = first if first.adds else second
                if event.type == "input_json" and not holding.released.is_set():
                    holding.die()
                    for engine in (first, second):
                        engine.released.set()
            message = await stream.get_final_message()
    assert blocks_of(message) == EXPECTED
    assert first.adds
    assert second.adds


async def test_a_failure_within_a_stream_is_an_event(rig: GatewayRig) -> None:
    engine = rig.answering("one two three", hold_after=2)
    await rig.start(engine)
    async with client_of(rig) as client, client.messages.stream(**fields_of()) as stream:
        await anext(event async for event in stream if event.type == "text")
        engine.die()
        with pytest.raises(anthropic.APIStatusError) as failed:
            await stream.until_done()
    assert failed.value.body["type"] == "error"
    assert failed.value.body["error"]["type"] == "overloaded_error"


async def test_tokens_are_counted_as_the_prompt_has_them(rig: GatewayRig) -> None:
    engine = rig.answering("ok")
    await rig.start(engine)
    prompt = {"model": "m", "system": "Be brief.", "tools": [ADD], "messages": [USER, USER]}
    async with client_of(rig) as client:
        counted = await client.messages.count_tokens(**prompt)
        await client.messages.create(max_tokens=5, **prompt)
    assert counted.input_tokens == len(engine.adds[0].prompt_token_ids)


def messages(*given: dict[str, Any]) -> list[InputMessage]:
    return msgspec.convert(given, list[InputMessage])


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"model": "other"}, "does not exist"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "assistant", "content": "I"}]}, "cannot continue"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [ADD], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
        ({"output_format": {"type": "text"}}, "output_format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_format": FORM, "output_config": {"format": FORM}}, "cannot be combined"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking"),
    ],
)
async def test_invalid_bodies_are_refused_in_the_shape_of_the_api(
    rig: GatewayRig, options: dict[str, Any], text: str
) -> None:
    await rig.start(rig.answering("ok"))
    status, body, _ = await rig.post("/v1/messages", fields_of(**options))
    assert status == (404 if "model" in options else 400)
    assert body["type"] == "error"
    kind = "not_found_error" if "model" in options else "invalid_request_error"
    assert body["error"]["type"] == kind
    assert text in body["error"]["message"]
