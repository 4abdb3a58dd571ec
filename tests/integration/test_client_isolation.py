"""A client with an API key probes real engines for the prompts of another client."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from baton_protocol.options.config import (
    ENGINE_HTTP_PORT,
    GATEWAY_PORT,
    AccessConfig,
    CacheConfig,
    KVRole,
)
from support.completions import VOCAB
from support.pods import Pod, pods

CLIENTS = ("team-a", "team-b")
BLOCK_SIZE = 16
PROMPT_TOKENS = 100
#: Tokens of a prompt's full blocks.
CACHED_TOKENS = PROMPT_TOKENS // BLOCK_SIZE * BLOCK_SIZE
NUM_BLOCKS = 32
SHARED = "system-prompt"


@dataclass
class Stack:
    """A prefill engine, a decode engine, and a gateway for each value of `cache_sharing`."""

    engines: list[Pod]
    gateways: dict[str, Pod]


@pytest.fixture(scope="module")
def stack(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("clients")
    keys = folder / "keys"
    keys.mkdir()
    for client in CLIENTS:
        (keys / client).write_text(f"the-secret-key-of-{client}")
    key_file = folder / "service-key"
    key_file.write_text("5e" * 32)
    with pods(folder, 39) as group:
        cache = CacheConfig(num_blocks=NUM_BLOCKS, offload_memory_bytes=16 * 2**20)
        engines = {
            group.engine(
                role, checkpoints["qwen3"], kv_role, cache=cache, service_key_file=str(key_file)
            ): role
            for role, kv_role in (("prefill", KVRole.PRODUCER), ("decode", KVRole.CONSUMER))
        }
        gateways = {
            sharing: group.gateway(
                f"gateway-{sharing}",
                checkpoints["qwen3"],
                engines,
                service_key_file=str(key_file),
                access=AccessConfig(
                    api_keys_dir=str(keys), cache_sharing=sharing, shared_cache_salts=(SHARED,)
                ),
            )
            for sharing in ("key", "service")
        }
        for engine in engines:
            engine.wait_ready(ENGINE_HTTP_PORT)
        for gateway in gateways.values():
            gateway.wait_ready(GATEWAY_PORT)
        yield Stack(list(engines), gateways)


def new_prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(PROMPT_TOKENS)]


async def cached_tokens(gateway: Pod, client: str, prompt: list[int], salt: str = "") -> int:
    """Send `prompt` as `client`, and return the cached tokens that the response reports."""
    async with openai.AsyncOpenAI(
        base_url=f"http://{gateway.address}:{GATEWAY_PORT}/v1",
        api_key=f"the-secret-key-of-{client}",
        max_retries=0,
        timeout=120.0,
    ) as api:
        answer = await api.completions.create(
            model="m", prompt=prompt, max_tokens=2, extra_body={"cache_salt": salt or None}
        )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


async def probe(gateway: Pod, seed: int, salt: str = "") -> tuple[int, int]:
    """Let A send a prompt of 100 tokens, then B, then A again.

    Returns:
        The cached tokens in the response to B, and in the second response to A.
    """
    prompt = new_prompt(seed)
    assert await cached_tokens(gateway, "team-a", prompt, salt) == 0
    of_b = await cached_tokens(gateway, "team-b", prompt, salt)
    return of_b, await cached_tokens(gateway, "team-a", prompt, salt)


async def test_no_prompt_of_another_client_is_cached_for_a_client(stack: Stack) -> None:
    assert await probe(stack.gateways["key"], seed=1) == (0, CACHED_TOKENS)
    assert await probe(stack.gateways["key"], seed=2, salt="chosen") == (0, CACHED_TOKENS)


async def test_clients_share_the_cache_of_a_declared_salt(stack: Stack) -> None:
    assert await probe(stack.gateways["key"], seed=3, salt=SHARED) == (CACHED_TOKENS, CACHED_TOKENS)


async def test_clients_share_the_cache_of_the_service_if_it_is_configured(
    stack: Stack,
) -> None:
    assert await probe(stack.gateways["service"], seed=4) == (CACHED_TOKENS, CACHED_TOKENS)


async def test_prompts_in_host_memory_are_isolated(stack: Stack) -> None:
    """Both engines have moved A's prompt from the prefix cache to the offload tier."""

    def restored() -> float:
        name = "baton:offload_blocks_restored_total"
        return sum(engine.metric(name) for engine in stack.engines)

    gateway, prompt = stack.gateways["key"], new_prompt(5)
    await cached_tokens(gateway, "team-a", prompt)
    for seed in range(100, 100 + NUM_BLOCKS * BLOCK_SIZE // CACHED_TOKENS + 1):
        await cached_tokens(gateway, "team-a", new_prompt(seed))
    before = restored()
    assert await cached_tokens(gateway, "team-b", prompt) == 0
    assert restored() == before
    assert await cached_tokens(gateway, "team-a", prompt) == CACHED_TOKENS
    assert restored() > before
