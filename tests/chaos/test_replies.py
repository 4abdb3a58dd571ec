"""The decode engine of a stream is killed at every tenth token of a tool call or of reasoning."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from baton_engine.random_checkpoint import create_checkpoint
from baton_protocol.options.config import ENGINE_HTTP_PORT, GATEWAY_METRICS_PORT, GATEWAY_PORT
from support.pods import Pod, pods
from support.waiting import until

pytestmark = pytest.mark.chaos

#: Prompts end inside the reasoning.
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}<think>"
CITY = {"type": "string", "minLength": 20, "maxLength": 30}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": CITY, "days": {"type": "array", "items": CITY, "maxItems": 2}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
#: Kind of answer -> options of the request.
OPTIONS: dict[str, dict[str, Any]] = {
    "tool call": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    "reasoning": {},
}
MAX_TOKENS = 200
EVERY = 10


@dataclass
class Service:
    engines: tuple[Pod, Pod]
    #: Kind of answer -> gateway.
    gateways: dict[str, Pod]

    async def chunks(self, kind: str) -> AsyncIterator[Any]:
        """Yield the choices of a stream."""
        url = f"http://{self.gateways[kind].address}:{GATEWAY_PORT}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=MAX_TOKENS,
                seed=3,
                stream=True,
                extra_body={"return_token_ids": True},
                **OPTIONS[kind],
            )
            async for chunk in stream:
                for choice in chunk.choices:
                    yield choice

    def serving(self) -> Pod:
        """Return the engine that runs the request."""
        [pod] = [pod for pod in self.engines if pod.metric("baton:num_requests_running")]
        return pod

    def num_ready(self, kind: str) -> float:
        _, body = self.gateways[kind].get(GATEWAY_METRICS_PORT, "/metrics")
        [line] = [
            line
            for line in body.splitlines()
            if line.startswith("baton:engines_ready{") and 'role="decode"' in line
        ]
        return float(line.split()[-1])


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("replies")
    # A token takes some milliseconds, so a kill comes in the middle of an answer.
    checkpoint = create_checkpoint(
        folder / "model", "llama", seed=5, hidden_size=768, intermediate_size=2048, num_layers=8
    )
    config = checkpoint / "tokenizer_config.json"
    fields = json.loads(config.read_text()) | {"chat_template": TEMPLATE}
    config.write_text(json.dumps(fields))
    with pods(folder, 32) as group:
        engines = group.engine("d0", checkpoint), group.engine("d1", checkpoint)
        roles = dict.fromkeys(engines, "decode")
        gateways = {
            kind: group.gateway(f"gateway-{parser}", checkpoint, roles, reasoning_parser=parser)
            for kind, parser in (("tool call", "none"), ("reasoning", "think"))
        }
        for pod in engines:
            pod.wait_ready(ENGINE_HTTP_PORT)
        for pod in gateways.values():
            pod.wait_ready(GATEWAY_PORT)
        yield Service(engines, gateways)


def text_of(kind: str, choice: Any) -> str:
    """Return the arguments or the reasoning in a choice of a chunk."""
    assert not choice.delta.content
    if kind == "reasoning":
        return getattr(choice.delta, "reasoning_content", "")
    return "".join(call.function.arguments or "" for call in choice.delta.tool_calls or [])


@pytest.mark.parametrize("kind", OPTIONS)
async def test_a_killed_engine_changes_no_answer(service: Service, kind: str) -> None:
    expected = ""
    num_tokens = 0
    async for choice in service.chunks(kind):
        expected += text_of(kind, choice)
        num_tokens += len(choice.model_extra.get("token_ids") or ())
    if kind == "tool call":
        assert json.loads(expected)["city"]
    assert num_tokens > 5 * EVERY
    kills = range(EVERY, num_tokens - EVERY, EVERY)
    for kill_at in kills:
        await until(lambda: service.num_ready(kind) == 2, "both engines at the gateway")
        text, num_seen, finish_reason = "", 0, None
        victim: Pod | None = None
        async for choice in service.chunks(kind):
            text += text_of(kind, choice)
            num_seen += len(choice.model_extra.get("token_ids") or ())
            finish_reason = choice.finish_reason or finish_reason
            victim = victim or service.serving()
            if victim.process.poll() is None and num_seen >= kill_at:
                victim.kill()
        assert victim is not None
        victim.restart()
        assert (text, num_seen) == (expected, num_tokens), f"killed at token {kill_at}"
        assert finish_reason == ("tool_calls" if kind == "tool call" else "length")
        victim.wait_ready(ENGINE_HTTP_PORT)
    resumed = service.gateways[kind].metric("baton:requests_resumed_total", GATEWAY_METRICS_PORT)
    assert resumed == len(kills), "an answer ended before its engine was killed"
