"""What carries the events of the simulated API server to the operator: late, in parts, twice, or not at all; and breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from baton_local.control_plane.embedded.store import Event
from baton_operator.kube import KubeError

Object = dict[str, Any]
Matches = Callable[[Object], bool]
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
    lists_fail: bool = False
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
        self.to_lose, self.repeats, self.lists_fail = 0, False, False
        self.lets_through(None)

    async def watch(
        self, matches: Matches, since: int, *, timeout_s: float, silence_s: float
    ) -> AsyncGenerator[Object]:
        """As `Kube.watch`."""
        if since < self.forgotten:
            raise KubeError(410, "Expired", f"too old resource version: {since} ({self.forgotten})")
        self._cut, self._stirred = False, asyncio.Event()
        loop = asyncio.get_running_loop()
        began = heard = loop.time()
        position = next((at for at, event in enumerate(self.events) if event.version > since), len(self.events))
        while loop.time() < began + timeout_s:
            if self._cut:
                raise ConnectionError("cut off")
            if position < len(self.events) and self.allowance != 0:
                event, position = self.events[position], position + 1
                for shown in self._shown(event, matches):
                    heard = loop.time()
                    yield shown
                    await asyncio.sleep(0)
                continue
            limit = min(heard + silence_s, began + timeout_s)
            if self.allowance is None:
                limit = min(limit, heard + BOOKMARK_S)
            self._stirred.clear()
            try:
                async with asyncio.timeout_at(limit):
                    await self._stirred.wait()
            except TimeoutError:
                if loop.time() >= heard + silence_s:
                    raise
                if self.allowance is None:
                    heard = loop.time()
                    yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self.version)}}}

    def _shown(self, event: Event, matches: Matches) -> list[Object]:
        """What enters or leaves the selection is added or deleted for who watches through it."""
        was = event.previous is not None and matches(event.previous)
        is_there = event.type != "DELETED" and matches(event.object)
        type_ = {(False, True): "ADDED", (True, True): "MODIFIED", (True, False): "DELETED"}.get((was, is_there))
        if type_ is None:
            return []
        if self.allowance is not None:
            self.allowance -= 1
        if self.to_lose:
            self.to_lose -= 1
            return []
        return [{"type": type_, "object": event.object}] * (2 if self.repeats else 1)
