"""Loads that run during a test and must succeed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import torch

from support.streams import Load, Stream
from support.token_rule import assert_right_tokens


@asynccontextmanager
async def under_load(
    url: str,
    model: torch.nn.Module,
    *,
    width: int,
    vocab_size: int,
    tails: Callable[[], str] = lambda: "",
    excused: Callable[[Stream], bool] = lambda _: False,
) -> AsyncIterator[Load]:
    """Run streams during the block. All of them must be right.

    Args:
        url: URL of the gateway.
        model: the reference model.
        tails: returns the ends of logs, for the message of a failure.
        excused: returns whether a stream may fail. Its tokens until then must be right.
    """
    load = Load(url, width=width, vocab_size=vocab_size)
    running = asyncio.create_task(load.run())
    try:
        yield load
    finally:
        load.stop()
        await asyncio.wait_for(running, timeout=300)
    print(f"{len(load.streams)} streams, longest gap {load.longest_gap_s:.2f} s")
    failed = [(stream.number, stream.error) for stream in load.failed if not excused(stream)]
    assert not failed, (
        f"{len(failed)} of {len(load.streams)} streams failed: {failed[:5]}\n{tails()}"
    )
    short = [
        (stream.number, len(stream.token_ids))
        for stream in load.streams
        if stream.finished and _is_short(stream)
    ]
    assert not short, f"{len(short)} of {len(load.streams)} streams ended early: {short[:5]}"
    assert_right_tokens(
        model, [stream for stream in load.streams if stream.token_ids], "under load"
    )


def _is_short(stream: Stream) -> bool:
    """Return whether a stream ended before its length."""
    return len(stream.token_ids) != stream.max_tokens


@dataclass
class ShortRequest:
    """One request of `fresh_connections`."""

    #: Start, in `time.monotonic()`.
    began: float
    #: Empty if it was answered.
    error: str = ""


@asynccontextmanager
async def fresh_connections(
    url: str, *, excused: Callable[[ShortRequest], bool] = lambda _: False
) -> AsyncIterator[list[ShortRequest]]:
    """Send short requests during the block, each over a new connection. None may fail.

    Args:
        url: URL of the gateway.
        excused: returns whether a request may fail.
    """
    stopping = asyncio.Event()
    asked: list[ShortRequest] = []

    async def ask() -> str:
        body = {"model": "m", "prompt": "on and on", "max_tokens": 4}
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session,
                session.post(f"{url}/v1/completions", json=body) as response,
            ):
                return (
                    "" if response.status == 200 else f"{response.status} {await response.text()}"
                )
        except (aiohttp.ClientError, TimeoutError) as error:
            return repr(error)

    async def keep_asking() -> None:
        while not stopping.is_set():
            asked.append(ShortRequest(time.monotonic()))
            asked[-1].error = await ask()

    asking = asyncio.create_task(keep_asking())
    try:
        yield asked
    finally:
        stopping.set()
        await asking
    failed = [request.error for request in asked if request.error and not excused(request)]
    assert asked
    assert not failed, f"{len(failed)} of {len(asked)} short requests failed: {failed[:5]}"
