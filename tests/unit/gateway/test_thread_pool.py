"""Work that runs in a thread, so that it does not block the event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton_gateway import thread_pool
from baton_gateway.thread_pool import NUM_THREADS, SMALL_BYTES, run_off_loop, run_template
from support.gateway.fake_engine import DEADLINE_S
from support.waiting import until


class Body:
    """Stands for the memory that waiting work refers to."""


@pytest.mark.parametrize("is_template", [False, True])
async def test_work_that_is_cancelled_while_it_waits_frees_its_memory(is_template: bool) -> None:
    released, entered = threading.Event(), threading.Semaphore(0)

    def block() -> None:
        entered.release()
        assert released.wait(DEADLINE_S), "`released` was not set"

    run = run_template if is_template else run_off_loop
    size = SMALL_BYTES + 1
    num_threads = 1 if is_template else NUM_THREADS
    blocking = [asyncio.create_task(run(block, size)) for _ in range(num_threads)]
    try:
        await until(lambda: entered.acquire(blocking=False), "a thread that is blocked")
        body = Body()
        is_alive = weakref.ref(body)
        waiting = asyncio.create_task(run(lambda body=body: body, size))
        del body
        await asyncio.sleep(0)
        assert is_alive()
        waiting.cancel()
        await asyncio.wait([waiting])
        del waiting
        gc.collect()
        assert not is_alive()
    finally:
        released.set()
        await asyncio.gather(*blocking)


async def test_small_work_does_not_wait_for_larger_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_pool, "_threads", ThreadPoolExecutor(1))
    released = threading.Event()
    larger = asyncio.create_task(run_off_loop(lambda: released.wait(DEADLINE_S), SMALL_BYTES + 1))
    try:
        assert await run_off_loop(lambda: "done", SMALL_BYTES) == "done"
        assert not larger.done()
    finally:
        released.set()
        assert await larger
