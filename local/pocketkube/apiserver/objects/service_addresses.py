"""Cluster addresses of Services.

An address is allocated when a Service is created, and every update keeps it.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

from pocketkube.apiserver import errors
from pocketkube.apiserver.errors import ApiError
from pocketkube.apiserver.resources import Object, Resource
from pocketkube.apiserver.store import Store


class ServiceAddresses:
    """Allocates the addresses of one network. The store's index holds those in use."""

    def __init__(self, store: Store, network: IPv4Network) -> None:
        self._store = store
        self._network = network
        self._next = int(network.network_address)

    def allocate(self, resource: Resource, service: Object) -> None:
        spec, name = service["spec"], service["metadata"]["name"]
        if spec["type"] != "ClusterIP" or spec.get("clusterIP") == "None":
            return  # headless, or a type that validation refuses
        if asked := spec.get("clusterIP"):
            try:
                inside = IPv4Address(asked) in self._network
            except ValueError:
                inside = False
            if not inside or self._store.find("address", asked):
                why = (
                    "provided IP is already allocated"
                    if inside
                    else f"the provided IP is not in {self._network}"
                )
                raise errors.invalid(
                    resource, name, [errors.invalid_value("spec.clusterIP", asked, why)]
                )
            return
        size = self._network.num_addresses
        base = int(self._network.network_address)
        for step in range(1, size):
            candidate = IPv4Address(base + (self._next - base + step) % size)
            is_reserved = candidate in (self._network[0], self._network[-1])
            if not is_reserved and not self._store.find("address", str(candidate)):
                self._next = int(candidate)
                spec["clusterIP"] = str(candidate)
                spec["clusterIPs"] = [str(candidate)]
                return
        raise ApiError(
            500,
            "InternalError",
            f"no free address in {self._network}; delete services or widen the range",
        )

    @staticmethod
    def keep(old: Object, new: Object) -> None:
        """Restore the address in an update that does not name it."""
        new["spec"] = dict(new.get("spec") or {})
        for name in ("clusterIP", "clusterIPs"):
            new["spec"].setdefault(name, old["spec"][name])
