"""Which tools LiteLLM's answers call, for each tool_choice.

python litellm_choices.py URL MODEL
"""

from __future__ import annotations

import json
import sys

import litellm
from weather_tools import TOOLS

url, model = sys.argv[1:]
base = url if model.startswith("anthropic/") else f"{url}/v1"
CHOICES = {
    "auto": {"tool_choice": "auto"},
    "required": {"tool_choice": "required"},
    "named": {"tool_choice": {"type": "function", "function": {"name": "add"}}},
    "none": {"tool_choice": "none"},
    "single": {"tool_choice": "required", "parallel_tool_calls": False},
}
answers = {}
for word, options in CHOICES.items():
    response = litellm.completion(
        model=model,
        api_base=base,
        api_key="unused",
        messages=[{"role": "user", "content": f"The choice is {word}."}],
        tools=TOOLS,
        **options,
    )
    message = response.choices[0].message
    calls = [call.function.name for call in message.tool_calls or []]
    answers[word] = {"content": message.content or "", "calls": calls}
print(json.dumps(answers))
