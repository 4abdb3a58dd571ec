"""A load that runs beside what a test does, and must come out right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import torch

from support.streams import Load
from support.token_rule import assert_right_tokens


@asynccontextmanager
async def under_load(
    url: str, model: torch.nn.Module, *, width: int, vocab_size: int, tails: Callable[[], str] = lambda: ""
) -> AsyncIterator[Load]:
    """Streams run within; then they end, and all of them must be right.

    Args:
        url: of the gateway.
        model: the reference.
        tails: ends of logs, for the message if one failed.
    """
    load = Load(url, width=width, vocab_size=vocab_size)
    running = asyncio.create_task(load.run())
    try:
        yield load
    finally:
        load.stop()
        await asyncio.wait_for(running, timeout=300)
    print(f"{len(load.streams)} streams, longest gap {load.longest_gap_s:.2f} s")
    failed = [(stream.number, stream.error) for stream in load.failed]
    assert not failed, f"{len(failed)} of {len(load.streams)} streams failed: {failed[:5]}\n{tails()}"
    assert_right_tokens(model, load.streams, "under load")
