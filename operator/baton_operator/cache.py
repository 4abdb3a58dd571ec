"""What is known of the cluster: one store per kind, filled by its watch and by the answers to our own writes. No I/O.

After a write the store holds what the write returned, or something newer, although events that were on their way come later.
Resource versions are compared for equality only. So a written object is held until the watch shows the version that the write
returned; what the watch says of it before that is older. If the watch showed that version while the answer was on its way, the
watch is ahead, and the answer is not needed. A version that never comes (the watch began after it) is overdue after a while: the
object is then to be read anew, by `verify`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from baton_operator import names
from baton_operator.workqueue import Key

Object = dict[str, Any]
Ref = tuple[str, str]
"""(namespace, name)"""

OVERDUE_S = 10.0
"""So long after a write its version must have come by the watch."""


@dataclass(slots=True)
class _Entry:
    object: Object
    streamed: Object | None = None
    """As the watch or the last list has it. None: they have not shown it yet."""
    awaited: str | None = None
    """Version that a write returned and the watch has not shown. None: `object` is `streamed`."""
    since: float = 0.0
    """When `awaited` was set, by the store's clock."""


@dataclass(slots=True, eq=False)
class Request:
    """A write, or a read past the store, that is under way: what the watch says meanwhile of the same name."""

    ref: Ref
    versions: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)
    """uids"""
    overtaken: bool = False
    """Another request for the same name ended."""


@dataclass(slots=True, eq=False)
class Listing:
    """A list that is under way: what was written meanwhile, and may be missing in it."""

    namespace: str | None
    """None: all."""
    written: set[Ref] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)
    """uids"""


class Store:
    """The objects of one kind. What it returns is shared: nobody may change it.

    Args:
        kind: "Pod", ...
        api_version: of that kind; items of a list do not carry it.
        changed: called with the key of the service that an object belongs to, whenever the watch or a list changes it.
        clock: seconds, monotonic.
    """

    def __init__(
        self, kind: str, api_version: str, changed: Callable[[Key], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.kind = kind
        self._api_version = api_version
        self._changed = changed
        self._clock = clock
        self._entries: dict[Ref, _Entry] = {}
        self._by_service: dict[Key, set[Ref]] = {}
        self._requests: dict[Ref, list[Request]] = {}
        self._listings: list[Listing] = []
        self._dead: dict[Ref, tuple[str, float]] = {}
        """uid, and since when, of what is gone before the watch said so: until then it says older things of that name."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, namespace: str, name: str) -> Object | None:
        entry = self._entries.get((namespace, name))
        return entry.object if entry else None

    def of_service(self, key: Key) -> list[Object]:
        return [self._entries[ref].object for ref in sorted(self._by_service.get(key, ()))]

    def all(self, namespace: str | None = None) -> list[Object]:
        return [entry.object for ref, entry in sorted(self._entries.items()) if namespace in (None, ref[0])]

    def keys(self) -> list[Key]:
        """Of all services that have an object here."""
        return list(self._by_service)

    # The watch.

    def event(self, type_: str, obj: Object) -> None:
        """One event: ADDED, MODIFIED or DELETED, with the object as it is then."""
        obj = self._normal(obj)
        ref, uid = _ref(obj), obj["metadata"]["uid"]
        for request in self._requests.get(ref, ()):
            request.versions.add(_version(obj))
            if type_ == "DELETED":
                request.deleted.add(uid)
        entry = self._entries.get(ref)
        if type_ == "DELETED":
            if self._is_dead(ref, uid):
                del self._dead[ref]
            if entry is not None and entry.object["metadata"]["uid"] == uid:
                self._remove(ref)
            self._tell(obj)
            return
        if ref in self._dead:
            return
        if entry is None:
            self._put(ref, _Entry(obj, streamed=obj))
        else:
            entry.streamed = obj
            if entry.awaited not in (None, _version(obj)):
                return  # older than what our write returned
            if self._key(entry.object) != self._key(obj):
                self._tell(entry.object)
            self._put(ref, _Entry(obj, streamed=obj))
        self._tell(obj)

    @contextmanager
    def listing(self, namespace: str | None) -> Iterator[Listing]:
        """Spans the requests for a list, up to `listed`."""
        listing = Listing(namespace)
        self._listings.append(listing)
        try:
            yield listing
        finally:
            self._listings.remove(listing)

    def listed(self, listing: Listing, items: list[Object]) -> None:
        """A whole list, as of a moment after `listing` began: what is missing in it is gone, unless it was written meanwhile."""
        self._dead = {
            ref: (uid, since)
            for ref, (uid, since) in self._dead.items()
            if uid in listing.removed or listing.namespace not in (None, ref[0])
        }
        present = {ref: item for item in map(self._normal, items) if (ref := _ref(item)) not in self._dead}
        for ref, entry in list(self._entries.items()):
            if ref in present or listing.namespace not in (None, ref[0]):
                continue
            if entry.awaited is not None and ref in listing.written:
                entry.streamed = None
                continue
            self._remove(ref)
            self._tell(entry.object)
        for ref, item in present.items():
            for request in self._requests.get(ref, ()):
                request.versions.add(_version(item))
            known = self._entries.get(ref)
            if known is not None and known.awaited not in (None, _version(item)) and ref in listing.written:
                known.streamed = item
                continue
            self._put(ref, _Entry(item, streamed=item))
            if known is None or _version(known.object) != _version(item):
                self._tell(item)
            if known is not None and self._key(known.object) != self._key(item):
                self._tell(known.object)

    # Our own requests.

    @contextmanager
    def request(self, namespace: str, name: str) -> Iterator[Request]:
        """Spans a write or a read of this object, up to `wrote`, `removed` or `verified`."""
        request = Request((namespace, name))
        self._requests.setdefault(request.ref, []).append(request)
        try:
            yield request
        finally:
            self._requests[request.ref].remove(request)
            if not self._requests[request.ref]:
                del self._requests[request.ref]

    def wrote(self, request: Request, obj: Object) -> None:
        """The answer to a write."""
        self._overtake(request)
        for listing in self._listings:
            listing.written.add(request.ref)
        self._answered(request, obj)

    def removed(self, request: Request, uid: str) -> None:
        """A delete was answered: the object with this uid does not exist any more."""
        self._overtake(request)
        if uid not in request.deleted:
            self._bury(request.ref, uid)

    def verified(self, request: Request, obj: Object | None) -> None:
        """The answer to a read past the store; None: the object does not exist."""
        if request.overtaken:
            return  # the answer may be older than what another request returned
        self._overtake(request)
        entry = self._entries.get(request.ref)
        if obj is not None:
            self._answered(request, obj)
            if entry is None or _version(entry.object) != _version(obj):
                self._tell(obj)
        elif entry is not None and not request.versions:
            if entry.awaited is None:
                self._remove(request.ref)
            else:
                self._bury(request.ref, entry.object["metadata"]["uid"])
            self._tell(entry.object)
        elif request.ref in self._dead:
            self._bury(request.ref, self._dead[request.ref][0])

    def overdue(self) -> list[Ref]:
        """Objects whose written version, or whose end, did not come by the watch: to be read anew."""
        limit = self._clock() - OVERDUE_S
        waiting = [ref for ref, entry in self._entries.items() if entry.awaited is not None and entry.since <= limit]
        return waiting + [ref for ref, (_, since) in self._dead.items() if since <= limit]

    def _answered(self, request: Request, obj: Object) -> None:
        obj = self._normal(obj)
        version, uid = _version(obj), obj["metadata"]["uid"]
        if not self._is_ours(obj) or uid in request.deleted or self._is_dead(request.ref, uid):
            return
        self._dead.pop(request.ref, None)
        entry = self._entries.get(request.ref)
        streamed = entry.streamed if entry else None
        if streamed is not None and (version == _version(streamed) or version in request.versions):
            self._put(request.ref, _Entry(streamed, streamed=streamed))  # the watch is as far, or ahead
        else:
            self._put(request.ref, _Entry(obj, streamed=streamed, awaited=version, since=self._clock()))

    # Bookkeeping.

    def _overtake(self, request: Request) -> None:
        for other in self._requests.get(request.ref, ()):
            other.overtaken |= other is not request

    def _is_dead(self, ref: Ref, uid: str) -> bool:
        return ref in self._dead and self._dead[ref][0] == uid

    def _bury(self, ref: Ref, uid: str) -> None:
        for listing in self._listings:
            listing.removed.add(uid)
        self._dead[ref] = uid, self._clock()
        entry = self._entries.get(ref)
        if entry is not None and entry.object["metadata"]["uid"] == uid:
            self._remove(ref)

    def _put(self, ref: Ref, entry: _Entry) -> None:
        self._remove(ref)
        self._entries[ref] = entry
        if key := self._key(entry.object):
            self._by_service.setdefault(key, set()).add(ref)

    def _remove(self, ref: Ref) -> None:
        entry = self._entries.pop(ref, None)
        if entry is not None and (key := self._key(entry.object)):
            refs = self._by_service[key]
            refs.discard(ref)
            if not refs:
                del self._by_service[key]

    def _key(self, obj: Object) -> Key | None:
        metadata = obj["metadata"]
        if self.kind == names.KIND:
            return Key(metadata["namespace"], metadata["name"])
        service = (metadata.get("labels") or {}).get(names.LABEL_SERVICE)
        return Key(metadata["namespace"], service) if service else None

    def _tell(self, obj: Object) -> None:
        if key := self._key(obj):
            self._changed(key)

    def _is_ours(self, obj: Object) -> bool:
        labels = obj["metadata"].get("labels") or {}
        return self.kind == names.KIND or labels.get(names.LABEL_MANAGED_BY) == names.MANAGER

    def _normal(self, obj: Object) -> Object:
        """With its kind, and without what nobody reads: managedFields are half of a pod."""
        metadata = {name: value for name, value in obj["metadata"].items() if name != "managedFields"}
        return {"apiVersion": self._api_version, "kind": self.kind, **obj, "metadata": metadata}


def _ref(obj: Object) -> Ref:
    return obj["metadata"]["namespace"], obj["metadata"]["name"]


def _version(obj: Object) -> str:
    return str(obj["metadata"]["resourceVersion"])
