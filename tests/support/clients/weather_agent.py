"""The conversation of all agents of tests/clients and at the gateway: five turns of the model."""

from __future__ import annotations

import json
from typing import Any

from support.clients.client_rig import ClientRig, by_turn


def called(name: str, **arguments: Any) -> str:
    """Return a call as the model writes it."""
    call = {"name": name, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


ANSWER = "Malmö is 4 degrees warmer."
REASONING = "Two cities."
#: The first turn has reasoning, text and two calls.
SCRIPT = by_turn(
    f"<think>{REASONING}</think>\n\nI look.\n"
    + called("get_weather", city="Malmö")
    + "\n"
    + called("get_weather", city="Oslo"),
    called("add", a=14, b=-10),
    called("get_weather", city="Oslo"),
    called("add", a=4, b=10),
    ANSWER,
)
CALLS = [
    ["get_weather", {"city": "Malmö"}],
    ["get_weather", {"city": "Oslo"}],
    ["add", {"a": 14, "b": -10}],
    ["get_weather", {"city": "Oslo"}],
    ["add", {"a": 4, "b": 10}],
]
#: The prompt of the last turn, which contains all earlier turns.
LAST_PROMPT = """\
[get_weather]
[add]
<|system|>Use the tools.
<|user|>How much warmer is Malmö than Oslo?
<|assistant|>I look.[get_weather {"city": "Malmö"}][get_weather {"city": "Oslo"}]
<|tool|>14
<|tool|>10
<|assistant|>[add {"a": 14, "b": -10}]
<|tool|>4
<|assistant|>[get_weather {"city": "Oslo"}]
<|tool|>10
<|assistant|>[add {"a": 4, "b": 10}]
<|tool|>14
<|assistant|>"""


def check_agent(clients: ClientRig, answer: str | None, calls: list[Any]) -> None:
    """Check an agent's answer and calls, and that its last turn sent the whole conversation."""
    clients.check_answers()
    assert answer == ANSWER
    assert calls == CALLS
    assert len(clients.prompts) == 5
    assert clients.prompts[-1] == LAST_PROMPT
