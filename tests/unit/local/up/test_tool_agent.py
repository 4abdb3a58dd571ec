"""The agent of `baton up --agent`: its requests, the tools that it runs, and its lines."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from baton_local.service_status import PodStatus, ServiceStatus
from baton_local.up.chat_client import AskError
from baton_local.up.tool_agent import MAX_TURNS, Tool, ready_pods_tool, run_agent
from support.http_server import serving


async def double(number: int) -> str:
    if number < 0:
        raise ValueError("number must be positive")
    return str(2 * number)


DOUBLE = Tool("double", "Double a number.", {"number": {"type": "integer"}}, double)


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "double", "arguments": arguments}
    call = {"id": "call-1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


class Model:
    """A chat endpoint with a list of replies. The last one is repeated."""

    def __init__(self, *replies: dict[str, Any]) -> None:
        self.replies = list(replies)
        self.requests: list[dict[str, Any]] = []
        self.lines: list[str] = []

    async def respond(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return web.json_response({"choices": [{"message": reply}]})

    async def run(self) -> str | None:
        async with serving(web.post("/v1/chat/completions", self.respond)) as port:
            return await run_agent(
                f"http://127.0.0.1:{port}",
                "m",
                "Double 4",
                [DOUBLE],
                max_tokens=9,
                timeout_s=10,
                print_line=self.lines.append,
            )


async def test_a_call_is_run_and_its_result_goes_back_to_the_model() -> None:
    answer = {"role": "assistant", "content": "It is 8."}
    model = Model(call('{"number": 4}'), answer)
    assert await model.run() == "It is 8."
    assert model.lines == ['call    double({"number": 4})', "result  8", "answer  It is 8."]
    first, second = model.requests
    assert first["messages"] == [{"role": "user", "content": "Double 4"}]
    assert first["tools"] == second["tools"] == [DOUBLE.schema()]
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("m", 9, 0)
    assert second["messages"] == [
        *first["messages"],
        call('{"number": 4}'),
        {"role": "tool", "tool_call_id": "call-1", "content": "8"},
    ]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ('{"number": -1}', "number must be positive"),
        ('{"digit": 1}', "unexpected keyword argument 'digit'"),
        ("{", "Expecting property name"),
    ],
)
async def test_the_model_gets_the_error_of_a_wrong_call(arguments, error) -> None:
    model = Model(call(arguments), {"role": "assistant", "content": "Sorry."})
    assert await model.run() == "Sorry."
    result = model.requests[1]["messages"][-1]["content"]
    assert result.startswith("error: ")
    assert error in result


async def test_a_model_that_only_calls_tools_gets_no_further_request() -> None:
    model = Model(call('{"number": 4}'))
    assert await model.run() is None
    assert len(model.requests) == MAX_TURNS
    assert model.lines[-1].startswith(f"no answer after {MAX_TURNS} requests")


async def test_a_refused_request_is_an_error_with_the_message_of_the_endpoint() -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=400, text="tools are too long")

    async with serving(web.post("/v1/chat/completions", refuse)) as port:
        with pytest.raises(AskError, match="HTTP 400: tools are too long"):
            await run_agent(
                f"http://127.0.0.1:{port}", "m", "hi", [DOUBLE], max_tokens=9, timeout_s=10,
                print_line=lambda _: None,
            )  # fmt: skip


async def test_ready_pods_counts_the_ready_pods_of_a_role() -> None:
    pods = [
        PodStatus("demo-decode-0", "decode", "127.77.0.2", "Running", True, 0, ""),
        PodStatus("demo-decode-1", "decode", "127.77.0.3", "Running", False, 0, ""),
        PodStatus("demo-gateway", "gateway", "127.77.0.4", "Running", True, 0, ""),
    ]
    status = ServiceStatus("demo", "default", "http://x", "demo", [], pods, "", "/k")

    class Api:
        async def service(self, namespace: str, name: str) -> ServiceStatus:
            assert (namespace, name) == ("default", "demo")
            return status

    api: Any = Api()
    tool = ready_pods_tool(api, status)
    assert [await tool.run(role) for role in ("decode", "prefill", "gateway")] == ["1", "0", "1"]
    with pytest.raises(ValueError, match="got operator"):
        await tool.run("operator")
