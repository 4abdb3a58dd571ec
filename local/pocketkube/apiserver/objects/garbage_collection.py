"""Delete orphans, the content of terminating objects, and old Events.

An orphan is an object whose owners have all been deleted. A terminating Namespace or CRD is removed
after its content. In a foreground deletion, an owner is removed after its dependents.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from datetime import UTC, datetime, timedelta

from pocketkube.apiserver.objects.deletion import (
    CRD_CLEANUP,
    FOREGROUND,
    DeleteOptions,
    Deletion,
    owners_of,
)
from pocketkube.apiserver.resources import DEFINITIONS, Object, RequestInfo
from pocketkube.apiserver.schema.catalog import Catalog
from pocketkube.apiserver.store import Store, StoreEvent
from pocketkube.lifecycle import wait_up_to
from pocketkube.timestamps import timestamp

EVENT_TTL = timedelta(hours=1)
EXPIRE_EVERY_S = 60.0  # interval of the search for Events older than EVENT_TTL


class GarbageCollector:
    """Deletes dependents of deleted owners, and all objects of terminating namespaces and CRDs.

    `drain()` handles all changes of the store since its last call. `run()` calls `drain()` after
    each change, and deletes Events that are older than EVENT_TTL.
    """

    def __init__(self, store: Store, catalog: Catalog, deletion: Deletion) -> None:
        self._store = store
        self._catalog = catalog
        self._deletion = deletion
        self._queue: deque[tuple[str, StoreEvent]] = deque()
        self._wake = asyncio.Event()
        store.listen(self._enqueue)

    def _enqueue(self, storage: str, event: StoreEvent) -> None:
        metadata = event.object["metadata"]
        new_owners = event.type != "DELETED" and owners_of(event.object) and event.previous is None
        if event.type == "DELETED" or metadata.get("deletionTimestamp") or new_owners:
            self._queue.append((storage, event))
            self._wake.set()

    async def run(self) -> None:
        expire_at = time.monotonic() + EXPIRE_EVERY_S
        while True:
            await wait_up_to(max(expire_at - time.monotonic(), 0.0), self._wake)
            if time.monotonic() >= expire_at:
                self._expire_events()
                expire_at = time.monotonic() + EXPIRE_EVERY_S
            self._wake.clear()
            self.drain()

    def drain(self) -> None:
        while self._queue:
            storage, event = self._queue.popleft()
            if event.type == "DELETED":
                self._after_removal(storage, event.object)
            elif event.object["metadata"].get("deletionTimestamp"):
                self._while_terminating(storage, event.object)
            elif (current := self._current(storage, event.object)) is not None:
                self._collect_if_orphaned(storage, current)

    def _current(self, storage: str, obj: Object) -> Object | None:
        """Return the current state of `obj` in the store; None if the object no longer exists."""
        metadata = obj["metadata"]
        if storage not in self._store.storages():
            return None
        current = self._store.get(storage, metadata.get("namespace", ""), metadata["name"])
        return (
            current
            if current is not None and current["metadata"]["uid"] == metadata["uid"]
            else None
        )

    def _delete(self, storage: str, obj: Object) -> None:
        metadata = obj["metadata"]
        if not metadata.get("deletionTimestamp") and self._current(storage, obj) is not None:
            info = RequestInfo(
                self._catalog.by_storage(storage), metadata.get("namespace", ""), metadata["name"]
            )
            self._deletion.delete(info, DeleteOptions())

    def _collect_if_orphaned(self, storage: str, obj: Object) -> None:
        """Delete `obj` if none of its owners exists. Else remove references to missing owners."""
        uids = {owner.get("uid", "") for owner in owners_of(obj)}
        gone = {uid for uid in uids if not self._store.find("uid", uid)}
        if gone == uids:
            self._delete(storage, obj)
        elif gone:
            self._deletion.disown(storage, obj, gone)

    def _after_removal(self, storage: str, obj: Object) -> None:
        metadata = obj["metadata"]
        for dependent_storage, dependent in self._deletion.dependents(metadata["uid"]):
            self._collect_if_orphaned(dependent_storage, dependent)
        for owner in owners_of(obj):
            self._release_foreground(owner.get("uid", ""))
        if namespace := metadata.get("namespace"):
            self._finish_namespace(namespace)
        self._finish_crd(storage)

    def _while_terminating(self, storage: str, obj: Object) -> None:
        metadata = obj["metadata"]
        if self._current(storage, obj) is None:
            return
        if FOREGROUND in (metadata.get("finalizers") or ()):
            for dependent_storage, dependent in self._deletion.dependents(metadata["uid"]):
                self._delete(dependent_storage, dependent)
            self._release_foreground(metadata["uid"])
        if storage == "namespaces":
            for content_storage, content in self._store:
                if content["metadata"].get("namespace") == metadata["name"]:
                    self._delete(content_storage, content)
            self._finish_namespace(metadata["name"])
        if storage == DEFINITIONS:
            kind = metadata["name"]  # the name of a CRD is the storage key of its kind
            if kind in self._store.storages():
                for content in self._store.list(kind):
                    self._delete(kind, content)
            self._finish_crd(kind)

    def _release_foreground(self, uid: str) -> None:
        owner = next(iter(self._store.find("uid", uid)), None)
        if owner is None or FOREGROUND not in (owner[1]["metadata"].get("finalizers") or ()):
            return
        is_blocked = any(
            reference.get("uid") == uid and reference.get("blockOwnerDeletion")
            for _, dependent in self._deletion.dependents(uid)
            for reference in owners_of(dependent)
        )
        if not is_blocked:
            self._deletion.release(*owner, FOREGROUND)

    def _finish_namespace(self, name: str) -> None:
        namespace = self._store.get("namespaces", "", name)
        if namespace is None or not namespace["metadata"].get("deletionTimestamp"):
            return
        has_content = any(obj["metadata"].get("namespace") == name for _, obj in self._store)
        if not has_content and not namespace["metadata"].get("finalizers"):
            self._store.remove("namespaces", "", name)

    def _finish_crd(self, storage: str) -> None:
        """Stop serving a custom kind if its CRD is terminating and no object of the kind is left.

        Then also remove the finalizer that `Deletion` added to the CRD.

        Args:
            storage: storage key of the kind, which is also the name of the CRD.
        """
        crd = self._store.get(DEFINITIONS, "", storage)
        if crd is None or CRD_CLEANUP not in (crd["metadata"].get("finalizers") or ()):
            return
        if storage not in self._store.storages() or not self._store.list(storage):
            self._catalog.withdraw(crd)
            self._store.close(storage)
            self._deletion.release(DEFINITIONS, crd, CRD_CLEANUP)

    def _expire_events(self) -> None:
        oldest = timestamp(datetime.now(UTC) - EVENT_TTL)
        for event in self._store.list("events"):
            last = event.get("lastTimestamp") or event["metadata"]["creationTimestamp"]
            if last < oldest:
                self._store.remove(
                    "events", event["metadata"]["namespace"], event["metadata"]["name"]
                )
