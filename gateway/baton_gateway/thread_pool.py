"""A thread pool for work whose time grows with the size of a request.

The event loop serves all streams of the gateway. Work that one large request can make long must
therefore run in a thread. Short work runs inline, because a thread costs more than it saves.

Clients take turns in the threads, so many requests of one client delay the requests of others only
a little. Clients are distinguished by their API keys.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

from baton_protocol.process.fair_thread_pool import FairThreadPool

#: Work on a body or text of at most this many bytes runs on the event loop.
INLINE_BYTES = 8192
#: Work on a body or text of at most this many bytes takes milliseconds. It does not wait for larger
#: work.
SMALL_BYTES = 2**16
#: Tokenizing a text takes up to 170 times its bytes of memory. Larger texts are tokenized one after
#: the other.
LARGE_TEXT_BYTES = 2**19
#: Number of threads for small work, and for larger work. Python work holds the GIL, so more threads
#: would slow all streams.
NUM_SMALL_THREADS, NUM_THREADS = 2, 2

#: Number of threads for the chat templates of small requests. One more thread is for the chat
#: templates of large requests. Each thread waits for a process that renders the template.
NUM_TEMPLATE_THREADS = 2
#: Time in which a chat template must be rendered, including the wait for a thread. The rendering
#: itself has a shorter timeout, so most of this time is left for the wait.
TEMPLATE_TIMEOUT_S = 60.0

#: Client of the request that the current task serves. Empty if clients need no API key.
current_client: ContextVar[str] = ContextVar("current_client", default="")

_Result = TypeVar("_Result")

_small_threads = FairThreadPool(NUM_SMALL_THREADS, "small-text")
_threads = FairThreadPool(NUM_THREADS, "text")
_large_text_thread = FairThreadPool(1, "large-text")
_large_response_thread = FairThreadPool(1, "large-response")
_template_threads = FairThreadPool(NUM_TEMPLATE_THREADS, "template")
_large_template_thread = FairThreadPool(1, "large-template")


async def run_off_loop(
    work: Callable[[], _Result], size: int, inline: int = INLINE_BYTES
) -> _Result:
    """Run `work` and return its result, without blocking the event loop for long.

    If the call is cancelled before a thread has started `work`, then `work` is dropped.

    Args:
        work: the function to run.
        size: size of the data that `work` processes, in bytes or tokens.
        inline: work of at most this size runs on the event loop, and larger work in a thread.
    """
    if size <= inline:
        return work()
    return await _run(_small_threads if size <= SMALL_BYTES else _threads, work)


async def run_tokenization(work: Callable[[], _Result], size: int) -> _Result:
    """Run `work`, which tokenizes or detokenizes texts, and return its result.

    The event loop is not blocked for long. Calls with more than LARGE_TEXT_BYTES run one after the
    other, because tokenization takes much memory.

    Args:
        size: total bytes of the texts.
    """
    if size > LARGE_TEXT_BYTES:
        return await _run(_large_text_thread, work)
    return await run_off_loop(work, size)


async def run_encoding(
    work: Callable[[], _Result], size: int, inline: int, large: float = math.inf
) -> _Result:
    """Run `work`, which encodes a part of a response, and return its result.

    The event loop is not blocked for long.

    Args:
        size: number of tokens, log-probabilities or both that `work` encodes; for vectors, their
            number of bytes.
        inline: work of at most this size runs on the event loop, and larger work in a thread.
        large: calls with work above this size run one after the other, because such work takes
            much memory.
    """
    if size <= inline:
        return work()
    return await _run(_threads if size <= large else _large_response_thread, work)


async def run_template(work: Callable[[], _Result], size: int) -> _Result:
    """Run `work`, which renders a chat template, and return its result.

    A template may take seconds, so `work` runs in threads that are used only for templates. Small
    requests do not wait for large ones. If the call is cancelled before a thread has started
    `work`, then `work` is dropped.

    Args:
        size: bytes of the request's body.

    Raises:
        TimeoutError: the call takes more than TEMPLATE_TIMEOUT_S.
    """
    threads = _template_threads if size <= SMALL_BYTES else _large_template_thread
    async with asyncio.timeout(TEMPLATE_TIMEOUT_S):
        return await _run(threads, work)


async def _run(threads: FairThreadPool, work: Callable[[], _Result]) -> _Result:
    return await asyncio.wrap_future(threads.submit(current_client.get(), work))
