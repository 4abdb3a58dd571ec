"""The choices of tools of the Python packages `openai` and `anthropic`, in each of their APIs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import pytest

from support.clients.choices import CASES, SCRIPT, check_choices
from support.clients.client_rig import ClientRig
from support.gateway.fake_engine import DEADLINE_S
from support.gateway.gateway_rig import openai_client


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
    choices: dict[str, Any] = {
        "parallel": "auto",
        "alone": "auto",
        "named": named,
        "single": "required",
    }
    parallel = {"parallel_tool_calls": False} if word in ("alone", "single") else {}
    return {"tool_choice": choices.get(word, word), **parallel}


def reply(content: str | None, calls: list[Any]) -> dict[str, Any]:
    return {"content": content or "", "calls": [call.name for call in calls]}


async def ask_chat(url: str, word: str, is_streamed: bool) -> dict[str, Any]:
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
    message = completion.choices[0].message
    return reply(message.content, [call.function for call in message.tool_calls or []])


async def ask_responses(url: str, word: str, is_streamed: bool) -> dict[str, Any]:
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
    calls = [item for item in response.output if item.type == "function_call"]
    return reply(response.output_text, calls)


async def ask_messages(url: str, word: str, is_streamed: bool) -> dict[str, Any]:
    choices: dict[str, dict[str, Any]] = {
        "auto": {"type": "auto"},
        "parallel": {"type": "auto"},
        "alone": {"type": "auto", "disable_parallel_tool_use": True},
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
    text = "".join(block.text for block in message.content if block.type == "text")
    return reply(text, [block for block in message.content if block.type == "tool_use"])


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("ask", [ask_chat, ask_responses, ask_messages])
async def test_every_tool_choice_is_obeyed_in_every_api(
    clients: ClientRig,
    ask: Callable[[str, str, bool], Awaitable[dict[str, Any]]],
    is_streamed: bool,
) -> None:
    clients.use(SCRIPT)
    read = {word: await ask(clients.url, word, is_streamed) for word in CASES}
    check_choices(clients, read)
