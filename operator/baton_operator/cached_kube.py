"""`Kube` whose reads come from stores that watches fill. Every write is in its store before it returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kubernetes.aio import client

from baton_operator import kube as kubernetes
from baton_operator import names
from baton_operator.cache import Ref, Store
from baton_operator.kube import Kube, Object
from baton_operator.workqueue import Key

REMEMBERED_S = 10.0
UNWATCHED = ("Secret", "Event", "Lease", "ControllerRevision")
"""Kinds that are read when they are needed. Secrets: to watch them is the right to read every Secret of the cluster."""


class CachedKube(Kube):
    """Reads a kind from the API server until `complete` says that its store is filled. Nobody may change what it returns.

    A Secret that a service controls is remembered for REMEMBERED_S once it was read.
    """

    def __init__(self, api: client.ApiClient) -> None:
        super().__init__(api)
        self.stores: dict[str, Store] = {}
        """By kind, those that are watched."""
        self.clock: Callable[[], float] = time.monotonic
        """Seconds. Of the stores and the watches, too."""
        self.complete: Callable[[str], bool] = lambda kind: False
        """Whether the store of this kind has been filled."""
        self._remembered: dict[tuple[str, Ref], tuple[Object, float]] = {}
        """Objects of kinds without a store, and until when."""

    def open_stores(self, changed: Callable[[Key], None]) -> None:
        """One store for each kind that the API server has; `changed`: see Store."""
        kinds = [kind for kind in kubernetes.KINDS if kind not in UNWATCHED]
        if self.policy_api:
            kinds.append("PodDisruptionBudget")
        if self.http_routes:
            kinds.append("HTTPRoute")
        self.stores = {kind: Store(kind, self.resource(kind)[0], changed, self.clock) for kind in kinds}

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        if kind in self.stores and self.complete(kind):
            return self.stores[kind].get(namespace, name)
        known, until = self._remembered.get((kind, (namespace, name)), (None, 0.0))
        if known is not None and self.clock() < until and self._is_controlled(known):
            return known
        return await self.read(kind, namespace, name)

    async def read(self, kind: str, namespace: str, name: str) -> Object | None:
        store = self.stores.get(kind)
        if store is None:
            obj = await super().read(kind, namespace, name)
            self._remember(kind, obj)
            return obj
        with store.request(namespace, name) as request:
            obj = await super().read(kind, namespace, name)
            store.verified(request, obj)
        return obj

    async def list_all(self, kind: str, namespace: str | None, selector: dict[str, str] | None = None) -> list[Object]:
        store = self.stores.get(kind)
        if store is None or not self.complete(kind):
            return await super().list_all(kind, namespace, selector)
        wanted = selector or {}
        service = wanted.get(names.LABEL_SERVICE)
        if service is not None and namespace is not None and kind != names.KIND:
            found = store.of_service(Key(namespace, service))
        else:
            found = store.all(namespace)
        return [obj for obj in found if wanted.items() <= (obj["metadata"].get("labels") or {}).items()]

    async def create(self, obj: Object) -> Object:
        with self._writing(obj["kind"], obj["metadata"]["namespace"], obj["metadata"]["name"]) as wrote:
            return wrote(await super().create(obj))

    async def apply(self, obj: Object) -> Object:
        with self._writing(obj["kind"], obj["metadata"]["namespace"], obj["metadata"]["name"]) as wrote:
            return wrote(await super().apply(obj))

    async def merge(
        self, kind: str, namespace: str, name: str, patch: Object, subresource: str | None = None
    ) -> Object:
        with self._writing(kind, namespace, name) as wrote:
            return wrote(await super().merge(kind, namespace, name, patch, subresource))

    async def delete_object(self, kind: str, namespace: str, name: str, uid: str) -> Object | None:
        store = self.stores.get(kind)
        self._remembered.pop((kind, (namespace, name)), None)
        if store is None:
            return await super().delete_object(kind, namespace, name, uid)
        with store.request(namespace, name) as request:
            answer = await super().delete_object(kind, namespace, name, uid)
            if answer is not None and answer.get("kind") == kind:
                store.wrote(request, answer)
            elif answer is not None:
                store.removed(request, uid)
        if answer is None:
            await self.read(kind, namespace, name)  # the store is behind
        return answer

    @contextmanager
    def _writing(self, kind: str, namespace: str, name: str) -> Iterator[Callable[[Object], Object]]:
        """Yields what takes the answer to the write, and hands it on."""
        store = self.stores.get(kind)

        def remember(answer: Object) -> Object:
            self._remember(kind, answer)
            return answer

        if store is None:
            self._remembered.pop((kind, (namespace, name)), None)
            yield remember
            return
        with store.request(namespace, name) as request:

            def wrote(answer: Object) -> Object:
                if answer.get("kind") == kind:  # a subresource may answer with a kind of its own
                    store.wrote(request, answer)
                return answer

            yield wrote

    def _remember(self, kind: str, obj: Object | None) -> None:
        if kind == "Secret" and obj is not None and self._is_controlled(obj):
            now, metadata = self.clock(), obj["metadata"]
            self._remembered = {key: known for key, known in self._remembered.items() if now < known[1]}
            self._remembered[kind, (metadata["namespace"], metadata["name"])] = obj, now + REMEMBERED_S

    def _is_controlled(self, obj: Object) -> bool:
        """Whether a service that exists, as far as is known, controls it: one that went may leave objects for a moment."""
        services = self.stores.get(names.KIND)
        for reference in obj["metadata"].get("ownerReferences") or []:
            if services is not None and reference["kind"] == names.KIND and reference.get("controller"):
                service = services.get(obj["metadata"]["namespace"], reference["name"])
                return service is not None and service["metadata"]["uid"] == reference["uid"]
        return False
