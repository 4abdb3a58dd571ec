"""Tools, tool calls and reasoning of /v1/chat/completions, through the `openai` client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from baton_protocol.sampling_params import StructuredOutputKind
from baton_text.chat_template import ChatTemplate
from support.gateway.fake_engine import EOS_ID
from support.gateway.gateway_rig import GatewayRig

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add"}}
USER = {"role": "user", "content": "hi"}
CALLS = (
    '<think>Two calls.</think>\n\nI look.\n<tool_call>\n{"name": "get_weather", "arguments": '
    '{"city": "Malmö"}}\n</tool_call>\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n'
    "</tool_call>"
)


@pytest.fixture
def rig(make_rig: Any) -> GatewayRig:
    return make_rig(tool_parser="hermes", reasoning_parser="think")


async def chat(rig: GatewayRig, **options: Any) -> Any:
    fields: dict[str, Any] = {"model": "m", "messages": [USER], "tools": [WEATHER, ADD], **options}
    return await rig.client().chat.completions.create(**fields)


async def streamed(rig: GatewayRig, **options: Any) -> dict[str, Any]:
    """Return the message that the chunks of a stream make."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    async for chunk in await chat(rig, stream=True, **options):
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            message["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            message["finish"] = choice.finish_reason or message["finish"]
            for call in choice.delta.tool_calls or []:
                if call.id:
                    assert (call.index, call.type) == (len(message["calls"]), "function")
                    message["calls"].append([call.function.name, ""])
                message["calls"][call.index][1] += call.function.arguments
    return message


EXPECTED = {
    "content": "I look.",
    "reasoning": "Two calls.",
    "calls": [["get_weather", '{"city": "Malmö"}'], ["add", '{"a": 1}']],
    "finish": "tool_calls",
}


async def test_an_answer_has_its_reasoning_content_and_calls(rig: GatewayRig) -> None:
    engine = rig.answering(CALLS)
    await rig.start(engine)
    answer = await chat(rig)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.reasoning_content == "Two calls."
    calls = choice.message.tool_calls
    assert [[call.function.name, call.function.arguments] for call in calls] == EXPECTED["calls"]
    assert len({call.id for call in calls}) == 2
    assert {call.type for call in calls} == {"function"}
    reasoning = answer.usage.completion_tokens_details.reasoning_tokens
    assert 0 < reasoning <= len(rig.tokenizer.encode("<think>Two calls.</think>"))
    [request] = engine.adds
    assert request.sampling_params.structured_output.kind is StructuredOutputKind.GRAMMAR


async def test_a_stream_makes_the_same_message(rig: GatewayRig) -> None:
    await rig.start(rig.answering(CALLS))
    assert await streamed(rig) == EXPECTED
    assert (await streamed(rig, extra_body={"include_reasoning": False}))["reasoning"] == ""


@pytest.mark.parametrize("tokens_per_output", [1, 64])
async def test_each_chunk_of_a_call_adds_to_one_call(
    rig: GatewayRig, tokens_per_output: int
) -> None:
    """Some clients read only the first tool call of a chunk."""
    engine = rig.answering(CALLS)
    engine.tokens_per_output = tokens_per_output
    await rig.start(engine)
    deltas = [
        choice.delta async for chunk in await chat(rig, stream=True) for choice in chunk.choices
    ]
    assert max(len(delta.tool_calls or []) for delta in deltas) == 1


async def test_calls_continue_on_another_engine(rig: GatewayRig) -> None:
    """The first engine is lost within the arguments of a call."""
    first, second = rig.answering(CALLS, "a"), rig.answering(CALLS, "b")
    begun = rig.tokenizer.encode(CALLS.partition("Malm")[0], add_special_tokens=False)
    for engine in (first, second):
        engine.hold_after = len(begun)
    await rig.start(first, second)
    stream = await chat(rig, stream=True)
    calls: list[str] = []
    async for chunk in stream:
        for choice in chunk.choices:
            calls += [call.function.arguments for call in choice.delta.tool_calls or []]
        holding = first if first.adds else second
        if not holding.released.is_set() and "".join(calls):
            holding.die()
            for engine in (first, second):
                engine.released.set()
    assert "".join(calls) == '{"city": "Malmö"}{"a": 1}'


async def test_only_calls_leave_the_content_null(rig: GatewayRig) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    engine = rig.answering(call)
    await rig.start(engine)
    message = (await chat(rig, tool_choice="required")).choices[0].message
    assert message.content is None
    assert [each.function.name for each in message.tool_calls] == ["add"]
    named = {"type": "function", "function": {"name": "add"}}
    await chat(rig, tool_choice=named)
    required, one = [request.sampling_params.structured_output.spec for request in engine.adds]
    assert '"get_weather' in required.replace("\\", "")
    assert "get_weather" not in one


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_can_be_called(rig: GatewayRig, mode: str) -> None:
    engine = rig.answering('<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>')
    await rig.start(engine)
    add = {"type": "function", "function": {"name": "add"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [add]}}
    message = (await chat(rig, tool_choice=allowed)).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["add"]
    await chat(rig, tools=[ADD], tool_choice=mode)
    await rig.client().responses.create(
        model="m",
        input="hi",
        tools=[{"type": "function", **tool["function"]} for tool in (WEATHER, ADD)],
        tool_choice={
            "type": "allowed_tools",
            "mode": mode,
            "tools": [{"type": "function", "name": "add"}],
        },
    )
    restricted, only, responses = [each.sampling_params.structured_output for each in engine.adds]
    assert restricted == only == responses


async def test_the_template_gets_the_reasoning_effort(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "{{ reasoning_effort }} {{ enable_thinking }} {{ messages[0].content }}"
    template = ChatTemplate(source, rig.tokenizer.special_tokens)
    monkeypatch.setattr(rig.tokenizer, "chat_template", template)
    engine = rig.answering("ok")
    await rig.start(engine)
    for effort in ("low", "none"):
        await chat(rig, reasoning_effort=effort)
        await rig.client().responses.create(model="m", input="hi", reasoning={"effort": effort})
    await chat(
        rig,
        reasoning_effort="none",
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    )
    prompts = [rig.tokenizer.decode(request.prompt_token_ids) for request in engine.adds]
    assert prompts == ["low  hi", "low  hi", " False hi", " False hi", " True hi"]


async def test_a_thinking_budget_reaches_the_engine(rig: GatewayRig) -> None:
    engine = rig.answering("<think>Hm.</think>Yes.")
    await rig.start(engine)
    budget = {"extra_body": {"thinking_budget": 7}}
    await chat(rig, tools=openai.NOT_GIVEN, n=2, **budget)
    await chat(rig, **budget)
    await rig.client().responses.create(model="m", input="hi", **budget)
    prompts = ["hi", "hi <think>\n", rig.tokenizer.encode("hi <think>\n")]
    for prompt in prompts:
        await rig.client().completions.create(model="m", prompt=prompt, max_tokens=9, **budget)
    specs = [request.sampling_params.structured_output.spec for request in engine.adds]
    assert all("[max_tokens=7]" in spec for spec in specs)
    assert len(specs) == 7
    starts = [spec.partition("\nstart: ")[2].startswith("thinking ") for spec in specs]
    assert starts == [False] * 5 + [True] * 2


async def test_each_prompt_of_a_completion_has_the_grammar_of_its_end(rig: GatewayRig) -> None:
    engine = rig.answering("<think>Hm.</think>Yes.")
    await rig.start(engine)
    prompts = ["hi", "hi <think>\n", "go"]
    await rig.client().completions.create(
        model="m", prompt=prompts, max_tokens=9, extra_body={"thinking_budget": 7}
    )
    specs = {
        rig.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False): (
            request.sampling_params.structured_output.spec
        )
        for request in engine.adds
    }
    assert len(specs) == 3
    assert specs["hi"] == specs["go"] != specs["hi <think>\n"]
    await rig.complete()
    assert engine.adds[-1].sampling_params.structured_output is None


async def test_json_follows_the_reasoning(rig: GatewayRig) -> None:
    engine = rig.answering('<think>Hm, {"b".</think>\n{"a": 1}')
    await rig.start(engine)
    fields = {"tools": openai.NOT_GIVEN, "response_format": {"type": "json_object"}}
    message = (await chat(rig, **fields)).choices[0].message
    assert (message.reasoning_content, message.content) == ('Hm, {"b".', '{"a": 1}')
    received = await streamed(rig, **fields)
    assert (received["reasoning"], received["content"]) == ('Hm, {"b".', '{"a": 1}')
    assert "thinking" in engine.adds[0].sampling_params.structured_output.spec


async def test_without_tools_nothing_is_parsed_as_a_call(rig: GatewayRig) -> None:
    engine = rig.answering(CALLS)
    await rig.start(engine)
    for options in ({"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}):
        choice = (await chat(rig, **options)).choices[0]
        assert choice.message.tool_calls is None
        assert choice.message.content == CALLS.partition("</think>\n\n")[2]
        assert choice.finish_reason == "stop"
    assert engine.adds[0].sampling_params.structured_output is None


async def test_with_a_response_format_an_answer_is_calls_or_json(make_rig: Any) -> None:
    """A string of the JSON may look like a call."""
    rig = make_rig(tool_parser="hermes", reasoning_parser="none")
    texts = {
        "call": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        "json": '{"note": "<tool_call> begins a call"}',
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["Note"]}}}
    engine = rig.engine("d", "decode")
    await rig.start(engine)
    for text in texts.values():
        engine.answer = [*rig.tokenizer.encode(text, add_special_tokens=False), EOS_ID]
        message = (await chat(rig, response_format=form)).choices[0].message
        received = await streamed(rig, response_format=form)
        calls = [[c.function.name, c.function.arguments] for c in message.tool_calls or []]
        assert (
            calls == received["calls"] == ([["add", '{"a": 1}']] if text == texts["call"] else [])
        )
        assert message.content == (None if calls else text)
        assert received["content"] == ("" if calls else text)
    grammar = engine.adds[0].sampling_params.structured_output
    assert grammar.kind is StructuredOutputKind.GRAMMAR
    assert '"get_weather' in grammar.spec.replace("\\", "")
    assert '"enum": ["Note"]' in grammar.spec


async def test_the_template_gets_tools_and_earlier_calls(make_rig: Any) -> None:
    rig = make_rig(tool_parser="hermes", reasoning_parser="none")
    engine = rig.answering("ok")
    await rig.start(engine)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    seen: list[dict[str, Any]] = []
    template = rig.tokenizer.chat_template

    class Recorder:
        source = template.source

        def render(self, messages: Any, **variables: Any) -> str:
            seen.append({"messages": messages, **variables})
            return "prompt"

    rig.tokenizer.chat_template = Recorder()
    try:
        await chat(rig, messages=messages)
    finally:
        rig.tokenizer.chat_template = template
    [given] = seen
    assert given["tools"] == [WEATHER, ADD]
    assert given["messages"][1] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}
        ],
    }
    assert given["messages"][2] == {"role": "tool", "content": "2", "tool_call_id": "c1"}


def called_with(arguments: str) -> dict[str, Any]:
    """Return the assistant's message with one call."""
    function = {"name": "a", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [ADD, ADD]}, "tools[1].function.name"),
        ({"tools": [ADD] * 129}, "tools"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"extra_body": {"thinking_budget": -1}}, "thinking_budget"),
        ({"extra_body": {"thinking_budget": 2**31}}, "thinking_budget"),
        (
            {"extra_body": {"thinking_budget": 1, "use_beam_search": True}},
            "thinking_budget",
        ),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": ["x"]}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": []}}},
            "tool_choice",
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": ["add"]},
                }
            },
            "tool_choice",
        ),
        ({"extra_body": {"guided_regex": "a"}}, "guided_regex"),
        *(
            ({"messages": [called_with(text)]}, "messages[0].tool_calls[0].function.arguments")
            for text in ("[", "[]", '{"a": "\\ud800"}')
        ),
    ],
)
async def test_invalid_tools_are_refused(
    rig: GatewayRig, options: dict[str, Any], param: str
) -> None:
    await rig.start(rig.answering("ok"))
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(rig, **options)
    assert refused.value.param == param
    assert json.dumps(refused.value.body)
