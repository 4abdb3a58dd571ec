"""Load that runs during the body of a test, and checks of all its responses."""

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
    """Run streams during the block, and check the tokens of all of them after it.

    Args:
        url: the gateway's.
        model: the reference.
        tails: returns the ends of logs for the message of a failure.
        excused: whether a stream was expected to fail. Its tokens are checked nevertheless.
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
        if stream.finished and len(stream.token_ids) != stream.max_tokens
    ]
    assert not short, f"{len(short)} of {len(load.streams)} streams ended early: {short[:5]}"
    assert_right_tokens(
        model, [stream for stream in load.streams if stream.token_ids], "under load"
    )


@dataclass
class ShortRequest:
    """One request of `fresh_connections`."""

    began: float  # time.monotonic()
    error: str = ""  # empty: it was answered


@asynccontextmanager
async def fresh_connections(
    url: str, *, excused: Callable[[ShortRequest], bool] = lambda _: False
) -> AsyncIterator[list[ShortRequest]]:
    """Send short requests during the block, each over a new connection. None may fail.

    Args:
        url: the gateway's.
        excused: whether a request was expected to fail.
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
