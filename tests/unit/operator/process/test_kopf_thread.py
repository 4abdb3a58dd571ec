"""The thread of kopf: it is restarted when it ends or hangs, and stopped with a deadline."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from baton_operator.process import kopf_thread
from baton_operator.process.kopf_thread import KopfHangsError
from baton_operator.process.watch_session import WatchSession
from support.waiting import until


class Watched:
    """The part of a Runtime that `watch` uses."""

    def __init__(self) -> None:
        self.kube = SimpleNamespace(http_routes=False)
        self.starts = 0

    async def wait_for_crd(self) -> None:
        self.starts += 1


async def never_ends() -> None:
    """A task that ignores its cancellation."""
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


@pytest.fixture
def hanging_kopf(monkeypatch: pytest.MonkeyPatch) -> None:
    async def spawn_tasks(*, stop_flag: asyncio.Event, **_: Any) -> list[asyncio.Task[Any]]:
        return [asyncio.create_task(stop_flag.wait())]

    async def run_tasks(tasks: list[asyncio.Task[Any]], **_: Any) -> None:
        await never_ends()

    monkeypatch.setattr(kopf_thread.kopf, "spawn_tasks", spawn_tasks)
    monkeypatch.setattr(kopf_thread.kopf, "run_tasks", run_tasks)
    monkeypatch.setattr(kopf_thread, "STOP_TRY_S", 0.05)


@pytest.mark.usefixtures("hanging_kopf")
async def test_a_stop_that_hangs_ends_at_a_deadline() -> None:
    runtime: Any = Watched()
    running = asyncio.ensure_future(kopf_thread.run_kopf(runtime, WatchSession(runtime), []))
    await asyncio.sleep(0)  # starts `running`
    running.cancel()
    async with asyncio.timeout(30):
        with pytest.raises(KopfHangsError):
            await running


@pytest.mark.usefixtures("hanging_kopf")
async def test_a_stop_that_hangs_ends_the_process() -> None:
    runtime: Any = Watched()
    watching = asyncio.ensure_future(kopf_thread.watch(runtime, []))
    await until(lambda: runtime.starts, "the start of kopf")
    watching.cancel()
    async with asyncio.timeout(30):
        with pytest.raises(KopfHangsError):
            await watching


async def wait_for_restarts(monkeypatch: pytest.MonkeyPatch, runtime: Any, kopf: Any) -> None:
    """Return when `watch` has started `kopf` a third time."""
    monkeypatch.setattr(kopf_thread, "run_kopf", kopf)
    monkeypatch.setattr(kopf_thread, "RESTART_S", 0.01)
    monkeypatch.setattr(kopf_thread, "CHECK_S", 0.01)
    watching = asyncio.ensure_future(kopf_thread.watch(runtime, []))
    try:
        await until(lambda: runtime.starts >= 3, "a third start", 30)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_kopf_is_restarted_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ends(runtime: Any, session: Any, namespaces: Any) -> None:
        raise RuntimeError("a watch was refused for good")

    await wait_for_restarts(monkeypatch, Watched(), ends)


async def test_kopf_is_restarted_when_it_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For example kopf hangs when it waits for credentials."""
    monkeypatch.setattr(kopf_thread, "SILENCE_S", 0.05)

    async def waits(runtime: Any, session: Any, namespaces: Any) -> None:
        await asyncio.Event().wait()

    await wait_for_restarts(monkeypatch, Watched(), waits)


async def test_kopf_is_restarted_when_there_is_another_kind_to_watch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime: Any = Watched()

    async def waits(runtime: Any, session: Any, namespaces: Any) -> None:
        runtime.kube.http_routes = not runtime.kube.http_routes
        await asyncio.Event().wait()

    await wait_for_restarts(monkeypatch, runtime, waits)
