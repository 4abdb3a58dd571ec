"""A local copy of one collection, kept current by list and watch.

After a watch ends, the next watch starts at the last resource version. The collection is listed
again when the server no longer has that version (410). The collection is also listed every
`relist_s` seconds, because a network failure can lose an event, for example a DELETED.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from baton_kube.client import KubeClient, KubeError, Object

logger = logging.getLogger(__name__)

SILENCE_S = 150.0  # API servers send a bookmark every minute
END_GRACE_S = 5.0  # how late the server may end a watch
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.2, 5.0

# Called with (old, new). Old is None for a new object, and new is None for a deleted object.
Listener = Callable[[Object | None, Object | None], None]


class Reflector:
    """A local copy of the collection at `path`.

    Call either `run` or `changes` to keep the copy current. `subscribe` adds listeners.

    Attributes:
        objects: the objects by `namespace/name`, or by name if they have no namespace.
        synced: an asyncio.Event that is set after the first successful LIST request.
    """

    def __init__(
        self,
        kube: KubeClient,
        path: str,
        *,
        label_selector: str = "",
        field_selector: str = "",
        relist_s: float = 60.0,
    ) -> None:
        self.objects: dict[str, Object] = {}
        self.synced = asyncio.Event()
        self._kube = kube
        self._path = path
        self._selectors: dict[str, Any] = {
            "label_selector": label_selector,
            "field_selector": field_selector,
        }
        self._relist_s = relist_s
        self._listeners: list[Listener] = []

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` for each later change of an object. `listener` must not block."""
        self._listeners.append(listener)

    async def run(self) -> None:
        """Keep the copy current until cancelled."""
        async with aclosing(self.changes()) as changes:
            async for _ in changes:
                pass

    async def changes(self) -> AsyncGenerator[None, None]:
        """Keep the copy current. Yield None after each LIST response and each watched change.

        Failed requests are retried with backoff.
        """
        loop = asyncio.get_running_loop()
        version, relist_at, backoff_s = "", 0.0, FIRST_BACKOFF_S
        while True:
            # The loop also pauses after a watch without an error, because some servers might end
            # every watch at once.
            pause_s = FIRST_BACKOFF_S
            try:
                if not version or loop.time() >= relist_at:
                    version = await self._list()
                    relist_at = loop.time() + self._relist_s
                    yield
                left_s = max(relist_at - loop.time(), 1.0)
                silence_s = min(SILENCE_S, left_s + END_GRACE_S)
                watch = self._kube.watch(
                    self._path, version, timeout_s=left_s, silence_s=silence_s, **self._selectors
                )
                async with aclosing(watch) as events:
                    async for kind, obj in events:
                        version, backoff_s = obj["metadata"]["resourceVersion"], FIRST_BACKOFF_S
                        if kind != "BOOKMARK":
                            self._set(key_of(obj), None if kind == "DELETED" else obj)
                            yield
                        if loop.time() > relist_at + END_GRACE_S:
                            break
            except (KubeError, OSError) as error:
                pause_s, backoff_s = backoff_s, min(2 * backoff_s, LAST_BACKOFF_S)
                if isinstance(error, KubeError):
                    pause_s = max(pause_s, error.retry_after_s or 0.0)
                if isinstance(error, KubeError) and error.status == 410:
                    version = ""
                else:
                    logger.warning(
                        "the watch of %s failed, trying again in %.1f s: %s",
                        self._path,
                        pause_s,
                        error,
                    )
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _list(self) -> str:
        # The first list may come from the server's watch cache: many clients may start at the same
        # time. Later lists are consistent.
        not_older_than = None if self.synced.is_set() else "0"
        listed, version = await self._kube.list(
            self._path, **self._selectors, not_older_than=not_older_than
        )
        # Items of a list carry neither kind nor apiVersion; objects of events carry both.
        present = {key_of(obj): obj for obj in listed}
        for key in [*(self.objects.keys() - present.keys()), *present]:
            self._set(key, present.get(key))
        self.synced.set()
        return version

    def _set(self, key: str, new: Object | None) -> None:
        old = self.objects.get(key)
        if new is None:
            self.objects.pop(key, None)
        else:
            self.objects[key] = new
        if old is new or (
            old and new and old["metadata"]["resourceVersion"] == new["metadata"]["resourceVersion"]
        ):
            return
        for listener in self._listeners:
            try:
                listener(old, new)
            except Exception:
                logger.exception("a change of %s in %s could not be processed", key, self._path)


def key_of(obj: Object) -> str:
    """Return `namespace/name`, or the name alone for an object without a namespace."""
    namespace, name = obj["metadata"].get("namespace"), obj["metadata"]["name"]
    return f"{namespace}/{name}" if namespace else str(name)
