"""Applications that listen on an address."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Awaitable[int]]]:
    """Start an app at an address. Return its port."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(app: web.Application, address: str, **options: Any) -> int:
            runner = web.AppRunner(app, shutdown_timeout=0.1, **options)
            stack.push_async_callback(runner.cleanup)
            await runner.setup()
            await web.TCPSite(runner, address, 0).start()
            return runner.addresses[0][1]

        yield start
