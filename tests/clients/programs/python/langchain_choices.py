"""The text and the calls of LangChain's answers, for each choice of tools.

python langchain_choices.py URL (chat | responses) (whole | streamed)
"""

from __future__ import annotations

import json
import sys
from functools import reduce
from operator import add as join
from typing import Any

from langchain_openai import ChatOpenAI
from weather_tools import TOOLS

url, api, how = sys.argv[1:]
model = ChatOpenAI(
    base_url=f"{url}/v1", api_key="unused", model="m", use_responses_api=api == "responses"
)
choices: dict[str, dict[str, Any]] = {
    "auto": {"tool_choice": "auto"},
    "parallel": {"tool_choice": "auto"},
    "alone": {"tool_choice": "auto", "parallel_tool_calls": False},
    "required": {"tool_choice": "any"},
    "named": {"tool_choice": "add"},
    "none": {"tool_choice": "none"},
    "single": {"tool_choice": "any", "parallel_tool_calls": False},
}
read = {}
for word, options in choices.items():
    bound = model.bind_tools(TOOLS, **options)
    prompt = f"The choice is {word}."
    answer = reduce(join, bound.stream(prompt)) if how == "streamed" else bound.invoke(prompt)
    read[word] = {"content": answer.text, "calls": [call["name"] for call in answer.tool_calls]}
print(json.dumps(read))
