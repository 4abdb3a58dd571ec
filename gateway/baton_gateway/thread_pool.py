"""A thread pool for work whose time grows with the size of a request.

The event loop serves all streams of the gateway. Work that one large request can make long must
therefore run in a thread. Short work runs inline, because a thread costs more than it saves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

#: Work on a body or text of at most this many bytes runs inline.
INLINE_BYTES = 8192
#: Pure Python work shares the interpreter with the event loop. More threads would slow all streams.
NUM_THREADS = 4

_Result = TypeVar("_Result")

_threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")


async def run_off_loop(
    work: Callable[[], _Result], size: int, inline: int = INLINE_BYTES
) -> _Result:
    """Run `work` in a thread, or inline if `size` is at most `inline`. Return the result.

    If the call is cancelled before a thread has started `work`, then `work` never runs.
    """
    if size <= inline:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_threads, work)
