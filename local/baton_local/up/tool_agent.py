"""A small agent: it asks a chat endpoint a question and runs the tools that the model calls."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from baton_local.cluster_api import ClusterApi
from baton_local.service_status import ServiceStatus
from baton_local.up.chat_client import ask_message

#: Maximum number of requests that the agent sends for one question.
MAX_TURNS = 4
ROLES = ("prefill", "decode", "gateway")


@dataclass(frozen=True)
class Tool:
    """A function that the model can call.

    Args:
        name: name of the function.
        description: what the function does.
        parameters: JSON schema of each argument. All arguments are required.
        run: returns the result as text, or raises ValueError if the arguments are invalid.
    """

    name: str
    description: str
    parameters: dict[str, dict[str, Any]]
    run: Callable[..., Awaitable[str]]

    def schema(self) -> dict[str, Any]:
        """Return this tool as an entry of the field `tools` of a chat completion request."""
        return tool_entry(self.name, self.description, self.parameters)


def tool_entry(
    name: str, description: str, parameters: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return a function as an entry of the field `tools` of a chat completion request.

    `Tool` describes the arguments.
    """
    schema = {"type": "object", "properties": parameters, "required": list(parameters)}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


def ready_pods_tool(api: ClusterApi, status: ServiceStatus) -> Tool:
    """Return a tool that reads the number of ready pods of a role from the cluster's API server."""

    async def run(role: str) -> str:
        if role not in ROLES:
            raise ValueError(f"role must be one of {', '.join(ROLES)}, got {role}")
        pods = (await api.service(status.namespace, status.service)).pods
        return str(sum(pod.ready for pod in pods if pod.role == role))

    return Tool(
        "ready_pods",
        "Return the number of ready pods of a role.",
        {"role": {"type": "string", "enum": list(ROLES)}},
        run,
    )


async def run_agent(
    endpoint: str,
    model: str,
    question: str,
    tools: Sequence[Tool],
    *,
    max_tokens: int,
    timeout_s: float,
    print_line: Callable[[str], None],
) -> str | None:
    """Send a question to the model, and run the tools that it calls until it answers.

    Each tool call, each result and the answer are passed to `print_line`.

    Args:
        endpoint: URL of the endpoint, without `/v1`.
        model: name of the served model.
        question: text of the user message.
        tools: functions that the model can call.
        max_tokens: maximum number of tokens in one reply of the model.
        timeout_s: timeout of each request, in seconds.
        print_line: called with each line to print.

    Returns:
        The answer. None: the model still called tools after MAX_TURNS requests.

    Raises:
        AskError: the endpoint refused a request or did not respond.
    """
    by_name = {tool.name: tool for tool in tools}
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        message = await ask_message(
            endpoint,
            {
                "model": model,
                "messages": messages,
                "tools": [tool.schema() for tool in tools],
                "max_tokens": max_tokens,
                "temperature": 0,
            },
            timeout_s=timeout_s,
        )
        calls = message.get("tool_calls") or []
        if not calls:
            answer: str = message.get("content") or ""
            print_line(f"answer  {answer}")
            return answer
        messages.append(message)
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            print_line(f"call    {name}({arguments})")
            result = await _run_tool(by_name[name], arguments)
            print_line(f"result  {result}")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    print_line(f"no answer after {MAX_TURNS} requests: the model calls tools again and again")
    return None


async def _run_tool(tool: Tool, arguments: str) -> str:
    """Run `tool`. Return its result, or an error text for the model if an argument is invalid."""
    try:
        return await tool.run(**json.loads(arguments))
    except (TypeError, ValueError) as error:  # wrong names of arguments, or wrong values
        return f"error: {error}"
