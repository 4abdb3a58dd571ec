"""The format of replies follows the options and the chat template."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import pytest

from baton_protocol.sampling_params import MAX_SPEC_LENGTH
from baton_text.reply_parsing.reasoning import REASONING_FORMATS
from baton_text.reply_parsing.reply_format import Reply, ReplyFormat
from baton_text.reply_parsing.tool_formats import TOOL_FORMATS
from baton_text.request_error import RequestError
from baton_text.requests.chat_request import ChatCompletionRequest

TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (None, "json", None),
        ("{{ messages[0].content }}", "json", None),
        ("{{ '<tool_call>\\n' }}{{ '<think>\\n\\n</think>' }}", "hermes", "think"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral", None),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}[/THINK]", "mistral_args", "mistral"),
        (
            "{{ '<｜tool▁calls▁begin｜>' + type + '<｜tool▁sep｜>' + name + '```json' }}</think>",
            "deepseek_v3",
            "think",
        ),
        ("{{ '<｜tool▁calls▁begin｜>' + name + '<｜tool▁sep｜>' }}", "deepseek_v31", None),
        ("{{ '<|start|>assistant<|channel|>final<|message|>' }}", "gptoss", "gptoss"),
        ("<|python_tag|>", "llama3_json", None),
        ("<|python_start|>", "pythonic", None),
    ],
)
def test_the_chat_template_chooses_the_reply_format(
    template: str | None, tools: str, reasoning: str | None
) -> None:
    chosen = ReplyFormat.choose("auto", "auto", template)
    assert chosen.tools is TOOL_FORMATS[tools]
    assert chosen.reasoning is (REASONING_FORMATS[reasoning] if reasoning else None)
    given = ReplyFormat.choose("pythonic", "none", template)
    assert given == ReplyFormat(TOOL_FORMATS["pythonic"], None)


def request(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    request = msgspec.convert(body, ChatCompletionRequest)
    request.validate()
    return request


def reply(name: str, prompt: str = "", **fields: Any) -> Any:
    chosen = ReplyFormat.choose(name, "think", None)
    return chosen.reply(request(**fields), prompt, {"<think>": 7, "<tool_call>": 8}.get)


def parsing(found: Reply) -> dict[str, Any]:
    """Return the arguments of the parsers of a reply."""
    return found.parser.keywords


def test_a_reply_begins_inside_the_reasoning_if_the_prompt_does() -> None:
    assert parsing(reply("hermes", "...assistant\n<think>\n"))["is_reasoning"]
    assert not parsing(reply("hermes", "...assistant\n<think>\n\n</think>\n\n"))["is_reasoning"]


def test_a_structured_output_follows_the_reasoning_if_it_is_no_grammar_of_the_client() -> None:
    form = {"type": "json_object"}
    inside = reply("hermes", "<think>\n", response_format=form)
    assert parsing(inside)["tool_format"] is None
    assert "start: thinking " in inside.structured_output.spec
    assert "start: (<[7]> thinking " in reply("hermes", guided_regex="a+").structured_output.spec
    assert reply("hermes", structured_outputs={"grammar": 'start: "a"'}) is None
    without_reasoning = ReplyFormat.choose("hermes", "none", None)
    assert without_reasoning.reply(request(response_format=form), "", {}.get) is None


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_without_parallel_calls_a_reply_has_one_call_also_without_a_grammar(name: str) -> None:
    options = {"tools": [TOOL], "tool_choice": "auto"}
    assert parsing(reply(name, **options, parallel_tool_calls=False))["is_single"]
    assert not parsing(reply(name, **options))["is_single"]


def test_a_budget_needs_a_grammar_only_if_the_model_reasons() -> None:
    spec = reply("hermes", thinking_budget=5).structured_output.spec
    assert "max_tokens=5" in spec
    assert reply("hermes").structured_output is None
    both = reply("hermes", thinking_budget=5, tools=[TOOL], tool_choice="required")
    assert "max_tokens=5" in both.structured_output.spec
    assert parsing(both)["is_guaranteed"]
    free = reply("pythonic", thinking_budget=5, tools=[TOOL])
    assert "max_tokens=5" in free.structured_output.spec
    assert not parsing(free)["is_guaranteed"]
    without_reasoning = ReplyFormat.choose("hermes", "none", None)
    assert without_reasoning.reply(request(thinking_budget=5), "", {}.get) is None


def test_the_texts_of_gptoss_are_read_without_tools() -> None:
    chosen = ReplyFormat.choose("gptoss", "auto", "<|channel|>")
    found = chosen.reply(request(), "<|start|>assistant", {"<|channel|>": 3}.get)
    assert found is not None
    assert parsing(found)["tool_format"] is TOOL_FORMATS["gptoss"]
    assert parsing(found)["tools"] == frozenset()
    assert found.special_token_ids == {3}


def test_special_tokens_of_the_format_stay_in_the_text() -> None:
    assert reply("hermes", tools=[TOOL]).special_token_ids == {7, 8}
    assert reply("json", tools=[TOOL]).special_token_ids == {7}
    assert "<[8]>" in reply("hermes", tools=[TOOL]).structured_output.spec


def test_long_schemas_of_tools_are_refused_and_their_descriptions_do_not_count() -> None:
    def tool(**schema: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "add", "parameters": schema}}

    text = "x" * MAX_SPEC_LENGTH
    properties = {"a": {"description": text}, "title": {"title": text, "enum": [{"title": "b"}]}}
    spec = reply("hermes", tools=[tool(type="object", properties=properties)])
    lines = spec.structured_output.spec
    assert len(lines) < 1000
    assert '"properties": {"a": {}, "title": {"enum": [{"title": "b"}]}}' in lines
    with pytest.raises(RequestError, match="schemas of tools") as refused:
        reply("hermes", tools=[tool(enum=[text])])
    assert refused.value.param == "tools"


def test_deeply_nested_schemas_of_tools_are_refused() -> None:
    schema: dict[str, Any] = {}
    # The parser of bodies accepts this depth.
    for _ in range(sys.getrecursionlimit() * 2 // 3):
        schema = {"items": schema}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    with pytest.raises(RequestError, match="nested too deeply") as refused:
        reply("hermes", tools=[tool])
    assert refused.value.param == "tools"


def test_calls_that_no_grammar_describes_are_written_as_json_if_a_grammar_is_needed() -> None:
    assert parsing(reply("pythonic", tools=[TOOL]))["tool_format"] is TOOL_FORMATS["pythonic"]
    assert reply("pythonic", tools=[TOOL]).structured_output is None
    required = reply("pythonic", tools=[TOOL], tool_choice="required")
    assert parsing(required)["tool_format"] is TOOL_FORMATS["json"]
    assert required.structured_output is not None
    either = reply("pythonic", tools=[TOOL], response_format={"type": "json_object"})
    assert parsing(either)["tool_format"] is TOOL_FORMATS["json"]
    assert either.structured_output is not None


def test_calls_that_begin_like_json_are_refused_with_a_response_format() -> None:
    form = {"type": "json_object"}
    with pytest.raises(RequestError) as refused:
        reply("llama3_json", tools=[TOOL], response_format=form)
    assert refused.value.param == "response_format"
    assert reply("llama3_json", tools=[TOOL], tool_choice="required", response_format=form)
