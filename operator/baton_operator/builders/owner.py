"""The service that objects are built for: identity, typed spec, and the metadata they share."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from baton_operator import names
from baton_operator.api.llmservice import Spec

Object = dict[str, Any]
"""A Kubernetes object as JSON: the API's own form, with fields of any kind."""
Scheme = Literal["http", "https"]


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """One LLMService."""

    name: str
    namespace: str
    uid: str
    spec: Spec
    key_name: str = ""
    """Names the key of the service (`builders.service_key`); empty: not drawn yet."""
    coordinator: str | None = None
    """Address of the coordinator's Service, once it has one. With it the decode pods of an expert-parallel group are built."""
    sizes: dict[names.MemberRole, int] = {}
    """Of groups that the autoscaler sizes, instead of the spec's replicas."""
    gateway_schemes: tuple[Scheme, ...] = ()
    """What gateways that are ready speak."""

    @property
    def reference(self) -> Object:
        """Owner reference: the API server deletes what carries it together with the service."""
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
        """Whether decode pods are told to expect KV blocks. Scaling prefill to 0 and back keeps it, so decode pods stay."""
        return self.spec.prefill is not None

    @property
    def is_expert_parallel(self) -> bool:
        """Whether the decode pods are one group with a coordinator."""
        return self.spec.decode.parallelism.expert

    def expert_group(self, role: names.MemberRole) -> str:
        """Names the pods that can be ranks of one topology; empty for engines of their own.

        Ranks fetch experts from each other and compute with them: they must report to one coordinator and have the same
        key and checkpoint, in the same form, on the same kind of device, sliced in the same way.
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

    def tensor_parallel_size(self, role: names.MemberRole) -> int:
        if role == "decode":
            return self.spec.decode.parallelism.tensor
        return self.spec.prefill.parallelism.tensor if self.spec.prefill else 1

    def replicas(self, role: names.MemberRole) -> int:
        if role in self.sizes:
            return self.sizes[role]
        if role == "decode":
            return self.spec.decode.replicas
        return self.spec.prefill.replicas if self.spec.prefill else 0


def controlled_by(obj: Object, uid: str) -> bool:
    """Whether the owner with this uid made `obj`."""
    references = obj["metadata"].get("ownerReferences") or []
    return any(reference.get("controller") and reference["uid"] == uid for reference in references)
