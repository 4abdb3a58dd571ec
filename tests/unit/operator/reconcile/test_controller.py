"""The controller: one reconcile at a time per service, retries, and the freshness of reads."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from baton_kube.client import ByteBudget, KubeError
from baton_operator.kube.objects import reads
from baton_operator.names import Key
from baton_operator.observe.freshness import Freshness, StaleReadError
from baton_operator.reconcile import controller as module
from baton_operator.reconcile.controller import (
    MAX_LARGE_READ_BYTES,
    MAX_READ_BYTES,
    Controller,
    Outcome,
    Reconcile,
)
from support.waiting import until

A, B = Key("ns", "a"), Key("ns", "b")
NOTHING = Outcome()


@asynccontextmanager
async def running(reconcile: Reconcile) -> AsyncIterator[Controller]:
    controller = Controller(reconcile)
    task = asyncio.create_task(controller.run())
    try:
        yield controller
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_service_is_never_reconciled_twice_at_once_and_no_change_is_lost() -> None:
    started: list[Key] = []
    release = asyncio.Event()

    async def reconcile(key: Key, freshness: Freshness) -> Outcome:
        started.append(key)
        await release.wait()
        return NOTHING

    async with running(reconcile) as controller:
        controller.add(A)
        await until(lambda: started == [A], "the first reconcile")
        for _ in range(5):
            controller.add(A)
        controller.add(B)
        await until(lambda: started == [A, B], "another service's reconcile")
        release.set()
        await until(lambda: started == [A, B, A], "one more reconcile of the first service")
        await until(
            lambda: controller.queue_depth == 0 and controller.longest_s == 0,
            "the controller to come to rest",
        )
        assert started == [A, B, A], "five changes must lead to one reconcile"


async def test_a_failing_service_is_retried_and_the_others_continue() -> None:
    visits: list[Key] = []

    async def reconcile(key: Key, freshness: Freshness) -> Outcome:
        visits.append(key)
        if key == A and visits.count(A) < 3:
            raise OSError("no route")
        return NOTHING

    async with running(reconcile) as controller:
        controller.add(A)
        controller.add(B)
        await until(
            lambda: visits.count(A) == 3 and B in visits, "three reconciles of the failing service"
        )


async def test_a_service_is_reconciled_again_after_the_requested_time() -> None:
    visits = 0

    async def reconcile(key: Key, freshness: Freshness) -> Outcome:
        nonlocal visits
        visits += 1
        return Outcome(0.01 if visits < 4 else None)

    async with running(reconcile) as controller:
        controller.add(A)
        await until(lambda: visits == 4, "four reconciles")


async def test_services_from_before_the_start_are_reconciled_and_deleted_ones_dropped() -> None:
    visits: list[Key] = []

    async def reconcile(key: Key, freshness: Freshness) -> Outcome:
        visits.append(key)
        return Outcome(is_gone=key == A)

    controller = Controller(reconcile)
    controller.add(A)
    controller.add(B)
    task = asyncio.create_task(controller.run())
    try:
        await until(
            lambda: sorted(visits) == [A, B] and len(controller) == 1, "both to be reconciled"
        )
        controller.add(A)
        await until(
            lambda: visits.count(A) == 2 and len(controller) == 1, "a service of the same name"
        )
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_reconcile_that_hangs_times_out_and_others_continue(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(module, "CONCURRENCY", 1)
    visits: list[Key] = []

    async def reconcile(key: Key, freshness: Freshness) -> Outcome:
        visits.append(key)
        if visits.count(key) == 1:
            await asyncio.Event().wait()
        return NOTHING

    async with running(reconcile) as controller:
        controller.add(A)
        controller.add(B)
        await until(lambda: len(visits) >= 4, "both services to be reconciled again")
    assert "reconcile of ns/a failed" in caplog.text
    assert ": TimeoutError" in caplog.text


async def freshness_after(*events: Callable[[Controller], None]) -> list[Freshness]:
    """Return the freshness of the first reconcile and of one after each event."""
    seen: list[Freshness] = []

    async def reconcile(key: Key, freshness: Freshness) -> Outcome:
        seen.append(freshness)
        return NOTHING

    controller = Controller(reconcile)
    controller.add(A)
    await controller.reconcile(A)
    for event in events:
        event(controller)
        await controller.reconcile(A)
    return seen


async def test_the_first_reconcile_reads_consistently_and_later_ones_use_event_versions() -> None:
    first, after_pod = await freshness_after(lambda controller: controller.observe(A, "Pod", "7"))
    assert (first.is_consistent, first.objects_changed, first.of("Pod")) == (True, True, None)
    assert (after_pod.is_consistent, after_pod.objects_changed) == (False, False)
    assert (after_pod.of("Pod"), after_pod.of("Service")) == ("7", "0")
    with pytest.raises(StaleReadError):
        after_pod.require_consistent()


async def test_an_event_never_makes_reads_older() -> None:
    *_, last = await freshness_after(
        lambda controller: controller.observe(A, "Pod", "10"),
        lambda controller: controller.observe(A, "Pod", "9"),
    )
    assert last.of("Pod") == "10"


async def test_objects_are_read_again_after_a_write_of_another_client() -> None:
    _, by_us, by_others = await freshness_after(
        lambda controller: controller.observe(A, "Role", "3", is_own_write=True),
        lambda controller: controller.observe(A, "Role", "4"),
    )
    assert not by_us.objects_changed
    assert by_others.objects_changed


async def test_after_a_list_of_a_watch_or_a_failure_reads_are_consistent() -> None:
    fails = False
    seen: list[Freshness] = []

    async def reconcile(key: Key, freshness: Freshness) -> Outcome:
        seen.append(freshness)
        if fails:
            raise OSError("no route")
        return NOTHING

    controller = Controller(reconcile)
    await controller.reconcile(A)
    await controller.reconcile(A)
    controller.add_all([B])
    await controller.reconcile(A)
    fails = True
    await controller.reconcile(A)
    fails = False
    await controller.reconcile(A)
    await controller.reconcile(B)
    assert [freshness.is_consistent for freshness in seen] == [True, False, True, False, True, True]


@pytest.mark.parametrize("is_own_write", [True, False])
async def test_an_event_does_not_end_the_backoff_of_a_failing_service(is_own_write: bool) -> None:
    visits: list[float] = []

    async def reconcile(key: Key, freshness: Freshness) -> Outcome:
        visits.append(asyncio.get_running_loop().time())
        controller.observe(A, "LLMService", str(len(visits)), is_own_write=is_own_write)
        raise OSError("a webhook's message that is another one each time")

    async with running(reconcile) as controller:
        controller.add(A)
        await until(lambda: len(visits) == 3, "three tries")
    pauses = [after - before for before, after in pairwise(visits)]
    assert all(pause >= 1.0 for pause in pauses), pauses
    if is_own_write:
        assert pauses[1] >= 2.0, "an event of the failure status ended the backoff"
    else:
        assert pauses[1] < 2.0, "no event shortened the backoff"


async def test_retry_after_of_a_webhook_pauses_only_its_service() -> None:
    visits: list[Key] = []

    async def reconcile(key: Key, freshness: Freshness) -> Outcome:
        visits.append(key)
        if key == A:
            raise KubeError(429, "", 'admission webhook "w" denied the request', retry_after_s=60.0)
        return NOTHING

    async with running(reconcile) as controller:
        controller.add(A)
        await until(lambda: visits == [A], "the refused service")
        controller.add(B)
        await until(lambda: visits == [A, B], "the other service")


async def read(num_bytes: int) -> None:
    """Read a response of the API server."""
    content = asyncio.StreamReader()
    content.feed_data(bytes(num_bytes))
    content.feed_eof()
    response: Any = SimpleNamespace(content=content)
    await ByteBudget(2**30, reads.get()).read(response, "pods")


async def test_one_large_service_is_reconciled_at_a_time() -> None:
    done: list[Key] = []
    running_now = most = 0

    async def reconcile(key: Key, freshness: Freshness) -> Outcome:
        nonlocal running_now, most
        await read(MAX_READ_BYTES + 1)
        running_now += 1
        most = max(most, running_now)
        for _ in range(20):  # turns in which others could start
            await asyncio.sleep(0)
        running_now -= 1
        done.append(key)
        return NOTHING

    async with running(reconcile) as controller:
        controller.add(A)
        controller.add(B)
        await until(lambda: sorted(done) == [A, B], "both reconciles")
    assert most == 1


@pytest.mark.parametrize("is_swallowed", [False, True])
async def test_a_service_that_outgrows_the_limit_is_reconciled_again(is_swallowed: bool) -> None:
    """No failure is counted, also if a part of the reconcile ignores the refused read."""
    size = MAX_READ_BYTES + 1
    results: list[int] = []
    retries = 0

    async def reconcile(key: Key, freshness: Freshness) -> Outcome:
        with suppress(*[KubeError] if is_swallowed else []):
            await read(size)
            results.append(size)
        return NOTHING

    def on_retry() -> None:
        nonlocal retries
        retries += 1

    controller = Controller(reconcile, retried=on_retry)
    for _ in range(2):
        controller.add(A)
        await controller.reconcile(A)
        assert not results
        assert controller.is_due(A)
        await controller.reconcile(A)
        assert results == [size]
        assert not controller.is_due(A)
        size = 1  # the service shrinks, and is no longer large
        controller.add_all()
        await controller.reconcile(A)
        size = MAX_READ_BYTES + 1
        results.clear()
    assert retries == 0


async def test_the_limit_of_a_large_service_is_a_failure() -> None:
    async def reconcile(key: Key, freshness: Freshness) -> Outcome:
        await read(MAX_LARGE_READ_BYTES + 1)
        return NOTHING

    controller = Controller(reconcile)
    assert await controller.reconcile(A) is None
    assert await controller.reconcile(A) is not None


async def test_a_defect_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def reconcile(key: Key, freshness: Freshness) -> Outcome:
        raise ZeroDivisionError

    await Controller(reconcile).reconcile(A)
    (record,) = [record for record in caplog.records if record.name == module.__name__]
    assert record.exc_info[0] is ZeroDivisionError


class Read:
    """Stands for an object that a reconcile has read."""


@pytest.mark.parametrize("is_defect", [False, True])
async def test_a_failed_reconcile_keeps_no_object_that_it_has_read(
    is_defect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.logger, "disabled", True)  # pytest keeps the tracebacks of records
    seen: list[weakref.ref[Read]] = []

    async def reconcile(key: Key, freshness: Freshness) -> Outcome:
        obj = Read()
        seen.append(weakref.ref(obj))
        try:
            raise KubeError(500, "", "refused")
        except KubeError as error:
            cycle = ZeroDivisionError() if is_defect else OSError()
            raise cycle from error

    gc.disable()
    try:
        await Controller(reconcile).reconcile(A)
        assert seen[0]() is None
    finally:
        gc.enable()
