"""Work whose time grows with the size of a request: what is short is done at once, the rest in a few threads.

The event loop serves every stream of the gateway, so nothing that one request can make long may run on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

INLINE_BYTES = 8192
"""Of a body or a text. Shorter ones take less time than the way to a thread and back is worth."""
NUM_THREADS = 4
"""What is pure Python shares the interpreter with the event loop: more of them would slow all streams."""

_Result = TypeVar("_Result")

_threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")


async def offload(work: Callable[[], _Result], size: int, inline: int = INLINE_BYTES) -> _Result:
    """Runs `work` here if its `size` is at most `inline`, else in a thread. Cancelled before it has begun, it never runs."""
    if size <= inline:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_threads, work)
