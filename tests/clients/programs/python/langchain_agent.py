"""An agent with LangChain, which calls tools until it has the answer.

python langchain_agent.py URL (chat | responses) (whole | streamed)
"""

from __future__ import annotations

import json
import sys
from functools import reduce
from operator import add as join
from typing import Any

import weather_tools
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

url, api, how = sys.argv[1:]


@tool
def get_weather(city: str) -> str:
    """The temperature of a city in degrees."""
    return weather_tools.get_weather(city)


@tool
def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return weather_tools.add(a, b)


model = ChatOpenAI(
    base_url=f"{url}/v1", api_key="unused", model="m", use_responses_api=api == "responses"
).bind_tools([get_weather, add])


def answer_to(messages: list[Any]) -> AIMessage:
    return reduce(join, model.stream(messages)) if how == "streamed" else model.invoke(messages)


messages: list[Any] = [SystemMessage(weather_tools.SYSTEM), HumanMessage(weather_tools.QUESTION)]
calls = []
while True:
    answer = answer_to(messages)
    messages.append(answer)
    if not answer.tool_calls:
        break
    for call in answer.tool_calls:
        calls.append([call["name"], call["args"]])
        messages.append({"get_weather": get_weather, "add": add}[call["name"]].invoke(call))
print(json.dumps({"answer": answer.text, "calls": calls}))
