"""Replies with tool calls in every format, and what a parser makes of them.

For the tests of the reply parser and of the tool formats.
"""

from __future__ import annotations

from baton_text.reply_parsing.reply_parser import ReplyDelta, ReplyParser

NAMES = ("get_weather", "add")


WEATHER = '{"city": "Malmö", "days": [1, 2], "note": "a \\"}]<tool_call> b"}'


def parse(pieces: list[str], *, is_truncated: bool = False, **options: object) -> dict[str, object]:
    """Parse the pieces, and return the whole reply."""
    parser = ReplyParser(**{"tools": NAMES, **options})  # type: ignore[arg-type]
    deltas = [parser.push(piece) for piece in pieces]
    deltas.append(parser.finish(is_truncated=is_truncated))
    return merged(deltas)


def merged(deltas: list[ReplyDelta]) -> dict[str, object]:
    calls: list[list[str]] = []
    for delta in deltas:
        for call in delta.tool_calls:
            if isinstance(call.name, str):
                assert call.index == len(calls)
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
    return {
        "reasoning": "".join(delta.reasoning for delta in deltas),
        "content": "".join(delta.content for delta in deltas),
        "calls": calls,
    }


def reply(content: str = "", *calls: list[str], reasoning: str = "") -> dict[str, object]:
    return {"reasoning": reasoning, "content": content, "calls": list(calls)}


CALL = ["get_weather", WEATHER]


ADD = ["add", '{"a": 1}']


EXAMPLES: list[tuple[str, str, dict[str, object]]] = [
    (
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>',
        reply("", CALL),
    ),
    (
        "hermes",
        f'Let me see.\n\n<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n'
        "</tool_call>\n"
        '<tool_call>\n{"arguments": {"a": 1}, "name": "add"}\n</tool_call>\n',
        reply("Let me see.", CALL, ADD),
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        reply("", ADD),
    ),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', reply("", ["add", "{}"])),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {WEATHER}}}', reply("", CALL)),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}; '
        '{"name": "add", "parameters": {"a": 1}}',
        reply("", ADD, ADD),
    ),
    (
        "json",
        '[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 1}}]',
        reply("", ADD, ADD),
    ),
    (
        "pythonic",
        "[add(a=1), get_weather(city='Malmö', days=[1, 2], note='a \"}]<tool_call> b')]",
        reply("", ADD, CALL),
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', reply("", ADD)),
    (
        "mistral",
        f'Sure.[TOOL_CALLS]add[ARGS]{{"a": 1}}[TOOL_CALLS]get_weather{WEATHER}',
        reply("Sure.", ADD, CALL),
    ),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n'
        f"```json\n{WEATHER}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        reply("", ADD, CALL),
    ),
    (
        "deepseek_v3",
        'Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        reply("Well.", ADD),
    ),
    (
        "gptoss",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{WEATHER}<|call|>",
        reply("", CALL),
    ),
    (
        "gptoss",
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        reply("", ADD),
    ),
    (
        "gptoss",
        "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.add <|constrain|>json<|message|>{"a": 1}',
        reply("I add.", ADD),
    ),
]
