"""A thread pool for work whose time grows with the size of a request.

The event loop serves all streams of the gateway. Work that one large request can make long must
therefore run in a thread. Short work runs inline, because a thread costs more than it saves.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

#: Work on a body or text of at most this many bytes runs on the event loop.
INLINE_BYTES = 8192
#: Number of threads. Python work holds the GIL, so more threads would slow all streams.
NUM_THREADS = 4

#: A chat request with a body of at most this many bytes is small. Its template takes milliseconds.
SMALL_TEMPLATE_BYTES = 2**16
#: Number of threads that wait for the chat template of small requests. One more waits for large
#: requests. Each thread uses one process of the template.
NUM_TEMPLATE_THREADS = 2
#: Time in which a chat template must be rendered, including the wait for a thread. A process of the
#: template has less time, so most of this time is left for the wait.
TEMPLATE_TIMEOUT_S = 60.0

_Result = TypeVar("_Result")

_threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")
_large_thread = ThreadPoolExecutor(1, thread_name_prefix="large-text")
_template_threads = ThreadPoolExecutor(NUM_TEMPLATE_THREADS, thread_name_prefix="template")
_large_template_thread = ThreadPoolExecutor(1, thread_name_prefix="large-template")


async def run_off_loop(
    work: Callable[[], _Result],
    size: int,
    inline: int = INLINE_BYTES,
    large: float = math.inf,
) -> _Result:
    """Run `work` and return its result, without blocking the event loop for long.

    If the call is cancelled before a thread has started `work`, then `work` never runs.

    Args:
        work: the function to run.
        size: size of the work, in any unit.
        inline: work of at most this size runs on the event loop, and larger work in a thread.
        large: work above this size takes much memory, and runs one after the other.
    """
    if size <= inline:
        return work()
    threads = _threads if size <= large else _large_thread
    return await asyncio.get_running_loop().run_in_executor(threads, work)


async def run_template(work: Callable[[], _Result], size: int) -> _Result:
    """Run `work`, which renders a chat template, and return its result.

    A template may take seconds, so it never runs on the event loop, or in a thread that other work
    needs. Small requests do not wait for large ones. If the call is cancelled before a thread has
    started `work`, then `work` never runs.

    Args:
        size: bytes of the request's body.

    Raises:
        TimeoutError: the call takes more than TEMPLATE_TIMEOUT_S.
    """
    threads = _template_threads if size <= SMALL_TEMPLATE_BYTES else _large_template_thread
    async with asyncio.timeout(TEMPLATE_TIMEOUT_S):
        return await asyncio.get_running_loop().run_in_executor(threads, work)
