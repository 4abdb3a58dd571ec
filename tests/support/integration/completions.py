"""Token ids of completions, through the gateway or an engine client."""

from __future__ import annotations

import openai

from baton_protocol.client import EngineClient
from baton_protocol.messages import EngineCoreRequest

VOCAB = 500  # every test checkpoint has the ids below it


async def complete(
    url: str, prompt: list[int] | str, max_tokens: int = 48, **extra: object
) -> list[int]:
    """Return the token ids of a completion. Sampling is greedy unless `extra` changes it."""
    async with openai.AsyncOpenAI(
        base_url=url, api_key="unused", max_retries=0, timeout=120.0
    ) as client:
        body = {"temperature": 0, **extra}
        extra_body = {"ignore_eos": True, "return_token_ids": True}
        answer = await client.completions.create(
            model="m", prompt=prompt, max_tokens=max_tokens, extra_body=extra_body, **body
        )
        return answer.choices[0].model_extra["token_ids"]


async def generate(client: EngineClient, request: EngineCoreRequest) -> list[int]:
    tokens = list(request.generated_token_ids)
    async for output in client.add(request):
        assert not output.error, output.error
        assert output.token_offset == len(tokens)
        tokens += output.new_token_ids
    return tokens
