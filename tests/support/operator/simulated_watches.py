"""The watch cache of the simulated API server, and what carries its events to the operator: late, in parts, twice, or not at all;
and breaks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from pocketkube.apiserver.store import Event

Object = dict[str, Any]
Matches = Callable[[Object], bool]
Lists = Literal["work", "500", "429", "break"]
"""What becomes of a list: 429 asks for a pause, and one that breaks does so in the middle of its answer."""
BOOKMARK_S = 60.0


@dataclass(eq=False)
class Wire:
    """The watches of one kind, one after the other. It outlives the operator."""

    events: list[Event] = field(default_factory=list)
    version: int = 0
    """Of the API server."""
    allowance: int | None = None
    """Events that come through; None: all."""
    to_lose: int = 0
    """Events that are lost without a word."""
    repeats: bool = False
    forgotten: int = 0
    """What happened up to this version cannot be watched any more."""
    lists: Lists = "work"
    is_silent: bool = False
    """Neither events nor bookmarks come, and the connection stands."""
    shown: int = 0
    """Version of the newest event that came through."""
    _cut: bool = False
    _stirred: asyncio.Event = field(default_factory=asyncio.Event)

    def happened(self, event: Event) -> None:
        self.events.append(event)
        self._stirred.set()

    def lets_through(self, events: int | None) -> None:
        self.allowance = events
        self._stirred.set()

    def breaks(self, *, forgets: bool) -> None:
        """Forgets: the server cannot say what came after; it has to be listed."""
        self._cut = True
        self.forgotten = self.version if forgets else self.forgotten
        self._stirred.set()

    def mended(self) -> None:
        self.to_lose, self.repeats, self.lists, self.is_silent = 0, False, "work", False
        self.lets_through(None)

    @property
    def is_behind(self) -> bool:
        """Whether the API server's watch cache lags behind what is stored."""
        return (
            self.allowance is not None
            and bool(self.events)
            and self.shown < self.events[-1].version
        )

    def cached(self, matches: Matches) -> tuple[list[Object], int]:
        """What a list from the watch cache has, and its version."""
        version = self.shown if self.is_behind else self.version
        objects: dict[tuple[str, str], Object] = {}
        for event in self.events:
            if event.version <= version:
                ref = event.namespace, event.object["metadata"]["name"]
                objects.pop(ref, None)
                if event.type != "DELETED":
                    objects[ref] = event.object
        return [obj for obj in objects.values() if matches(obj)], version

    async def watch(
        self, matches: Matches, since: int, *, timeout_s: float
    ) -> AsyncGenerator[Object]:
        """Events after `since`, as the API server sends them, until it ends the watch. Raises ConnectionError when it breaks."""
        if since < self.forgotten:
            yield {
                "type": "ERROR",
                "object": {
                    "kind": "Status",
                    "code": 410,
                    "reason": "Expired",
                    "message": "too old",
                },
            }
            return
        self._cut, self._stirred = False, asyncio.Event()
        loop = asyncio.get_running_loop()
        began = bookmarked = loop.time()
        position = next(
            (at for at, event in enumerate(self.events) if event.version > since), len(self.events)
        )
        while loop.time() < began + timeout_s:
            if self._cut:
                raise ConnectionError("cut off")
            if position < len(self.events) and self.allowance != 0 and not self.is_silent:
                event, position = self.events[position], position + 1
                for shown in self._shown(event, matches):
                    yield shown
                    await asyncio.sleep(0)
                self.shown = max(self.shown, event.version)
                continue
            self._stirred.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(bookmarked + BOOKMARK_S, began + timeout_s)):
                    await self._stirred.wait()
            if loop.time() < bookmarked + BOOKMARK_S:
                continue
            bookmarked = loop.time()
            if not self.is_silent:
                version = str(self.shown if self.is_behind else self.version)
                yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": version}}}

    def _shown(self, event: Event, matches: Matches) -> list[Object]:
        """What enters or leaves the selection is added or deleted for who watches through it."""
        was = event.previous is not None and matches(event.previous)
        is_there = event.type != "DELETED" and matches(event.object)
        type_ = {(False, True): "ADDED", (True, True): "MODIFIED", (True, False): "DELETED"}.get(
            (was, is_there)
        )
        if type_ is None:
            return []
        if self.allowance is not None:
            self.allowance -= 1
        if self.to_lose:
            self.to_lose -= 1
            return []
        return [{"type": type_, "object": event.object}] * (2 if self.repeats else 1)
