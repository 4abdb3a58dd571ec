"""One LLMService with all values from which the builders make Kubernetes objects."""

from __future__ import annotations

from typing import Literal

import msgspec

from baton_kube.client import Object
from baton_operator import names
from baton_operator.api.llmservice import Spec
from baton_operator.api.spec_engine import Engine, merged
from baton_operator.api.spec_groups import Decode, Prefill
from baton_operator.builders.restrictions import Restrictions

Scheme = Literal["http", "https"]


class ResolvedService(msgspec.Struct, frozen=True, kw_only=True):
    """The input of the builders: one LLMService with its typed spec and observed values."""

    name: str
    namespace: str
    uid: str
    spec: Spec
    #: Id of the service's key, see `service_key.name_of`. Empty: there is no key yet.
    key_name: str = ""
    #: Address of the coordinator's Service. None: no address yet, so ranks cannot be built.
    coordinator: str | None = None
    #: Sizes of the groups with `autoscaling`, which replace the spec's replicas.
    sizes: dict[names.MemberRole, int] = {}
    #: Schemes that ready gateways serve.
    gateway_schemes: tuple[Scheme, ...] = ()
    #: What the spec may request. None: everything.
    restrictions: Restrictions | None = None

    @property
    def reference(self) -> Object:
        """Owner reference to the service. Kubernetes deletes the owned objects with the service."""
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
        """Whether the spec has a prefill group, even one with 0 replicas."""
        return self.spec.prefill is not None

    @property
    def is_expert_parallel(self) -> bool:
        """Whether the decode pods are ranks of one expert-parallel group."""
        return self.spec.decode.parallelism.expert

    def expert_group(self, role: names.MemberRole) -> str:
        """Return the id of the expert group. Only ranks with the same id can share a topology.

        The id is a hash of what ranks must have in common: coordinator, service key, checkpoint,
        dtype, quantization, device and tensor-parallel size.

        Returns:
            Empty for independent engines.
        """
        if role != "decode" or not self.is_expert_parallel:
            return ""
        source = self.spec.model
        same = [
            source.uri,
            source.dtype,
            source.quantization,
            self.tensor_parallel_size(role),
            self.engine(role).device,
        ]
        return names.content_hash([self.coordinator, self.key_name, *same])

    def group(self, role: names.MemberRole) -> Decode | Prefill | None:
        """Return `spec.decode` or `spec.prefill`; None if the spec has no prefill group."""
        return self.spec.decode if role == "decode" else self.spec.prefill

    def engine(self, role: names.MemberRole) -> Engine:
        """Return the engine options of `role`. `spec.<role>.engine` overrides `spec.engine`."""
        group = self.group(role)
        return merged(self.spec.engine, group.engine if group else None)

    def tensor_parallel_size(self, role: names.MemberRole) -> int:
        group = self.group(role)
        return group.parallelism.tensor if group else 1

    def replicas(self, role: names.MemberRole) -> int:
        """Return the desired number of pods: from the autoscaler or, without one, from the spec."""
        group = self.group(role)
        return self.sizes.get(role, group.replicas if group else 0)

    @property
    def is_scaled_to_zero_by_hand(self) -> bool:
        """Whether `spec.decode` has 0 replicas and no autoscaling, so requests start no pod."""
        return self.spec.decode.autoscaling is None and self.replicas("decode") == 0


def controlled_by(obj: Object, uid: str) -> bool:
    """Return whether the controlling owner of `obj` has this uid."""
    references = obj["metadata"].get("ownerReferences") or []
    return any(reference.get("controller") and reference["uid"] == uid for reference in references)
