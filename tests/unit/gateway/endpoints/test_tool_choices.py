"""The choices of tools of the Python packages `openai` and `anthropic`, in each of their APIs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from support.clients.client_rig import ClientRig, by_word, client_rig
from support.clients.weather_agent import called
from support.gateway.fake_engine import DEADLINE_S

TEXT = "It is cold."
ADD = called("add", a=1, b=2)
OSLO = called("get_weather", city="Oslo")
#: The answer to "The choice is <word>."
ANSWERS = {
    "auto": TEXT,
    "parallel": f"I look.\n{OSLO}\n{ADD}",
    "required": f"{OSLO}\n{ADD}",
    "named": ADD,
    "none": TEXT,
    "single": OSLO,
}
CALLS = {
    "auto": [],
    "parallel": ["get_weather", "add"],
    "required": ["get_weather", "add"],
    "named": ["add"],
    "none": [],
    "single": ["get_weather"],
}


def schema(**properties: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in properties.items()},
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS = {"get_weather": schema(city="string"), "add": schema(a="integer", b="integer")}
FUNCTIONS: list[dict[str, Any]] = [
    {"name": name, "parameters": each, "strict": True} for name, each in SCHEMAS.items()
]


def openai_choice(word: str, named: dict[str, Any]) -> dict[str, Any]:
    if word == "single":
        return {"tool_choice": "required", "parallel_tool_calls": False}
    return {"tool_choice": {"named": named, "parallel": "auto"}.get(word, word)}


def names_in(calls: list[Any] | None) -> list[str]:
    return [call.name for call in calls or []]


async def ask_chat(url: str, word: str, is_streamed: bool) -> list[str]:
    fields: Any = {
        "model": "m",
        "messages": [{"role": "user", "content": f"The choice is {word}."}],
        "tools": [{"type": "function", "function": each} for each in FUNCTIONS],
        **openai_choice(word, {"type": "function", "function": {"name": "add"}}),
    }
    async with openai_client(url) as client:
        if is_streamed:
            async with client.chat.completions.stream(**fields) as stream:
                completion: Any = await stream.get_final_completion()
        else:
            completion = await client.chat.completions.create(**fields)
    calls = completion.choices[0].message.tool_calls
    return names_in([call.function for call in calls or []])


async def ask_responses(url: str, word: str, is_streamed: bool) -> list[str]:
    fields: Any = {
        "model": "m",
        "input": f"The choice is {word}.",
        "tools": [{"type": "function", **each} for each in FUNCTIONS],
        **openai_choice(word, {"type": "function", "name": "add"}),
    }
    async with openai_client(url) as client:
        if is_streamed:
            async with client.responses.stream(**fields) as stream:
                response = await stream.get_final_response()
        else:
            response = await client.responses.create(**fields)
    return names_in([item for item in response.output if item.type == "function_call"])


async def ask_messages(url: str, word: str, is_streamed: bool) -> list[str]:
    choices: dict[str, dict[str, Any]] = {
        "auto": {"type": "auto"},
        "parallel": {"type": "auto"},
        "required": {"type": "any"},
        "named": {"type": "tool", "name": "add"},
        "none": {"type": "none"},
        "single": {"type": "any", "disable_parallel_tool_use": True},
    }
    fields: Any = {
        "model": "m",
        "max_tokens": 200,
        "messages": [{"role": "user", "content": f"The choice is {word}."}],
        "tools": [{"name": name, "input_schema": each} for name, each in SCHEMAS.items()],
        "tool_choice": choices[word],
    }
    client = anthropic.AsyncAnthropic(
        base_url=url, api_key="unused", max_retries=0, timeout=DEADLINE_S
    )
    async with client:
        if is_streamed:
            async with client.messages.stream(**fields) as stream:
                message: Any = await stream.get_final_message()
        else:
            message = await client.messages.create(**fields)
    return names_in([block for block in message.content if block.type == "tool_use"])


def openai_client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=DEADLINE_S
    )


@pytest.fixture
async def clients(tmp_path: Path) -> AsyncIterator[ClientRig]:
    async with client_rig(tmp_path) as rig:
        yield rig


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("ask", [ask_chat, ask_responses, ask_messages])
async def test_each_choice_of_tools(
    clients: ClientRig, ask: Callable[[str, str, bool], Awaitable[list[str]]], is_streamed: bool
) -> None:
    clients.use(by_word(ANSWERS))
    assert {word: await ask(clients.url, word, is_streamed) for word in ANSWERS} == CALLS
    clients.check_answers()
    auto, parallel, required, named, none, single = range(len(ANSWERS))
    assert clients.allows(auto, OSLO)
    assert clients.allows(parallel, TEXT)
    assert not clients.allows(required, TEXT)
    assert not clients.allows(named, OSLO)
    assert not clients.allows(named, TEXT)
    assert "[add]" in clients.prompts[auto]
    assert "[add]" not in clients.prompts[none]
    assert clients.allows(single, ADD)
    assert not clients.allows(single, f"{OSLO}\n{ADD}")
