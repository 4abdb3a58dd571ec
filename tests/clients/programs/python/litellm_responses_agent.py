"""An agent with LiteLLM's responses API, which continues the stored conversation.

python litellm_responses_agent.py URL MODEL (whole | streamed)
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm
from weather_tools import QUESTION, SYSTEM, TOOLS, run_tool

url, model, how = sys.argv[1:]
tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
given: Any = QUESTION
previous = None
calls = []
while True:
    response = litellm.responses(
        model=model,
        api_base=f"{url}/v1",
        api_key="unused",
        instructions=SYSTEM,
        input=given,
        tools=tools,
        previous_response_id=previous,
        stream=how == "streamed",
    )
    if how == "streamed":
        *_, last = response
        response = last.response
    previous, given = response.id, []
    for item in response.output:
        if item.type == "function_call":
            calls.append([item.name, json.loads(item.arguments)])
            result = run_tool(item.name, item.arguments)
            given.append(
                {"type": "function_call_output", "call_id": item.call_id, "output": result}
            )
    if not given:
        break
print(json.dumps({"answer": response.output_text, "calls": calls}))
