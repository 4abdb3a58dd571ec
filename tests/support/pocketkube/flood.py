"""Fill the buffers of a WebSocket whose server does not read.

For the tests of the streams of the API server and the kubelet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from support.waiting import until


@asynccontextmanager
async def flooding(socket: aiohttp.ClientWebSocketResponse) -> AsyncIterator[None]:
    """Send standard input during the block, which begins when the server accepts no more."""
    sent, seen = 0, -1

    async def send() -> None:
        nonlocal sent
        while True:
            await socket.send_bytes(bytes(2**16))
            sent += 1

    def is_stalled() -> bool:
        nonlocal seen
        before, seen = seen, sent
        return before == sent

    task = asyncio.create_task(send())
    try:
        await until(is_stalled, "the server accepts no more", every_s=0.5)
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
