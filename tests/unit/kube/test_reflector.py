"""The reflector against a scripted server whose watches break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from baton_kube import reflector
from baton_kube.client import Object
from baton_kube.reflector import Reflector
from support.kube.kube_api_server import PODS, event, pod, serving
from support.waiting import until


class Pods:
    """Serves a collection and its watch history."""

    def __init__(self) -> None:
        self.version = 1
        self.objects: dict[str, Object] = {}
        self.log: list[tuple[int, str, Object]] = []
        self.lists: list[dict[str, str]] = []
        self.watches: list[int] = []  # versions from which watches started
        self.refusals: list[int] = []  # status codes of the next responses
        self.retry_after = "0"
        self.forgotten = 0  # watches from versions below this end with 410
        self.cut = asyncio.Event()
        self.bookmarks = False
        self.endless = False  # watches continue after their timeoutSeconds

    def put(self, name: str) -> None:
        self.version += 1
        kind = "MODIFIED" if name in self.objects else "ADDED"
        self.objects[name] = pod(name, self.version)
        self.log.append((self.version, kind, self.objects[name]))

    def delete(self, name: str, *, lost: bool = False) -> None:
        self.version += 1
        del self.objects[name]
        if not lost:
            self.log.append((self.version, "DELETED", pod(name, self.version)))

    def cut_watch(self) -> None:
        self.cut.set()
        self.cut = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.refusals:
            return web.json_response(
                {}, status=self.refusals.pop(0), headers={"Retry-After": self.retry_after}
            )
        if "watch" in request.query:
            return await self._watch(request)
        self.lists.append(dict(request.query))
        items = list(self.objects.values())
        return web.json_response(
            {"metadata": {"resourceVersion": str(self.version)}, "items": items}
        )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        since, cut = int(request.query["resourceVersion"]), self.cut
        self.watches.append(since)
        response = web.StreamResponse()
        await response.prepare(request)
        if since < self.forgotten:
            await response.write(event("ERROR", {"code": 410, "reason": "Expired"}).encode())
            return response
        ends = asyncio.get_running_loop().time() + float(request.query["timeoutSeconds"])
        while not cut.is_set():
            if asyncio.get_running_loop().time() > ends and not self.endless:
                return response
            for version, kind, obj in self.log:
                if version > since:
                    await response.write(event(kind, obj).encode())
                    since = version
            if self.bookmarks and self.version > since:
                since = self.version
                await response.write(
                    event("BOOKMARK", {"metadata": {"resourceVersion": str(since)}}).encode()
                )
            await asyncio.sleep(0.01)  # interval of the server
        request.transport.abort()
        return response


class Mirror:
    """A running reflector of `pods`, and the calls of its listener."""

    def __init__(self, pods: Pods, mirror: Reflector) -> None:
        self.pods, self.mirror = pods, mirror
        self.calls: list[tuple[str | None, str | None]] = []
        mirror.subscribe(lambda old, new: self.calls.append((_version(old), _version(new))))

    async def shows(self, *names: str) -> None:
        await until(
            lambda: set(self.mirror.objects) == {f"ns/{name}" for name in names}, f"{names}"
        )


def _version(obj: Object | None) -> str | None:
    return None if obj is None else obj["metadata"]["resourceVersion"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflector, "FIRST_BACKOFF_S", 0.02)


@asynccontextmanager
async def mirrored(**settings: Any) -> AsyncIterator[Mirror]:
    pods = Pods()
    pods.put("a")
    async with serving(pods) as kube:
        mirror = Mirror(pods, Reflector(kube, PODS, **settings))
        task = asyncio.create_task(mirror.mirror.run())
        try:
            await mirror.mirror.synced.wait()
            yield mirror
            assert not task.done(), task.exception()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_listeners_are_called_once_per_change() -> None:
    async with mirrored(label_selector="x=y", field_selector="spec.nodeName=n") as mirror:
        mirror.mirror.subscribe(lambda old, new: 1 / 0)  # a listener that raises
        mirror.pods.put("b")
        await mirror.shows("a", "b")
        mirror.pods.put("a")
        mirror.pods.delete("b")
        await mirror.shows("a")
    assert mirror.calls == [(None, "2"), (None, "3"), ("2", "4"), ("3", None)]
    selectors = {"labelSelector": "x=y", "fieldSelector": "spec.nodeName=n"}
    assert mirror.pods.lists == [
        {**selectors, "resourceVersion": "0", "resourceVersionMatch": "NotOlderThan"}
    ]


async def test_a_broken_watch_is_resumed_from_the_last_version() -> None:
    async with mirrored() as mirror:
        mirror.pods.put("b")
        await mirror.shows("a", "b")
        seen = mirror.pods.version
        mirror.pods.cut_watch()
        mirror.pods.delete("a")
        await mirror.shows("b")
    assert mirror.pods.watches[-1] == seen
    assert len(mirror.pods.lists) == 1


async def test_a_watch_is_resumed_from_the_version_of_a_bookmark() -> None:
    async with mirrored() as mirror:
        mirror.pods.bookmarks = True
        mirror.pods.version = 100
        await asyncio.sleep(0.2)  # the bookmark arrives, which nothing shows
        mirror.pods.forgotten = 100
        mirror.pods.cut_watch()
        await until(lambda: 100 in mirror.pods.watches, "a watch from the bookmark")
    assert len(mirror.pods.lists) == 1


async def test_after_410_a_consistent_list_finds_lost_deletions() -> None:
    async with mirrored() as mirror:
        mirror.pods.put("b")
        await mirror.shows("a", "b")
        mirror.pods.delete("a", lost=True)
        mirror.pods.forgotten = mirror.pods.version
        mirror.pods.cut_watch()
        await mirror.shows("b")
        assert mirror.calls[-1] == ("2", None)
    assert mirror.pods.lists[1:] == [{"limit": "500"}]


async def test_the_relist_finds_a_lost_deletion() -> None:
    async with mirrored(relist_s=1.0) as mirror:
        mirror.pods.delete("a", lost=True)
        await mirror.shows()
        assert mirror.calls[-1] == ("2", None)
    assert mirror.pods.lists[1] == {"limit": "500"}


async def test_the_relist_does_not_wait_for_the_end_of_a_watch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reflector, "END_GRACE_S", 0.1)
    async with mirrored(relist_s=0.5) as mirror:
        mirror.pods.endless = True
        mirror.pods.delete("a", lost=True)

        async def keep_changing() -> None:
            while True:
                mirror.pods.put("b")
                await asyncio.sleep(0.02)

        changing = asyncio.create_task(keep_changing())
        await mirror.shows("b")
        changing.cancel()


async def test_a_silent_watch_is_restarted_without_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflector, "SILENCE_S", 0.2)
    async with mirrored() as mirror:
        await until(lambda: len(mirror.pods.watches) >= 3, "three watches")
        mirror.pods.put("b")
        await mirror.shows("a", "b")
    assert len(mirror.pods.lists) == 1


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
async def test_refused_requests_are_retried(status: int) -> None:
    async with mirrored() as mirror:
        mirror.pods.refusals = [status] * 3
        mirror.pods.cut_watch()
        mirror.pods.put("b")
        await mirror.shows("a", "b")
        assert not mirror.pods.refusals


async def test_retries_obey_retry_after() -> None:
    async with mirrored() as mirror:
        mirror.pods.refusals, mirror.pods.retry_after = [429], "2"
        mirror.pods.cut_watch()
        await until(lambda: not mirror.pods.refusals, "the refusal")
        refused, watches = asyncio.get_running_loop().time(), len(mirror.pods.watches)
        await until(lambda: len(mirror.pods.watches) > watches, "another watch")
        assert asyncio.get_running_loop().time() - refused > 0.9


async def test_changes_yields_after_the_list_and_after_each_event() -> None:
    pods = Pods()
    pods.put("a")
    pods.put("b")
    async with serving(pods) as kube:
        mirror = Reflector(kube, PODS)
        changes = mirror.changes()
        await anext(changes)
        assert set(mirror.objects) == {"ns/a", "ns/b"}
        pods.delete("a")
        await anext(changes)
        assert set(mirror.objects) == {"ns/b"}
        await changes.aclose()
