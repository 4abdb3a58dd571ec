"""The work queue: one worker per key, no lost key, retries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from baton_operator.workqueue import Key, Work, WorkQueue

A, B = Key("ns", "a"), Key("ns", "b")


@asynccontextmanager
async def running(work: Work) -> AsyncIterator[WorkQueue]:
    queue = WorkQueue(work, workers=3)
    task = asyncio.create_task(queue.run())
    try:
        yield queue
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(check: Callable[[], bool], what: str) -> None:
    async def poll() -> None:
        while not check():
            await asyncio.sleep(0.005)

    try:
        await asyncio.wait_for(poll(), 60)
    except TimeoutError:
        raise AssertionError(f"waited 60 s for {what}") from None


async def test_a_key_is_never_worked_on_twice_at_once_and_an_add_meanwhile_is_not_lost() -> None:
    started: list[Key] = []
    release = asyncio.Event()

    async def work(key: Key) -> None:
        started.append(key)
        await release.wait()

    async with running(work) as queue:
        queue.add(A)
        await until(lambda: started == [A], "the first visit")
        for _ in range(5):
            queue.add(A)
        queue.add(B)
        await until(lambda: started == [A, B], "another key's visit")
        release.set()
        await until(lambda: started == [A, B, A], "one more visit of the first key")
        await asyncio.sleep(0.05)
        assert started == [A, B, A], "five adds are one visit"


async def test_a_failing_key_is_retried_and_the_others_go_on() -> None:
    visits: list[Key] = []

    async def work(key: Key) -> None:
        visits.append(key)
        if key == A and visits.count(A) < 3:
            raise OSError("no route")

    async with running(work) as queue:
        queue.add(A)
        queue.add(B)
        await until(lambda: visits.count(A) == 3 and B in visits, "three visits of the failing key")


async def test_a_key_comes_back_after_the_time_it_asked_for() -> None:
    visits = 0

    async def work(key: Key) -> float | None:
        nonlocal visits
        visits += 1
        return 0.01 if visits < 4 else None

    async with running(work) as queue:
        queue.add(A)
        await until(lambda: visits == 4, "four visits")


async def test_an_earlier_timer_replaces_a_later_one() -> None:
    visits: list[Key] = []

    async def work(key: Key) -> None:
        visits.append(key)

    async with running(work) as queue:
        queue.add_after(A, 3600)
        queue.add_after(A, 0.01)
        queue.add_after(A, 3600)
        await until(lambda: visits == [A], "the earliest timer")
