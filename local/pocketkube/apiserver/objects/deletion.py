"""Delete one object: grace periods, finalizers, propagation to dependents."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from pocketkube.apiserver import errors
from pocketkube.apiserver.objects import conflicts
from pocketkube.apiserver.resources import Object, RequestInfo, Resource
from pocketkube.apiserver.store import Store
from pocketkube.conditions import TERMINAL_PHASES
from pocketkube.timestamps import timestamp

FOREGROUND = "foregroundDeletion"
CRD_CLEANUP = "customresourcecleanup.apiextensions.k8s.io"


@dataclass(frozen=True)
class DeleteOptions:
    """metav1.DeleteOptions, from the body and the query parameters."""

    grace_period_s: int | None = None
    #: Background, Foreground or Orphan.
    propagation: str = "Background"
    #: Preconditions: uid and resourceVersion that the object must have; empty for any.
    uid: str = ""
    resource_version: str = ""
    dry_run: bool = False


class Deletion:
    """Deletes single objects."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def delete(self, info: RequestInfo, options: DeleteOptions) -> tuple[Object, bool]:
        """Remove the object that `info` names, or mark the object as terminating.

        An object with finalizers or a grace period is marked as terminating, and so is a Namespace.
        All other objects are removed. The deletion of a CRD adds a finalizer to the CRD. A
        foreground deletion adds a finalizer to an object with dependents.

        Returns:
            (the object's last state, whether the object was removed). A dry run changes nothing,
            and returns whether the object would be removed.

        Raises:
            ApiError: 404 for a missing object, 409 for a precondition that does not match.
        """
        resource = info.resource
        obj = self._store.get(resource.storage_key, info.namespace, info.name)
        if obj is None:
            raise errors.not_found(resource, info.name)
        metadata = obj["metadata"]
        conflicts.check_preconditions(resource, metadata, options.uid, options.resource_version)
        finalizers = list(metadata.get("finalizers") or ())
        match options.propagation:
            case "Orphan":
                if not options.dry_run:
                    for storage, dependent in self.dependents(metadata["uid"]):
                        self.disown(storage, dependent, {metadata["uid"]})
            case "Foreground" if FOREGROUND not in finalizers and self.dependents(metadata["uid"]):
                finalizers.append(FOREGROUND)
        if resource.kind == "CustomResourceDefinition" and CRD_CLEANUP not in finalizers:
            finalizers.append(CRD_CLEANUP)
        grace = self._grace(resource, obj, options.grace_period_s)
        held = bool(finalizers) or grace > 0 or resource.kind == "Namespace"
        if options.dry_run:
            return obj, not held
        if not held:
            return self._store.remove(resource.storage_key, info.namespace, info.name), True
        marked = _mark(resource, obj, finalizers, grace)
        if marked == obj:
            return obj, False
        return self._store.put(resource.storage_key, marked), False

    @staticmethod
    def _grace(resource: Resource, obj: Object, asked: int | None) -> int:
        """Return the grace period in seconds; 0 unless `obj` is a pod that may still run.

        A later request can only shorten the grace period of a terminating pod.

        Args:
            asked: the grace period in the request, in seconds. None: use the period in the pod's
                spec.
        """
        if resource.storage_key != "pods":
            return 0
        spec, phase = obj.get("spec") or {}, (obj.get("status") or {}).get("phase")
        if not spec.get("nodeName") or phase in TERMINAL_PHASES:
            return 0
        given: int = (
            spec.get("terminationGracePeriodSeconds", 30) if asked is None else max(asked, 0)
        )
        left = obj["metadata"].get("deletionGracePeriodSeconds")
        return given if left is None else min(given, left)

    def dependents(self, uid: str) -> list[tuple[str, Object]]:
        """Return (storage key such as `pods`, object) for each object with the owner `uid`."""
        return self._store.find("owner", uid)

    def disown(self, storage: str, obj: Object, uids: set[str]) -> None:
        """Remove the owner references to `uids` from the stored object `obj`."""
        kept = [owner for owner in owners_of(obj) if owner.get("uid") not in uids]
        metadata = {
            key: value for key, value in obj["metadata"].items() if key != "ownerReferences"
        }
        metadata |= {"ownerReferences": kept} if kept else {}
        self._store.put(storage, {**obj, "metadata": metadata})

    def release(self, storage: str, obj: Object, finalizer: str) -> None:
        """Remove `finalizer` from the stored object `obj`. Delete `obj` if no finalizer is left."""
        metadata = obj["metadata"]
        left = [name for name in metadata.get("finalizers") or () if name != finalizer]
        if left:
            self._store.put(storage, {**obj, "metadata": {**metadata, "finalizers": left}})
        else:
            self._store.remove(storage, metadata.get("namespace", ""), metadata["name"])


def _mark(resource: Resource, obj: Object, finalizers: list[str], grace: int) -> Object:
    """Return a copy of `obj` that is marked as terminating.

    Args:
        finalizers: the finalizers of the copy. Empty: those of `obj`.
        grace: the grace period in seconds. If `obj` is already terminating, its grace period can
            only become shorter.
    """
    marked = copy.deepcopy(obj)
    metadata = marked["metadata"]
    if finalizers:
        metadata["finalizers"] = finalizers
    if "deletionTimestamp" not in metadata:
        metadata["deletionTimestamp"] = timestamp(datetime.now(UTC) + timedelta(seconds=grace))
        metadata["deletionGracePeriodSeconds"] = grace
        if "generation" in metadata:
            metadata["generation"] += 1
    # A second DELETE can shorten the grace period, not extend it.
    elif grace < metadata.get("deletionGracePeriodSeconds", 0):
        metadata["deletionGracePeriodSeconds"] = grace
    if resource.kind == "Namespace":
        marked["status"] = {**(marked.get("status") or {}), "phase": "Terminating"}
    return marked


def is_released(before: Object, after: Object) -> bool:
    """Return whether a write removed the last finalizer of a terminating object.

    The result is False while the object has a grace period.

    Args:
        before: metadata before the write.
        after: metadata after the write.
    """
    return bool(
        before.get("finalizers")
        and not after.get("finalizers")
        and after.get("deletionTimestamp")
        and not after.get("deletionGracePeriodSeconds")
    )


def owners_of(obj: Object) -> list[Object]:
    return obj["metadata"].get("ownerReferences") or []
