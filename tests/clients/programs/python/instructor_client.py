"""Clients of Instructor."""

from __future__ import annotations

import anthropic
import instructor
import openai


def create_client(url: str, api: str, mode: str) -> instructor.Instructor:
    """Return a client of /v1/messages, or of the API of OpenAI that `mode` uses.

    Args:
        url: URL of the gateway.
        api: openai or messages.
        mode: name in `instructor.Mode`.
    """
    if api == "openai":
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused")
        return instructor.from_openai(client, mode=instructor.Mode[mode])
    return instructor.from_anthropic(
        anthropic.Anthropic(base_url=url, api_key="unused"),
        mode=instructor.Mode[mode],
        max_tokens=200,
    )
