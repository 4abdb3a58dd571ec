"""An agent with LiteLLM, which calls tools until it has the answer.

python litellm_agent.py URL MODEL (whole | streamed)
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm
from weather_tools import QUESTION, SYSTEM, TOOLS, run_tool

url, model, how = sys.argv[1:]
base = url if model.startswith("anthropic/") else f"{url}/v1"


def complete(messages: list[Any]) -> Any:
    response = litellm.completion(
        model=model,
        api_base=base,
        api_key="unused",
        messages=messages,
        tools=TOOLS,
        tool_choice="auto",
        stream=how == "streamed",
    )
    if how == "streamed":
        response = litellm.stream_chunk_builder(list(response), messages=messages)
    return response


messages: list[Any] = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": QUESTION},
]
calls = []
while True:
    message = complete(messages).choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        name, arguments = call.function.name, call.function.arguments
        calls.append([name, json.loads(arguments)])
        messages.append(
            {
                "role": "tool",
                "tool_call_id": call.id,
                "name": name,
                "content": run_tool(name, arguments),
            }
        )
print(json.dumps({"answer": message.content, "calls": calls}))
