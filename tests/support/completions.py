"""Token ids of completions, through the gateway or an engine client.

For the integration, chaos, fuzz and image tests, and for a benchmark.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import openai

from baton_protocol.engine_client.engine_client import EngineClient
from baton_protocol.engine_messages import EngineCoreRequest
from baton_protocol.options.config import ENGINE_PORT
from baton_protocol.sampling_params import SamplingParams
from baton_protocol.service_key import ServiceKey
from support.pods import Pod

VOCAB = 500  # every test checkpoint has the ids below it


async def complete(
    url: str, prompt: list[int] | str, max_tokens: int = 48, **extra: object
) -> list[int]:
    """Return the token ids of a completion. Sampling is greedy unless `extra` changes it."""
    [token_ids] = await complete_samples(url, prompt, 1, max_tokens, **extra)
    return token_ids


async def complete_samples(
    url: str,
    prompt: list[int] | str,
    n: int,
    max_tokens: int = 48,
    grammar: str | None = None,
    **extra: object,
) -> list[list[int]]:
    """Return the token ids of `n` samples. Sampling is greedy unless `extra` changes it."""
    async with openai.AsyncOpenAI(
        base_url=url, api_key="unused", max_retries=0, timeout=120.0
    ) as client:
        body = {"temperature": 0, **extra}
        extra_body: dict[str, object] = {"ignore_eos": True, "return_token_ids": True}
        if grammar is not None:
            extra_body["structured_outputs"] = {"grammar": grammar}
        answer = await client.completions.create(
            model="m", prompt=prompt, n=n, max_tokens=max_tokens, extra_body=extra_body, **body
        )
        assert [choice.index for choice in answer.choices] == list(range(n))
        return [choice.model_extra["token_ids"] for choice in answer.choices]


@contextlib.asynccontextmanager
async def engine_client(
    pod: Pod, service_key: ServiceKey | None = None
) -> AsyncIterator[EngineClient]:
    """Yield a client of the pod's engine, which is ready."""
    async with EngineClient(
        pod.address, ENGINE_PORT, client_id="test", service_key=service_key
    ) as client:
        await client.connect(60)
        await client.wait_ready(60)
        yield client


async def check_continuations(
    client: EngineClient,
    prompt: list[int],
    params: SamplingParams,
    whole: list[int],
    cuts: tuple[int, ...],
) -> None:
    """Check that an engine that continues after each of `cuts` tokens generates `whole`."""
    for cut in cuts:
        rest = EngineCoreRequest(f"rest-{cut}", prompt, params, generated_token_ids=whole[:cut])
        assert await generate(client, rest) == whole


async def generate(client: EngineClient, request: EngineCoreRequest) -> list[int]:
    tokens = list(request.generated_token_ids)
    async for output in client.add(request):
        assert not output.error, output.error
        assert output.token_offset == len(tokens)
        tokens += output.new_token_ids
    return tokens
