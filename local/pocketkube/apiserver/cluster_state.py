"""The objects of one cluster and the operations on them. This module does not depend on HTTP."""

from __future__ import annotations

import ipaddress

from pocketkube.apiserver.objects.deletion import Deletion
from pocketkube.apiserver.objects.garbage_collection import GarbageCollector
from pocketkube.apiserver.objects.object_registry import Registry, WriteOptions
from pocketkube.apiserver.objects.subresources import Scale
from pocketkube.apiserver.objects.tokens import ServiceAccountTokens
from pocketkube.apiserver.resources import RequestInfo
from pocketkube.apiserver.schema.catalog import Catalog
from pocketkube.apiserver.store import DEFAULT_WINDOW, Store, StoreEvent

_BY_CLUSTER = WriteOptions("pocketkube")


class ClusterState:
    """The state of one cluster's API server: the stored objects and the served resources.

    A new cluster has the standard namespaces of Kubernetes and their `default` service accounts.
    """

    def __init__(
        self, admin_token: str, service_network: str, window: int = DEFAULT_WINDOW
    ) -> None:
        self.store = Store(window)
        self.catalog = Catalog()
        self.registry = Registry(self.store, self.catalog, ipaddress.IPv4Network(service_network))
        self.deletion = Deletion(self.store)
        self.collector = GarbageCollector(self.store, self.catalog, self.deletion)
        self.scale = Scale(self.registry, self.catalog)
        self.tokens = ServiceAccountTokens(self.registry, admin_token)
        self.store.listen(self._default_account)
        namespaces = RequestInfo(self.catalog.builtin("namespaces"))
        for name in ("default", "kube-system", "kube-public", "kube-node-lease"):
            self.registry.create(namespaces, {"metadata": {"name": name}}, _BY_CLUSTER)

    def _default_account(self, storage: str, event: StoreEvent) -> None:
        """Create the service account `default` in new namespaces. Recreate it if it is deleted."""
        if storage == "namespaces" and event.type == "ADDED":
            namespace = event.object["metadata"]["name"]
        elif (
            storage == "serviceaccounts"
            and event.type == "DELETED"
            and event.object["metadata"]["name"] == "default"
        ):
            namespace = event.namespace
            owner = self.store.get("namespaces", "", namespace)
            if owner is None or owner["metadata"].get("deletionTimestamp"):
                return
        else:
            return
        accounts = RequestInfo(self.catalog.builtin("serviceaccounts"), namespace)
        self.registry.create(accounts, {"metadata": {"name": "default"}}, _BY_CLUSTER)
