"""Kind-specific steps of a write, like the strategies in the registries of kube-apiserver."""

from __future__ import annotations

from collections import defaultdict
from ipaddress import IPv4Address, IPv4Network

from pocketkube.apiserver import errors
from pocketkube.apiserver.resources import DEFINITIONS, Object, Resource
from pocketkube.apiserver.schema.catalog import Catalog
from pocketkube.apiserver.schema.defaults import qos_class
from pocketkube.apiserver.store import Store
from pocketkube.timestamps import timestamp


class Strategy:
    """The kind-specific steps of a write. Most kinds use this base class directly."""

    def __init__(self, initial_status: Object | None = None) -> None:
        self._initial_status = initial_status

    def before_create(self, new: Object) -> None:
        """Set the fields of `new` that the API server chooses, such as the initial status.

        `new` is a new object with defaults and without a status.
        """
        if self._initial_status is not None:
            new["status"] = self._initial_status

    def before_update(self, old: Object, new: Object) -> None:
        """Restore, from `old`, the fields of `new` that an update cannot change.

        The registry calls this method before it sets the defaults of `new`.
        """

    def after_write(self, stored: Object) -> Object:
        """Run the steps that the kind needs after the object `stored` has been written.

        The registry does not call this method after writes of subresources.

        Returns:
            `stored`, or the object that these steps have stored in its place.
        """
        return stored


class PodStrategy(Strategy):
    """Sets the initial status of a new pod: the phase Pending and the QoS class."""

    def before_create(self, new: Object) -> None:
        new["status"] = {"phase": "Pending", "qosClass": qos_class(new.get("spec") or {})}


class NamespaceStrategy(Strategy):
    """Sets the spec of a new namespace. Updates cannot change the spec."""

    def before_create(self, new: Object) -> None:
        new["spec"] = {"finalizers": ["kubernetes"]}
        new["status"] = {"phase": "Active"}

    def before_update(self, old: Object, new: Object) -> None:
        new["spec"] = old.get("spec", {})


class ServiceStrategy(Strategy):
    """Allocates the cluster addresses of new Services. Updates keep the addresses."""

    def __init__(self, store: Store, services: Resource, network: IPv4Network) -> None:
        super().__init__({"loadBalancer": {}})
        self._store = store
        self._resource = services
        self._network = network
        self._next = int(network.network_address)

    def before_create(self, new: Object) -> None:
        super().before_create(new)
        spec = new["spec"]
        if spec["type"] != "ClusterIP" or spec.get("clusterIP") == "None":
            return  # headless, or a type that validation refuses
        if asked := spec.get("clusterIP"):
            self._check(asked, new["metadata"]["name"])
        else:
            spec["clusterIP"] = self._allocate()
            spec["clusterIPs"] = [spec["clusterIP"]]

    def before_update(self, old: Object, new: Object) -> None:
        new["spec"] = dict(new.get("spec") or {})
        for name in ("clusterIP", "clusterIPs"):
            new["spec"].setdefault(name, old["spec"][name])

    def _check(self, address: str, service: str) -> None:
        """Check the cluster address that a new Service requests.

        Raises:
            ApiError: 422, the address is in use, or outside the range of cluster addresses.
        """
        try:
            is_inside = IPv4Address(address) in self._network
        except ValueError:
            is_inside = False
        if not is_inside or self._store.find("address", address):
            why = (
                "provided IP is already allocated"
                if is_inside
                else f"the provided IP is not in {self._network}"
            )
            raise errors.invalid(
                self._resource, service, [errors.invalid_value("spec.clusterIP", address, why)]
            )

    def _allocate(self) -> str:
        """Return the next free cluster address.

        Raises:
            ApiError: 500, all addresses are in use.
        """
        size = self._network.num_addresses
        base = int(self._network.network_address)
        for step in range(1, size):
            address = IPv4Address(base + (self._next - base + step) % size)
            is_reserved = address in (self._network[0], self._network[-1])
            if not is_reserved and not self._store.find("address", str(address)):
                self._next = int(address)
                return str(address)
        raise errors.ApiError(
            500,
            "InternalError",
            f"no free address in {self._network}; delete services or widen the range",
        )


class CustomResourceDefinitionStrategy(Strategy):
    """Adds the versions of a CRD to the served resources, and sets the status of the CRD."""

    def __init__(self, store: Store, catalog: Catalog) -> None:
        super().__init__()
        self._store = store
        self._catalog = catalog

    def after_write(self, stored: Object) -> Object:
        spec = stored["spec"]
        if not stored["metadata"].get("deletionTimestamp"):
            self._catalog.establish(stored)
            self._store.open(stored["metadata"]["name"])
        status = dict(stored.get("status") or {})
        storage = next(version["name"] for version in spec["versions"] if version.get("storage"))
        status["acceptedNames"] = spec["names"]
        status["storedVersions"] = list(
            dict.fromkeys([*(status.get("storedVersions") or ()), storage])
        )
        known = {condition["type"]: condition for condition in status.get("conditions") or ()}
        for kind, reason, message in (
            ("NamesAccepted", "NoConflicts", "no conflicts found"),
            ("Established", "InitialNamesAccepted", "the initial names have been accepted"),
        ):
            known.setdefault(
                kind,
                {
                    "type": kind,
                    "status": "True",
                    "reason": reason,
                    "message": message,
                    "lastTransitionTime": timestamp(),
                },
            )
        status["conditions"] = list(known.values())
        if status == stored.get("status"):
            return stored
        return self._store.put(DEFINITIONS, {**stored, "status": status})


def strategies(
    store: Store, catalog: Catalog, service_network: IPv4Network
) -> defaultdict[str, Strategy]:
    """Return a mapping from storage key, such as `pods`, to the strategy of the kind."""
    return defaultdict(
        Strategy,
        {
            "pods": PodStrategy(),
            "namespaces": NamespaceStrategy(),
            "services": ServiceStrategy(store, catalog.builtin("services"), service_network),
            "ingresses.networking.k8s.io": Strategy({"loadBalancer": {}}),
            "deployments.apps": Strategy({}),
            "replicasets.apps": Strategy({"replicas": 0}),
            DEFINITIONS: CustomResourceDefinitionStrategy(store, catalog),
        },
    )
