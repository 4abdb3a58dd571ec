"""Agents of other clients run five turns, and each turn sends the whole conversation."""

from __future__ import annotations

from typing import Any

import pytest

from support.clients.client_rig import ClientRig
from support.clients.weather_agent import REASONING, SCRIPT, check_agent


async def check(clients: ClientRig, program: str, *arguments: str) -> dict[str, Any]:
    """Run an agent and check its answer and calls. Return the rest of its output."""
    printed: dict[str, Any] = await clients.run(program, *arguments, script=SCRIPT)
    check_agent(clients, printed.pop("answer"), printed.pop("calls"))
    return printed


@pytest.mark.parametrize("how", ["whole", "streamed"])
@pytest.mark.parametrize("model", ["openai/m", "hosted_vllm/m", "anthropic/m"])
async def test_litellm(clients: ClientRig, model: str, how: str) -> None:
    await check(clients, "litellm_agent.py", model, how)


@pytest.mark.parametrize("how", ["whole", "streamed"])
async def test_litellm_with_responses(clients: ClientRig, how: str) -> None:
    await check(clients, "litellm_responses_agent.py", "openai/m", how)


@pytest.mark.parametrize("how", ["whole", "streamed"])
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_langchain(clients: ClientRig, api: str, how: str) -> None:
    await check(clients, "langchain_agent.py", api, how)


@pytest.mark.parametrize("how", ["whole", "streamed", "run_tools", "run_tools_streamed"])
async def test_openai_on_node(clients: ClientRig, how: str) -> None:
    await check(clients, "openai_agent.mjs", how)


@pytest.mark.parametrize("where", ["stored", "sent"])
@pytest.mark.parametrize("how", ["whole", "streamed"])
async def test_openai_on_node_with_responses(clients: ClientRig, how: str, where: str) -> None:
    await check(clients, "openai_responses_agent.mjs", how, where)


@pytest.mark.parametrize("how", ["whole", "streamed"])
@pytest.mark.parametrize("api", ["compatible", "chat", "responses", "messages"])
async def test_the_ai_sdk(clients: ClientRig, api: str, how: str) -> None:
    printed = await check(clients, "ai_agent.mjs", api, how)
    assert printed["reasoning"] == (REASONING if api == "compatible" else "")
