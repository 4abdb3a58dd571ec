"""Fills the stores: one list and then a watch per kind (and namespace), for ever.

A watch that ends goes on where it was, without a list. Everything is listed anew when the server has forgotten that place (410) and
at every resync: that heals what a watch lost without a word. A watch on which not even a bookmark comes is begun again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection
from contextlib import aclosing

from baton_operator import names
from baton_operator.cache import Store
from baton_operator.cached_kube import CachedKube
from baton_operator.kube import KubeError

log = logging.getLogger(__name__)

SILENCE_S = 150.0
"""API servers send a bookmark every minute."""
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.5, 30.0
FILL_TIMEOUT_S = 30.0
SETTLE_S = 2.0
END_GRACE_S = 5.0
MAX_FAILURES = 3
"""Of a watch from one version, in a row: then a list gives another."""

Restarted = Callable[[str, str], None]
"""(kind, why)"""


class Watches:
    """All of them.

    Args:
        kube: with open stores.
        namespaces: empty for all.
        resync_s: seconds between two lists of a kind, more or less: not all at the same time.
        restarted: called when a watch has to begin anew before the server ended it.
    """

    def __init__(
        self,
        kube: CachedKube,
        namespaces: Collection[str],
        resync_s: float,
        restarted: Restarted = lambda kind, why: None,
    ) -> None:
        scopes: list[str | None] = [*namespaces] or [None]
        self._kube = kube
        self._feeds = {
            kind: [_Feed(kube, store, scope, resync_s, restarted) for scope in scopes]
            for kind, store in kube.stores.items()
        }
        kube.complete = lambda kind: all(feed.filled.is_set() for feed in self._feeds[kind])

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for feeds in self._feeds.values():
                for feed in feeds:
                    group.create_task(feed.run())
            group.create_task(self._settle())

    async def filled(self) -> None:
        """Returns when all kinds were listed or refused, or after FILL_TIMEOUT_S: what is missing then is read by name."""
        waits = [feed.answered.wait() for feeds in self._feeds.values() for feed in feeds]
        try:
            async with asyncio.timeout(FILL_TIMEOUT_S):
                await asyncio.gather(*waits)
        except TimeoutError:
            pass
        if missing := [kind for kind in self._feeds if not self._kube.complete(kind)]:
            log.warning("could not list %s; reading these objects one by one", ", ".join(missing))

    def silent_s(self, kind: str) -> float:
        """Seconds since the API server last said something about this kind, if only that nothing is new."""
        return max(feed.silent_s for feed in self._feeds[kind])

    @property
    def kinds(self) -> list[str]:
        return list(self._feeds)

    async def _settle(self) -> None:
        """Reads anew what the watches should have shown long ago."""
        while True:
            await asyncio.sleep(SETTLE_S)
            for kind, store in self._kube.stores.items():
                for namespace, name in store.overdue():
                    try:
                        await self._kube.read(kind, namespace, name)
                    except (KubeError, OSError, TimeoutError) as error:
                        log.warning("%s %s/%s could not be read anew: %s", kind, namespace, name, error)


class _Feed:
    """One kind in one namespace, or in all."""

    def __init__(
        self, kube: CachedKube, store: Store, namespace: str | None, resync_s: float, restarted: Restarted
    ) -> None:
        self.filled = asyncio.Event()
        self.answered = asyncio.Event()
        """Filled, or refused: then nobody need wait."""
        self._kube = kube
        self._store = store
        self._namespace = namespace
        self._selector = None if store.kind == names.KIND else {names.LABEL_MANAGED_BY: names.MANAGER}
        self._resync_s = resync_s
        self._restarted = restarted
        self._clock = kube.clock
        self._heard = self._clock()
        self._backoff_s = FIRST_BACKOFF_S
        self._failures = 0
        """In a row."""

    @property
    def silent_s(self) -> float:
        return self._clock() - self._heard

    async def run(self) -> None:
        while True:
            relist_at = self._clock() + self._resync_s * random.uniform(0.9, 1.1)
            version = await self._list()
            while version is not None and self._clock() < relist_at:
                version = await self._watch(version, relist_at)

    async def _list(self) -> str | None:
        """The version from which to watch; None: there was no list, try again."""
        kind = self._store.kind
        try:
            with self._store.listing(self._namespace) as listing:
                items, version = await self._kube.list_versioned(kind, self._namespace, self._selector)
                self._store.listed(listing, items)
        except KubeError as error:
            if error.status == 404:  # the API server does not have this kind, so there are none
                with self._store.listing(self._namespace) as listing:
                    self._store.listed(listing, [])
                self.filled.set()
            log.warning("%s could not be listed: %s", kind, error)
            self.answered.set()
            absent_for_long = error.status == 404 and kind != names.KIND
            await self._back_off(self._resync_s if absent_for_long else error.retry_after_s)
            return None
        except (OSError, TimeoutError) as error:
            log.warning("%s could not be listed: %s", kind, error or type(error).__name__)
            await self._back_off()
            return None
        self._said_something()
        self.filled.set()
        self.answered.set()
        return version

    async def _watch(self, version: str, until: float) -> str | None:
        """One watch. The version from which to go on; None: list anew."""
        began = self._clock()
        timeout_s = max(1.0, until - began)
        events = self._kube.watch(
            self._store.kind, self._namespace, self._selector, version, timeout_s=timeout_s, silence_s=SILENCE_S
        )
        # The server is asked to end it; the timeout is for one that does not.
        limit = asyncio.timeout(timeout_s + END_GRACE_S)
        try:
            async with limit, aclosing(events):
                async for event in events:
                    self._said_something()
                    obj = event["object"]
                    if event["type"] != "BOOKMARK":
                        self._store.event(event["type"], obj)
                    version = obj["metadata"]["resourceVersion"]
        except KubeError as error:
            self._restarted(self._store.kind, str(error.status))
            if error.status == 410:
                return None
            log.warning("the watch of %s was refused: %s", self._store.kind, error)
            self._failures += 1
            await self._back_off(error.retry_after_s)
            return version if self._failures < MAX_FAILURES else None
        except TimeoutError:
            if limit.expired():
                return version
            self._restarted(self._store.kind, "silence")
            log.warning("no word about %s for %g s, watching anew", self._store.kind, SILENCE_S)
        except OSError as error:
            self._restarted(self._store.kind, "connection")
            log.warning("the watch of %s broke: %s", self._store.kind, error)
            await self._back_off()
        else:
            if self._clock() < began + 1.0 < until:  # something between us and the server ends connections at once
                await self._back_off()
        return version

    def _said_something(self) -> None:
        self._heard = self._clock()
        self._backoff_s = FIRST_BACKOFF_S
        self._failures = 0

    async def _back_off(self, at_least_s: float | None = None) -> None:
        """Jittered: all watches break at the same moment, when the server goes."""
        delay_s = self._backoff_s * random.uniform(0.5, 1.5)
        self._backoff_s = min(2 * self._backoff_s, LAST_BACKOFF_S)
        await asyncio.sleep(max(delay_s, at_least_s or 0.0))
