"""Store objects in memory, with one global resource version and a history for watches.

A write replaces the stored object and never changes it in place, so readers need no copy.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pocketkube.apiserver.resources import Object

#: (storage, namespace, name).
Key = tuple[str, str, str]
#: Key of the index, from `_terms()`.
Term = tuple[str, ...]
EventType = Literal["ADDED", "MODIFIED", "DELETED"]

#: Number of events kept per storage key. Watches can resume from any of them.
DEFAULT_WINDOW = 2000


class ExpiredError(Exception):
    """The resource version is older than the kept events, or newer than the current version."""


@dataclass(frozen=True)
class StoreEvent:
    """One change of an object.

    Attributes:
        object: the object after the change; for DELETED, its last state.
        previous: the object before the change; None for ADDED.
    """

    type: EventType
    version: int
    namespace: str
    object: Object
    previous: Object | None


@dataclass
class _Collection:
    """The objects with one storage key, such as `pods`, and the recent changes of the objects."""

    #: Versions up to this one are not in `history`.
    floor: int
    objects: dict[tuple[str, str], Object] = field(default_factory=dict)
    history: deque[StoreEvent] = field(default_factory=deque)
    subscribers: set[asyncio.Queue[StoreEvent | None]] = field(default_factory=set)


def _terms(storage: str, obj: Object) -> Iterator[Term]:
    """Yield the terms by which the index finds an object: uid, owners, labels, Service address."""
    metadata = obj["metadata"]
    yield "uid", metadata["uid"]
    for owner in metadata.get("ownerReferences") or ():
        yield "owner", owner.get("uid", "")
    for label, value in (metadata.get("labels") or {}).items():
        yield storage, label, value
    if storage == "services":
        yield "address", obj["spec"].get("clusterIP", "")


class Store:
    """All objects by storage key (`pods`, `deployments.apps`), then by namespace and name.

    Args:
        window: number of events to keep per storage key. A watch with more unsent events is ended.
    """

    def __init__(self, window: int = DEFAULT_WINDOW) -> None:
        self._window = window
        self._collections: dict[str, _Collection] = {}
        self._index: dict[Term, dict[Key, Object]] = {}
        self._version = 1
        self._listeners: list[Callable[[str, StoreEvent], None]] = []

    @property
    def version(self) -> int:
        return self._version

    def listen(self, listener: Callable[[str, StoreEvent], None]) -> None:
        """Register `listener`. Each write calls `listener(storage, event)` before it returns."""
        self._listeners.append(listener)

    def open(self, storage: str) -> None:
        """Create an empty collection for the storage key `storage`, unless one exists."""
        self._collections.setdefault(storage, _Collection(self._version))

    def close(self, storage: str) -> None:
        """Remove the collection of the storage key `storage`, and end the collection's watches.

        The collection must be empty.
        """
        collection = self._collections.pop(storage, None)
        for queue in collection.subscribers if collection else ():
            queue.put_nowait(None)

    def storages(self) -> list[str]:
        return list(self._collections)

    def get(self, storage: str, namespace: str, name: str) -> Object | None:
        return self._collections[storage].objects.get((namespace, name))

    def find(self, *term: str) -> list[tuple[str, Object]]:
        """Return (storage key, object) for each object that the index lists under `term`.

        The term is `"uid", UID`, `"owner", UID` or, for Services, `"address", IP`.
        """
        return [(storage, obj) for (storage, _, _), obj in self._index.get(term, {}).items()]

    def list(
        self,
        storage: str,
        namespace: str = "",
        matches: Callable[[Object], bool] = lambda obj: True,
        labels: Iterable[tuple[str, str]] = (),
    ) -> list[Object]:
        """Return the objects for which `matches` is True, ordered by namespace and name.

        Args:
            namespace: empty for all namespaces.
            labels: labels (key, value) that `matches` requires. With labels, the index preselects
                the objects to test with `matches`.
        """
        candidates: Mapping[Any, Object] = self._collections[storage].objects
        candidates = min(
            (self._index.get((storage, *label), {}) for label in labels),
            key=len,
            default=candidates,
        )
        found = [
            key
            for key, obj in candidates.items()
            if (not namespace or key[-2] == namespace) and matches(obj)
        ]
        return [candidates[key] for key in sorted(found)]

    def __iter__(self) -> Iterator[tuple[str, Object]]:
        """Iterate over a snapshot of all pairs (storage key, object).

        The caller may write to the store in the loop.
        """
        pairs = [
            (storage, obj) for storage, c in self._collections.items() for obj in c.objects.values()
        ]
        return iter(pairs)

    def put(self, storage: str, obj: Object) -> Object:
        """Store a copy of an object with the next resource version, and return the copy."""
        collection = self._collections[storage]
        metadata = obj["metadata"]
        key = (metadata.get("namespace", ""), metadata["name"])
        previous = collection.objects.get(key)
        self._version += 1
        stored = {**obj, "metadata": {**metadata, "resourceVersion": str(self._version)}}
        collection.objects[key] = stored
        self._publish(
            storage,
            StoreEvent(
                "MODIFIED" if previous else "ADDED", self._version, key[0], stored, previous
            ),
        )
        return stored

    def remove(self, storage: str, namespace: str, name: str) -> Object:
        """Delete an object. Return its last state, with the resource version of the deletion."""
        previous = self._collections[storage].objects.pop((namespace, name))
        self._version += 1
        last = {
            **previous,
            "metadata": {**previous["metadata"], "resourceVersion": str(self._version)},
        }
        self._publish(storage, StoreEvent("DELETED", self._version, namespace, last, previous))
        return last

    def _publish(self, storage: str, event: StoreEvent) -> None:
        self._reindex(storage, event)
        collection = self._collections[storage]
        collection.history.append(event)
        while len(collection.history) > self._window:
            collection.floor = collection.history.popleft().version
        for queue in list(collection.subscribers):
            if queue.qsize() < self._window:
                queue.put_nowait(event)
            else:  # the client has stopped reading, so its watch ends and it must list again
                collection.subscribers.discard(queue)
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(None)
        for listener in self._listeners:
            listener(storage, event)

    def _reindex(self, storage: str, event: StoreEvent) -> None:
        key = (storage, event.namespace, event.object["metadata"]["name"])
        for term in set(_terms(storage, event.previous)) if event.previous else ():
            del self._index[term][key]
            if not self._index[term]:
                del self._index[term]
        for term in _terms(storage, event.object) if event.type != "DELETED" else ():
            self._index.setdefault(term, {})[key] = event.object

    def subscribe(self, storage: str, since: int | None) -> asyncio.Queue[StoreEvent | None]:
        """Return a queue of the events of `storage` after the resource version `since`.

        If `since` is None, the queue has only new events. A None in the queue means that the watch
        has ended.

        Raises:
            ExpiredError: `since` is older than the kept events, or newer than the current version.
                A version can be newer if the server issued it before a restart.
        """
        collection = self._collections[storage]
        queue: asyncio.Queue[StoreEvent | None] = asyncio.Queue()
        if since is not None:
            if since < collection.floor or since > self._version:
                raise ExpiredError(f"too old resource version: {since} ({collection.floor})")
            for event in collection.history:
                if event.version > since:
                    queue.put_nowait(event)
        collection.subscribers.add(queue)
        return queue

    def unsubscribe(self, storage: str, queue: asyncio.Queue[StoreEvent | None]) -> None:
        if collection := self._collections.get(storage):
            collection.subscribers.discard(queue)
