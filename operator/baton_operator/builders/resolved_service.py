"""One LLMService with all values that its objects are built from, and their common metadata."""

from __future__ import annotations

from typing import Literal

import msgspec

from baton_kube.client import Object
from baton_operator import names
from baton_operator.api.llmservice import Spec
from baton_operator.api.spec_groups import Decode, Prefill

Scheme = Literal["http", "https"]


class ResolvedService(msgspec.Struct, frozen=True, kw_only=True):
    """One LLMService: its identity, its typed spec, and the values that the spec does not hold."""

    name: str
    namespace: str
    uid: str
    spec: Spec
    #: Identifies the service's key, see `service_key.name_of`. Empty: there is no key yet.
    key_name: str = ""
    #: Address of the coordinator's Service. None: it has none yet, so ranks cannot be built.
    coordinator: str | None = None
    #: Sizes of groups that the autoscaler sizes. They replace the spec's replicas.
    sizes: dict[names.MemberRole, int] = {}
    #: Schemes that ready gateways serve.
    gateway_schemes: tuple[Scheme, ...] = ()

    @property
    def reference(self) -> Object:
        """Owner reference. Kubernetes deletes objects with it when the service is deleted."""
        return {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }

    def metadata(self, name: str, role: names.Role | None = None) -> Object:
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": names.labels(self.name, role),
            "ownerReferences": [self.reference],
        }

    @property
    def served_name(self) -> str:
        return self.spec.model.served_name or self.name

    @property
    def has_prefill(self) -> bool:
        """Whether decode pods are configured to load KV blocks.

        It stays true while prefill is scaled to 0, so that decode pods are not replaced.
        """
        return self.spec.prefill is not None

    @property
    def is_expert_parallel(self) -> bool:
        """Whether the decode pods are one group with a coordinator."""
        return self.spec.decode.parallelism.expert

    def expert_group(self, role: names.MemberRole) -> str:
        """Return an id shared by pods that can be ranks of one topology; empty for dense engines.

        Ranks fetch experts from each other and compute with them. So they must have the same
        coordinator, key, checkpoint, dtype, quantization, device and tensor-parallel size.
        """
        if role != "decode" or not self.is_expert_parallel:
            return ""
        source = self.spec.model
        same = [
            source.uri,
            source.dtype,
            source.quantization,
            self.tensor_parallel_size(role),
            self.spec.engine.device,
        ]
        return names.content_hash([self.coordinator, self.key_name, *same])

    def group(self, role: names.MemberRole) -> Decode | Prefill | None:
        """Return `spec.decode` or `spec.prefill`; None: the service has no prefill group."""
        return self.spec.decode if role == "decode" else self.spec.prefill

    def tensor_parallel_size(self, role: names.MemberRole) -> int:
        group = self.group(role)
        return group.parallelism.tensor if group else 1

    def replicas(self, role: names.MemberRole) -> int:
        """Return the size that the autoscaler decided, else the spec's."""
        group = self.group(role)
        return self.sizes.get(role, group.replicas if group else 0)


def controlled_by(obj: Object, uid: str) -> bool:
    """Return whether `obj` is controlled by the owner with this uid."""
    references = obj["metadata"].get("ownerReferences") or []
    return any(reference.get("controller") and reference["uid"] == uid for reference in references)
