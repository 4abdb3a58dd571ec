"""200 services and an overloaded API server: concurrency, Retry-After and recovery."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import aiohttp
import pytest

from baton_kube.client import KubeError
from baton_operator.names import Key
from baton_operator.observe.freshness import Freshness
from baton_operator.process.operator_metrics import Metrics, serve
from baton_operator.reconcile import controller
from baton_operator.reconcile.controller import Controller, Outcome
from support.waiting import until

SERVICES = [Key("ns", f"service-{number}") for number in range(200)]
WORKERS = controller.CONCURRENCY
RETRY_AFTER_S = 1.0


class Refusing:
    """A reconcile that the API server refuses for a time."""

    def __init__(self, error: KubeError) -> None:
        self.error: KubeError | None = error
        self.now, self.most = 0, 0
        self.began: list[tuple[float, Key]] = []
        self.done: set[Key] = set()

    async def __call__(self, key: Key, freshness: Freshness) -> Outcome:
        self.began.append((time.monotonic(), key))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0.002)  # the API server's response time
            if self.error:
                raise self.error
            self.done.add(key)
            return Outcome()
        finally:
            self.now -= 1


async def _healed(work: Refusing, queue: Controller, refusing_s: float) -> None:
    task = asyncio.create_task(queue.run())
    try:
        for key in SERVICES:
            queue.add(key)
        await asyncio.sleep(refusing_s)
        work.error = None
        await until(lambda: len(work.done) == len(SERVICES), "every service reconciled")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_failing_server_gets_few_concurrent_requests_with_backoff(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controller, "FIRST_BACKOFF_S", 0.2)
    work = Refusing(KubeError(500, "InternalError", "etcd"))
    retries: list[None] = []
    await _healed(work, Controller(work, retried=lambda: retries.append(None)), refusing_s=3.0)
    assert work.most == WORKERS
    attempts = len(work.began) - len(SERVICES)
    assert attempts == len(retries)
    # 0.2 + 0.4 + 0.8 + 1.6 s: at most five failures of each in 3 s, jitter included.
    assert attempts <= 5 * len(SERVICES)


async def test_all_services_obey_retry_after() -> None:
    work = Refusing(KubeError(429, "TooManyRequests", "later", retry_after_s=RETRY_AFTER_S))
    began = time.monotonic()
    await _healed(work, Controller(work), refusing_s=2.5)
    refused = [at - began for at, _ in work.began if at - began < 2.5]
    # One round of the workers per pause. A pause begins when the previous round was refused.
    assert len(refused) <= WORKERS * 3
    rounds = sorted(refused)
    assert all(
        later - earlier < 0.5 or later - earlier >= RETRY_AFTER_S * 0.9
        for earlier, later in pairwise(rounds)
    )


async def test_only_a_stuck_reconcile_is_unhealthy() -> None:
    why = ""
    async with (
        serve("127.0.0.1", 0, Metrics(), lambda: why) as port,
        aiohttp.ClientSession() as session,
    ):
        async with session.get(f"http://127.0.0.1:{port}/health") as answer:
            assert answer.status == 200
        why = "a reconcile has not ended for 400 s"
        async with session.get(f"http://127.0.0.1:{port}/health") as answer:
            assert (answer.status, await answer.text()) == (503, f"{why}\n")
