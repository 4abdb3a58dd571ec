"""The text and the calls of LiteLLM's answers, for each choice of tools.

python litellm_choices.py URL MODEL (chat | responses) (whole | streamed)
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm
from weather_tools import TOOLS

url, model, api, how = sys.argv[1:]
base = url if model.startswith("anthropic/") else f"{url}/v1"
common: dict[str, Any] = {
    "model": model,
    "api_base": base,
    "api_key": "unused",
    "stream": how == "streamed",
}


def ask_chat(prompt: str, options: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    response = litellm.completion(messages=messages, tools=TOOLS, **common, **options)
    if how == "streamed":
        response = litellm.stream_chunk_builder(list(response))
    message = response.choices[0].message
    calls = [call.function.name for call in message.tool_calls or []]
    return {"content": message.content or "", "calls": calls}


def ask_responses(prompt: str, options: dict[str, Any]) -> dict[str, Any]:
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    response = litellm.responses(input=prompt, tools=tools, **common, **options)
    if how == "streamed":
        *_, last = response
        response = last.response
    calls = [item.name for item in response.output if item.type == "function_call"]
    return {"content": response.output_text, "calls": calls}


name = {"name": "add"}
choices: dict[str, dict[str, Any]] = {
    "auto": {"tool_choice": "auto"},
    "parallel": {"tool_choice": "auto"},
    "alone": {"tool_choice": "auto", "parallel_tool_calls": False},
    "required": {"tool_choice": "required"},
    "named": {
        "tool_choice": {"type": "function", **({"function": name} if api == "chat" else name)}
    },
    "none": {"tool_choice": "none"},
    "single": {"tool_choice": "required", "parallel_tool_calls": False},
}
ask = {"chat": ask_chat, "responses": ask_responses}[api]
print(json.dumps({word: ask(f"The choice is {word}.", each) for word, each in choices.items()}))
