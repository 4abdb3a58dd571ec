"""A local copy of one collection, kept by list + watch. Every watch ends after a while and is followed by a fresh list, so an
event lost on the way (a DELETED across a reconnect, say) heals by itself.
"""

import asyncio
import logging
from collections.abc import Callable

from baton_local.client.api import Api, ApiError, Json, key_of

log = logging.getLogger(__name__)

# Called with (old, new): None stands for "was not there" or "is gone".
Listener = Callable[[Json | None, Json | None], None]


class Reflector:
    """`objects` mirrors the collection at `path`; listeners hear each difference once."""

    def __init__(self, api: Api, path: str, *, field_selector: str = "", relist_s: int = 60):
        self.objects: dict[str, Json] = {}
        self.synced = asyncio.Event()  # set after the first list
        self._api = api
        self._path = path
        self._query: dict[str, str | int] = {"fieldSelector": field_selector} if field_selector else {}
        self._relist_s = relist_s
        self._listeners: list[Listener] = []

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` for every later change. It must not block."""
        self._listeners.append(listener)

    async def run(self) -> None:
        """Mirror until cancelled; errors are logged and retried with backoff."""
        delay = 0.1
        while True:
            try:
                await self._list_and_watch()
                delay = 0.1
            except ApiError as error:
                # 410: the version we asked to watch from is compacted; the next list gets a newer one.
                if error.status != 410:
                    log.warning("%s: %s; trying again in %.1f s", self._path, error, delay)
                await asyncio.sleep(delay)
                delay = min(delay * 2, 5.0)

    async def _list_and_watch(self) -> None:
        listing = await self._api.get(self._path, **self._query)
        # Items of a list carry neither kind nor apiVersion; events carry both. Readers use neither.
        items = {key_of(item): item for item in listing.get("items") or []}
        for key in [key for key in self.objects if key not in items]:
            self._set(key, None)
        for key, item in items.items():
            self._set(key, item)
        self.synced.set()
        version = listing["metadata"]["resourceVersion"]
        async for kind, obj in self._api.watch(
            self._path, timeout_s=self._relist_s, resourceVersion=version, **self._query
        ):
            if kind != "BOOKMARK":
                self._set(key_of(obj), None if kind == "DELETED" else obj)

    def _set(self, key: str, new: Json | None) -> None:
        old = self.objects.get(key)
        if new is None:
            self.objects.pop(key, None)
        else:
            self.objects[key] = new
        if old is None and new is None:
            return
        if old and new and old["metadata"]["resourceVersion"] == new["metadata"]["resourceVersion"]:
            return
        for listener in self._listeners:
            try:
                listener(old, new)
            except Exception:
                log.exception("a listener of %s failed on %s", self._path, key)
