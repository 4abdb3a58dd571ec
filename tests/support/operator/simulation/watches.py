"""The watch cache of the simulated API server, and its watches.

For the tests of the Reconciler.

Events may arrive late, in parts, twice or not at all, and watches may break.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Literal

from baton_kube.client import Object
from pocketkube.apiserver.store import StoreEvent

Matches = Callable[[Object], bool]
#: The result of a list: a reply, a 429 with a pause, or a connection that breaks within the reply.
Lists = Literal["work", "500", "429", "break"]
BOOKMARK_S = 60.0


@dataclass(eq=False)
class Wire:
    """The events of one kind, and how watches receive them. Restarts of the operator keep both."""

    events: list[StoreEvent] = field(default_factory=list)
    #: History of the API server.
    version: int = 0
    #: Number of events that arrive. None: all.
    allowance: int | None = None
    #: Number of events that are lost silently.
    to_lose: int = 0
    repeats: bool = False
    #: Oldest version from which a watch can start.
    forgotten: int = 0
    lists: Lists = "work"
    #: Whether the connection is open but sends neither events nor bookmarks.
    is_silent: bool = False
    #: Version of the newest event that arrived.
    shown: int = 0
    _cut: bool = False
    _stirred: asyncio.Event = field(default_factory=asyncio.Event)

    def happened(self, event: StoreEvent) -> None:
        self.events.append(event)
        self._stirred.set()

    def lets_through(self, events: int | None) -> None:
        self.allowance = events
        self._stirred.set()

    def breaks(self, *, forgets: bool) -> None:
        """Break the watch. With `forgets`, also drop the history, so that a list is needed."""
        self._cut = True
        self.forgotten = self.version if forgets else self.forgotten
        self._stirred.set()

    def mended(self) -> None:
        self.to_lose, self.repeats, self.lists, self.is_silent = 0, False, "work", False
        self.lets_through(None)

    @property
    def is_behind(self) -> bool:
        """Whether the API server's watch cache lags behind its store."""
        return (
            self.allowance is not None
            and bool(self.events)
            and self.shown < self.events[-1].version
        )

    def cached(self, matches: Matches) -> tuple[list[Object], int]:
        """Return the items and the version of a list from the watch cache.

        The cache's version is that of the last event of this kind, as in a kube-apiserver without
        progress notifications. Events of other kinds do not change this version.
        """
        newest = self.events[-1].version if self.events else self.version
        version = self.shown if self.is_behind else newest
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
        """Yield the watch events after the version `since`.

        Raises:
            ConnectionError: the watch breaks.
        """
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
            # As in a real API server, a bookmark is not newer than any event that is still to come.
            if not self.is_silent and (self.is_behind or position == len(self.events)):
                version = str(self.shown if self.is_behind else self.version)
                yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": version}}}

    def _shown(self, event: StoreEvent, matches: Matches) -> list[Object]:
        """Return the watch events for `event` in a watch with the selector `matches`."""
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
