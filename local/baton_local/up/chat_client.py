"""Send requests to a chat endpoint."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp


@dataclass(frozen=True)
class ChatAnswer:
    """A chat answer and its timing."""

    text: str
    #: Seconds from the request to the first text.
    ttft_s: float
    #: Number of generated tokens.
    tokens: int
    #: Tokens per second after the first token.
    tokens_per_s: float


class AskError(Exception):
    """Raised when an endpoint refuses the request or does not send a complete answer."""


async def ask(
    endpoint: str,
    model: str,
    prompt: str,
    *,
    max_tokens: int,
    on_text: Callable[[str], None],
    timeout_s: float,
) -> ChatAnswer:
    """Send `prompt` to a chat endpoint, and pass each piece of the answer's text to `on_text`.

    Raises:
        AskError: the endpoint refused the request or did not respond in time, or the stream was
            cut off.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
    }
    pieces: list[str] = []
    tokens = 0
    started = time.perf_counter()
    first = 0.0
    async with _chat(endpoint, body, timeout_s) as response:
        async for chunk in _chunks(response):
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
            for choice in chunk.get("choices", []):
                text = choice["delta"].get("content") or ""
                if text:
                    first = first or time.perf_counter()
                    pieces.append(text)
                    on_text(text)
    if not tokens:
        raise AskError("the stream ended without usage: the answer is incomplete")
    ended = time.perf_counter()
    first = first or ended
    rate = (tokens - 1) / (ended - first) if tokens > 1 and ended > first else 0.0
    return ChatAnswer("".join(pieces), first - started, tokens, rate)


async def ask_message(endpoint: str, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """Send `body` as a chat completion request, and return the assistant's message.

    Raises:
        AskError: the endpoint refused the request, or did not respond in time.
    """
    async with _chat(endpoint, body, timeout_s) as response:
        message: dict[str, Any] = (await response.json())["choices"][0]["message"]
        return message


@asynccontextmanager
async def _chat(
    endpoint: str, body: dict[str, Any], timeout_s: float
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Send `body` as a chat completion request, and yield the response.

    Raises:
        AskError: the endpoint refused the request, or did not respond in time.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{endpoint}/v1/chat/completions", json=body) as response,
        ):
            if response.status != 200:
                raise AskError(f"HTTP {response.status}: {(await response.text()).strip()}")
            yield response
    except (aiohttp.ClientError, TimeoutError) as error:
        raise AskError(f"{endpoint}: {str(error) or type(error).__name__}") from None


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON chunks of a streamed response.

    Raises:
        AskError: the stream contains an error.
    """
    async for line in response.content:
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        chunk = json.loads(line[len(b"data: ") :])
        if "error" in chunk:
            raise AskError(chunk["error"].get("message", str(chunk["error"])))
        yield chunk
