"""Requests with each choice of tools. Each one has the prompt "The choice is <word>.".

For the tests of the choice of tools, by tests/clients and at the gateway.
"""

from __future__ import annotations

from typing import Any

from support.clients.client_rig import ClientRig, by_word
from support.clients.weather_agent import called

TEXT = "It is cold."
ADD = called("add", a=1, b=2)
OSLO = called("get_weather", city="Oslo")
#: Word -> (the model's answer, the text and the calls that a client reads from it).
CASES: dict[str, tuple[str, str, list[str]]] = {
    "auto": (TEXT, TEXT, []),
    "parallel": (f"I look.\n{OSLO}\n{ADD}", "I look.", ["get_weather", "add"]),  # with auto
    "alone": (f"I look.\n{OSLO}", "I look.", ["get_weather"]),  # auto without parallel calls
    "required": (f"{OSLO}\n{ADD}", "", ["get_weather", "add"]),
    "named": (ADD, "", ["add"]),
    "none": (TEXT, TEXT, []),
    "single": (OSLO, "", ["get_weather"]),  # required without parallel calls
}
SCRIPT = by_word({word: answer for word, (answer, _, _) in CASES.items()})


def check_choices(clients: ClientRig, read: dict[str, Any]) -> None:
    """Check each answer, and which other answers the grammar allows or forbids.

    Args:
        clients: the gateway, which has had one request per word since the last `use`.
        read: word -> the text and the calls that the client has read.
    """
    clients.check_answers()
    assert read == {
        word: {"content": content, "calls": calls} for word, (_, content, calls) in CASES.items()
    }
    auto, parallel, alone, required, named, none, single = range(len(CASES))
    assert clients.allows(auto, f"{OSLO}\n{ADD}")
    assert clients.allows(parallel, TEXT)
    assert clients.allows(alone, TEXT)
    assert not clients.allows(alone, f"I look.\n{OSLO}\n{ADD}")
    assert clients.allows(required, OSLO)
    assert not clients.allows(required, TEXT)
    assert not clients.allows(named, OSLO)
    assert not clients.allows(named, TEXT)
    assert "[add]" in clients.prompts[auto]
    assert "[add]" not in clients.prompts[none]
    assert clients.allows(single, ADD)
    assert not clients.allows(single, TEXT)
    assert not clients.allows(single, f"{OSLO}\n{ADD}")
