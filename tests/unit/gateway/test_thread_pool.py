"""Work that runs in a thread, so that it does not block the event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from baton_gateway import thread_pool
from baton_gateway.thread_pool import (
    NUM_THREADS,
    SMALL_BYTES,
    current_client,
    run_encoding,
    run_off_loop,
    run_template,
)
from baton_protocol.process.fair_thread_pool import FairThreadPool
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
    monkeypatch.setattr(thread_pool, "_threads", FairThreadPool(1, "test"))
    released = threading.Event()
    larger = asyncio.create_task(run_off_loop(lambda: released.wait(DEADLINE_S), SMALL_BYTES + 1))
    try:
        assert await run_off_loop(lambda: "done", SMALL_BYTES) == "done"
        assert not larger.done()
    finally:
        released.set()
        assert await larger


async def test_a_client_with_much_work_delays_another_by_one_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thread_pool, "_threads", FairThreadPool(1, "test"))
    entered, released, order = threading.Event(), threading.Event(), list[str]()

    def block() -> None:
        entered.set()
        assert released.wait(DEADLINE_S), "`released` was not set"

    async def work(client: str) -> None:
        current_client.set(client)
        await run_off_loop(lambda: order.append(client), SMALL_BYTES + 1)

    first = asyncio.create_task(run_off_loop(block, SMALL_BYTES + 1))
    try:
        await until(entered.is_set, "a thread that is blocked")
        tasks = [asyncio.create_task(work(client)) for client in "aaab"]
        await asyncio.sleep(0)
    finally:
        released.set()
    await asyncio.gather(first, *tasks)
    assert order == ["a", "b", "a", "a"]


async def test_large_work_runs_one_after_the_other_when_calls_are_cancelled() -> None:
    running, most, release = 0, 0, threading.Event()

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        assert release.wait(DEADLINE_S), "`release` was not set"
        running -= 1

    calls = [asyncio.create_task(run_encoding(work, 10, 1, 5)) for _ in range(4)]
    await until(lambda: running == 1, "the first work")
    calls[0].cancel()  # as when its client disconnects
    await asyncio.sleep(0)
    last = asyncio.create_task(run_encoding(lambda: None, 2, 1, 5))
    await last  # smaller work does not wait
    assert (running, most) == (1, 1)
    release.set()
    await asyncio.gather(*calls, return_exceptions=True)
    assert most == 1
