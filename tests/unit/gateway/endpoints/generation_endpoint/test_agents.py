"""Agents with the Python packages `openai` and `anthropic` run five turns, in each of their APIs.

Each turn sends the whole conversation.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import pytest

from clients.programs.python.weather_tools import QUESTION, SYSTEM, TOOLS, run_tool
from support.clients.client_rig import ClientRig
from support.clients.weather_agent import SCRIPT, check_agent
from support.gateway.fake_engine import DEADLINE_S
from support.gateway.gateway_rig import openai_client

FUNCTIONS = [tool["function"] for tool in TOOLS]
#: Runs an agent. Args: the URL of the gateway, whether answers are streamed, and the list of calls.
Agent = Callable[[str, bool, list[Any]], Awaitable[str | None]]


async def run_chat_agent(url: str, is_streamed: bool, calls: list[Any]) -> str | None:
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
    ]
    async with openai_client(url) as client:
        while True:
            fields: Any = {"model": "m", "messages": messages, "tools": TOOLS}
            if is_streamed:
                async with client.chat.completions.stream(**fields) as stream:
                    completion: Any = await stream.get_final_completion()
            else:
                completion = await client.chat.completions.create(**fields)
            message = completion.choices[0].message
            if not message.tool_calls:
                return message.content
            messages.append(message)
            for call in message.tool_calls:
                name, arguments = call.function.name, call.function.arguments
                calls.append([name, json.loads(arguments)])
                result = run_tool(name, arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def run_responses_agent(url: str, is_streamed: bool, calls: list[Any]) -> str | None:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    fields: Any = {
        "model": "m",
        "instructions": SYSTEM,
        "store": False,
        "tools": [{"type": "function", **each} for each in FUNCTIONS],
    }
    async with openai_client(url) as client:
        while True:
            if is_streamed:
                async with client.responses.stream(input=items, **fields) as stream:
                    response: Any = await stream.get_final_response()
            else:
                response = await client.responses.create(input=items, **fields)
            found = [item for item in response.output if item.type == "function_call"]
            if not found:
                return response.output_text
            items += response.output
            for call in found:
                calls.append([call.name, json.loads(call.arguments)])
                output = run_tool(call.name, call.arguments)
                items.append(
                    {"type": "function_call_output", "call_id": call.call_id, "output": output}
                )


async def run_messages_agent(url: str, is_streamed: bool, calls: list[Any]) -> str | None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    fields: Any = {
        "model": "m",
        "max_tokens": 200,
        "system": SYSTEM,
        "tools": [{"name": each["name"], "input_schema": each["parameters"]} for each in FUNCTIONS],
    }
    client = anthropic.AsyncAnthropic(
        base_url=url, api_key="unused", max_retries=0, timeout=DEADLINE_S
    )
    async with client:
        while True:
            if is_streamed:
                async with client.messages.stream(messages=messages, **fields) as stream:
                    message: Any = await stream.get_final_message()
            else:
                message = await client.messages.create(messages=messages, **fields)
            found = [block for block in message.content if block.type == "tool_use"]
            if not found:
                return "".join(block.text for block in message.content)
            messages.append({"role": "assistant", "content": message.content})
            results = []
            for call in found:
                calls.append([call.name, call.input])
                text = run_tool(call.name, json.dumps(call.input))
                results.append({"type": "tool_result", "tool_use_id": call.id, "content": text})
            messages.append({"role": "user", "content": results})


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("run", [run_chat_agent, run_responses_agent, run_messages_agent])
async def test_an_agent_runs_five_turns(clients: ClientRig, run: Agent, is_streamed: bool) -> None:
    clients.use(SCRIPT)
    calls: list[Any] = []
    check_agent(clients, await run(clients.url, is_streamed, calls), calls)
