"""The question, the tools and the system prompt of the agents."""

from __future__ import annotations

import json
from typing import Any

SYSTEM = "Use the tools."
QUESTION = "How much warmer is Malmö than Oslo?"
DEGREES = {"Malmö": 14, "Oslo": 10}


def get_weather(city: str) -> str:
    return str(DEGREES[city])


def add(a: int, b: int) -> str:
    return str(a + b)


def run_tool(name: str, arguments: str) -> str:
    """Run a tool. `arguments` is the JSON text of the call."""
    return {"get_weather": get_weather, "add": add}[name](**json.loads(arguments))


def function(name: str, description: str, **properties: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
        "additionalProperties": False,
    }
    body = {"name": name, "description": description, "parameters": schema, "strict": True}
    return {"type": "function", "function": body}


TOOLS = [
    function("get_weather", "The temperature of a city in degrees", city="string"),
    function("add", "The sum of two numbers", a="integer", b="integer"),
]
