"""Deletion and what follows from it: grace periods, finalizers, owner garbage collection, namespaces, custom resources.

`Deletion.delete()` answers a client; `Collector` reacts to changes in the store, as the controller manager does beside a
real API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import datetime
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from . import errors
from .catalog import Catalog
from .resources import Resource
from .store import Event, Store

Object = dict[str, Any]

EVENT_TTL = datetime.timedelta(hours=1)
EXPIRE_EVERY_S = 60.0
_FOREGROUND = "foregroundDeletion"
_CRD_CLEANUP = "customresourcecleanup.apiextensions.k8s.io"


@dataclass(frozen=True)
class DeleteOptions:
    """metav1.DeleteOptions, query parameters included."""

    grace_period_s: int | None = None
    propagation: str = "Background"  # Background, Foreground or Orphan
    uid: str = ""
    resource_version: str = ""
    dry_run: bool = False


class Deletion:
    """What DELETE does to one object."""

    def __init__(self, store: Store, catalog: Catalog) -> None:
        self._store = store
        self._catalog = catalog

    def delete(
        self, resource: Resource, namespace: str, name: str, options: DeleteOptions
    ) -> tuple[Object, bool]:
        """Remove the object, or mark it where a finalizer, a grace period or dependents must come first.

        Returns: its last state, and whether it is gone. Raises: ApiError.
        """
        obj = self._store.get(resource.storage_key, namespace, name)
        if obj is None:
            raise errors.not_found(resource, name)
        metadata = obj["metadata"]
        for given, actual, what in (
            (options.uid, metadata["uid"], "UID"),
            (options.resource_version, metadata["resourceVersion"], "ResourceVersion"),
        ):
            if given and given != actual:
                why = f"Precondition failed: {what} in precondition: {given}, {what} in object meta: {actual}"
                raise errors.conflict(resource, name, why)
        finalizers = list(metadata.get("finalizers") or ())
        match options.propagation:
            case "Orphan":
                if not options.dry_run:
                    self._orphan(metadata["uid"])
            case "Foreground" if _FOREGROUND not in finalizers and self.dependents(metadata["uid"]):
                finalizers.append(_FOREGROUND)
        if resource.kind == "CustomResourceDefinition" and _CRD_CLEANUP not in finalizers:
            finalizers.append(_CRD_CLEANUP)
        grace = self._grace(resource, obj, options.grace_period_s)
        held = bool(finalizers) or grace > 0 or resource.kind == "Namespace"
        if options.dry_run:
            return obj, not held
        if not held:
            return self._store.remove(resource.storage_key, namespace, name), True
        marked = copy.deepcopy(obj)
        if finalizers:
            marked["metadata"]["finalizers"] = finalizers
        if "deletionTimestamp" not in metadata:
            moment = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=grace)
            marked["metadata"]["deletionTimestamp"] = moment.strftime("%Y-%m-%dT%H:%M:%SZ")
            if "generation" in metadata:
                marked["metadata"]["generation"] += 1
            marked["metadata"]["deletionGracePeriodSeconds"] = grace
        elif grace < metadata.get(
            "deletionGracePeriodSeconds", 0
        ):  # a second delete may only shorten
            marked["metadata"]["deletionGracePeriodSeconds"] = grace
        if resource.kind == "Namespace":
            marked["status"] = {**(marked.get("status") or {}), "phase": "Terminating"}
        if marked == obj:
            return obj, False
        return self._store.put(resource.storage_key, marked), False

    @staticmethod
    def _grace(resource: Resource, obj: Object, asked: int | None) -> int:
        """Seconds the kubelet gets; only pods that may still run somewhere have any."""
        if resource.storage_key != "pods":
            return 0
        spec, phase = obj.get("spec") or {}, (obj.get("status") or {}).get("phase")
        if not spec.get("nodeName") or phase in ("Succeeded", "Failed"):
            return 0
        given: int = (
            spec.get("terminationGracePeriodSeconds", 30) if asked is None else max(asked, 0)
        )
        left = obj["metadata"].get("deletionGracePeriodSeconds")
        return given if left is None else min(given, left)

    def dependents(self, uid: str) -> list[tuple[str, Object]]:
        return self._store.find("owner", uid)

    def _orphan(self, uid: str) -> None:
        for storage, obj in self.dependents(uid):
            self.disown(storage, obj, {uid})

    def disown(self, storage: str, obj: Object, uids: set[str]) -> None:
        """Drop references to owners that are gone or gave the object up."""
        kept = [owner for owner in _owners(obj) if owner.get("uid") not in uids]
        metadata = {
            key: value for key, value in obj["metadata"].items() if key != "ownerReferences"
        }
        if kept:
            metadata["ownerReferences"] = kept
        self._store.put(storage, {**obj, "metadata": metadata})

    def release(self, storage: str, obj: Object, finalizer: str) -> None:
        """Take one of our own finalizers off, and remove the object if it was the last one."""
        metadata = obj["metadata"]
        left = [name for name in metadata.get("finalizers") or () if name != finalizer]
        if left:
            self._store.put(storage, {**obj, "metadata": {**metadata, "finalizers": left}})
        else:
            self._store.remove(storage, metadata.get("namespace", ""), metadata["name"])


def _owners(obj: Object) -> list[Object]:
    return obj["metadata"].get("ownerReferences") or []


class Collector:
    """Garbage collection of dependents, of namespace and custom-resource content, and of old events.

    `drain()` does all that is due; `run()` does so whenever something changed.
    """

    def __init__(self, store: Store, catalog: Catalog, deletion: Deletion) -> None:
        self._store = store
        self._catalog = catalog
        self._deletion = deletion
        self._due: deque[tuple[str, Event]] = deque()
        self._wake = asyncio.Event()
        store.listen(self._note)

    def _note(self, storage: str, event: Event) -> None:
        metadata = event.object["metadata"]
        new_owners = event.type != "DELETED" and _owners(event.object) and event.previous is None
        if event.type == "DELETED" or metadata.get("deletionTimestamp") or new_owners:
            self._due.append((storage, event))
            self._wake.set()

    async def run(self) -> None:
        expire_at = time.monotonic() + EXPIRE_EVERY_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(expire_at - time.monotonic(), 0.0)):
                    await self._wake.wait()
            if time.monotonic() >= expire_at:
                self._expire_events()
                expire_at = time.monotonic() + EXPIRE_EVERY_S
            self._wake.clear()
            self.drain()

    def drain(self) -> None:
        while self._due:
            storage, event = self._due.popleft()
            if event.type == "DELETED":
                self._after_removal(storage, event.object)
            elif event.object["metadata"].get("deletionTimestamp"):
                self._while_terminating(storage, event.object)
            elif (current := self._current(storage, event.object)) is not None:
                self._collect_if_orphaned(storage, current)

    def _current(self, storage: str, obj: Object) -> Object | None:
        """The object as it is by now; None if it is gone."""
        metadata = obj["metadata"]
        if storage not in self._store.storages():
            return None
        current = self._store.get(storage, metadata.get("namespace", ""), metadata["name"])
        return (
            current
            if current is not None and current["metadata"]["uid"] == metadata["uid"]
            else None
        )

    def _delete(self, storage: str, obj: Object, propagation: str = "Background") -> None:
        metadata = obj["metadata"]
        if metadata.get("deletionTimestamp") and propagation == "Background":
            return
        if self._current(storage, obj) is not None:
            options = DeleteOptions(propagation=propagation)
            resource = self._catalog.by_storage(storage)
            self._deletion.delete(
                resource, metadata.get("namespace", ""), metadata["name"], options
            )

    def _collect_if_orphaned(self, storage: str, obj: Object) -> None:
        uids = {owner.get("uid", "") for owner in _owners(obj)}
        gone = {uid for uid in uids if not self._store.find("uid", uid)}
        if gone == uids:
            self._delete(storage, obj)
        elif gone:
            self._deletion.disown(storage, obj, gone)

    def _after_removal(self, storage: str, obj: Object) -> None:
        metadata = obj["metadata"]
        for dependent_storage, dependent in self._deletion.dependents(metadata["uid"]):
            self._collect_if_orphaned(dependent_storage, dependent)
        for owner in _owners(obj):
            self._release_foreground(owner.get("uid", ""))
        if namespace := metadata.get("namespace"):
            self._finish_namespace(namespace)
        self._finish_crd(storage)

    def _while_terminating(self, storage: str, obj: Object) -> None:
        metadata = obj["metadata"]
        if self._current(storage, obj) is None:
            return
        if _FOREGROUND in (metadata.get("finalizers") or ()):
            for dependent_storage, dependent in self._deletion.dependents(metadata["uid"]):
                self._delete(dependent_storage, dependent)
            self._release_foreground(metadata["uid"])
        if storage == "namespaces":
            for content_storage, content in self._store:
                if content["metadata"].get("namespace") == metadata["name"]:
                    self._delete(content_storage, content)
            self._finish_namespace(metadata["name"])
        if storage.startswith("customresourcedefinitions."):
            spec = obj["spec"]
            content_storage = f"{spec['names']['plural']}.{spec['group']}"
            if content_storage in self._store.storages():
                for content in self._store.list(content_storage):
                    self._delete(content_storage, content)
            self._finish_crd(content_storage)

    def _release_foreground(self, uid: str) -> None:
        owner = next(iter(self._store.find("uid", uid)), None)
        if owner is None or _FOREGROUND not in (owner[1]["metadata"].get("finalizers") or ()):
            return
        for _, dependent in self._deletion.dependents(uid):
            if any(
                ref.get("uid") == uid and ref.get("blockOwnerDeletion")
                for ref in _owners(dependent)
            ):
                return
        self._deletion.release(owner[0], owner[1], _FOREGROUND)

    def _finish_namespace(self, name: str) -> None:
        namespace = self._store.get("namespaces", "", name)
        if namespace is None or not namespace["metadata"].get("deletionTimestamp"):
            return
        if any(obj["metadata"].get("namespace") == name for _, obj in self._store):
            return
        if not namespace["metadata"].get("finalizers"):
            self._store.remove("namespaces", "", name)

    def _finish_crd(self, storage: str) -> None:
        """`storage` lost an object: if its definition waits for that, withdraw the kind."""
        name = "customresourcedefinitions.apiextensions.k8s.io"
        crd = self._store.get(name, "", storage)
        if crd is None or _CRD_CLEANUP not in (crd["metadata"].get("finalizers") or ()):
            return
        if storage not in self._store.storages() or not self._store.list(storage):
            self._catalog.withdraw(crd)
            self._store.close(storage)
            self._deletion.release(name, crd, _CRD_CLEANUP)

    def _expire_events(self) -> None:
        oldest = (datetime.datetime.now(datetime.UTC) - EVENT_TTL).strftime("%Y-%m-%dT%H:%M:%SZ")
        for event in self._store.list("events"):
            last = event.get("lastTimestamp") or event["metadata"]["creationTimestamp"]
            if last < oldest:
                self._store.remove(
                    "events", event["metadata"]["namespace"], event["metadata"]["name"]
                )
