"""Reads that only the status needs: of pods, how far they are and with whom they can exchange KV blocks; of the API server,
whether the Secrets and ConfigMaps that pods wait for exist."""

from __future__ import annotations

from baton_operator import names
from baton_operator.builders.owner import Owner
from baton_operator.kube import Kube
from baton_operator.loading import LoadingPods
from baton_operator.names import Key
from baton_operator.observe import Observation, is_ready
from baton_operator.peers import KVPeers
from baton_operator.references import Reference, find_missing


class StatusProbes:
    """
    Args:
        loading, peers: None: pods are not asked.
    """

    def __init__(self, kube: Kube, loading: LoadingPods | None, peers: KVPeers | None) -> None:
        self._kube = kube
        self._loading = loading
        self._peers = peers

    async def ask(self, observed: Observation, owner: Owner) -> None:
        """Fills in `loading`, `missing` and `kv` of what was observed."""
        if self._loading is not None:
            observed.loading = await self._loading.ask(observed.pods)
        observed.missing = await self._missing(observed, owner)
        if self._peers is not None:
            if owner.replicas("prefill"):
                observed.kv = await self._peers.ask(observed.key, observed.pods)
            else:
                self._peers.forget(observed.key)

    def forget(self, key: Key) -> None:
        """The service is gone."""
        if self._peers is not None:
            self._peers.forget(key)

    async def _missing(self, observed: Observation, owner: Owner) -> frozenset[Reference]:
        """Return what pods wait for that does not exist. What the operator makes itself is not looked for."""
        known = {Reference("ConfigMap", name) for kind, name in observed.objects if kind == "ConfigMap"}
        known.add(Reference("Secret", names.service_key_name(owner.name)))
        pods = [pod for pod in observed.pods if not is_ready(pod)]
        return await find_missing(self._kube, owner.namespace, pods, known)
