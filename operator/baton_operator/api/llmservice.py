"""The LLMService resource, v1alpha1, as typed structs.

The structs of the model, the groups and access are in `spec_*.py`.

`crd.py` converts the structs to the CRD's schema. Docstrings and the `#:` comments of fields become
descriptions. Types, `Meta` and defaults become bounds and defaults.

The schema accepts only values that the engine supports.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from baton_operator.api.field_types import ApiStruct, Count, Quantity, Time
from baton_operator.api.spec_access import Gateway, Security
from baton_operator.api.spec_engine import Engine
from baton_operator.api.spec_groups import AutoscalingStatus, Decode, Prefill, UpdateStrategy
from baton_operator.api.spec_model import Model, ModelStatus

#: Limit on the JSON of a spec. The time and memory of a reconcile grow with it, and each change is
#: stored in a ControllerRevision.
MAX_SPEC_BYTES = 2**15
#: Limit on the nesting depth of a spec. Free-form fields such as `template` have no other limit.
MAX_SPEC_DEPTH = 320


class KVTransfer(ApiStruct, frozen=True):
    """How KV blocks travel from prefill to decode pods."""

    #: ucx: UCX over TCP or RDMA. Its port has no authentication, so the cluster must enforce
    #: NetworkPolicies. tcp: authenticated sockets, for untrusted networks. shm: copies between
    #: processes that share a host and its namespaces. nixl: the NIXL library of the CUDA image,
    #: whose port has no authentication either. auto: for each peer, the first of shm, tcp and ucx
    #: that both sides have. With RDMA, ucx comes before tcp.
    transport: Literal["ucx", "tcp", "shm", "nixl", "auto"] = "ucx"
    #: true: an engine refuses to start without an RDMA device or with a UCX without verbs. The
    #: error message names what to change. false: RDMA is optional. Needs transport ucx or auto.
    rdma: bool = False
    #: pull: decode pods read the blocks from prefill pods. push: prefill pods write blocks to
    #: decode pods while they compute the next ones.
    mode: Literal["pull", "push"] = "pull"
    #: What a decode pod does if KV blocks do not arrive intact. recompute: it computes them. fail:
    #: the request fails.
    load_failure_policy: Literal["recompute", "fail"] = "recompute"
    #: Seconds for which a prefill pod keeps KV blocks while its decode pod sends nothing. Unset:
    #: 30.
    lease_seconds: Annotated[int, Meta(ge=1, le=3600)] | None = None
    #: Seconds without progress after which a decode pod gives up a transfer. Unset: 30.
    load_timeout_seconds: Annotated[int, Meta(ge=1, le=3600)] | None = None
    #: Maximum amount of KV in flight between two pods, for example 256Mi. Further transfers wait,
    #: and requests take turns. Unset: 64Mi.
    max_inflight_memory: Quantity | None = None
    #: Pinned host memory through which the KV of a GPU travels, for each worker. Blocks wait for
    #: room in it. Unset: 256Mi.
    staging_memory: Quantity | None = None


class Spec(ApiStruct, frozen=True):
    """The desired state of the service."""

    model: Model
    #: Container image of all pods of the service.
    image: Annotated[str, Meta(min_length=1, max_length=1024)] = "baton:0.1.0"
    prefill: Prefill | None = None
    decode: Decode = Decode()
    kv_transfer: KVTransfer = KVTransfer()
    gateway: Gateway = Gateway()
    engine: Engine = Engine()
    security: Security = Security()
    #: Seconds for which a draining pod may finish its requests. Then it is deleted.
    drain_timeout_seconds: Annotated[int, Meta(ge=0, le=86400)] = 120
    update_strategy: UpdateStrategy = UpdateStrategy()
    #: Seconds within which a pod of a new revision must be ready. Otherwise the rollout stalls:
    #: condition Updating is False with reason RolloutStalled, and the remaining pods of the earlier
    #: revision keep serving.
    progress_deadline_seconds: Annotated[int, Meta(ge=1, le=86400)] = 600
    #: true: edits are held back, except those of replicas and autoscaling. A lost pod is replaced
    #: by a pod of the spec before the pause.
    paused: bool = False


class Condition(ApiStruct, frozen=True):
    """A condition in the standard form of Kubernetes."""

    #: Name of the condition. Ready summarizes the others.
    type: Annotated[str, Meta(min_length=1, max_length=316)]
    status: Literal["True", "False", "Unknown"]  #: Whether the condition holds.
    #: The cause in one word, for programs.
    reason: Annotated[str, Meta(min_length=1, max_length=1024)]
    #: The cause as a sentence: what happened, and to which object.
    message: Annotated[str, Meta(max_length=32768)]
    last_transition_time: Time  #: Time of the last change of the status.
    observed_generation: Count  #: metadata.generation of the spec that the condition describes.


class GroupStatus(ApiStruct, frozen=True):
    """The status of one group of pods."""

    desired: Count  #: Desired number of pods.
    ready: Count  #: Pods that serve, of any revision.
    updated: Count = 0  #: Pods of the newest revision, ready or not.
    #: The newest revision: a hash of the template and configuration of its pods.
    revision: str | None = None


class PrefillStatus(GroupStatus, frozen=True):
    """The status of the prefill group."""

    autoscaling: AutoscalingStatus | None = None


class RankStatus(ApiStruct, frozen=True):
    """One rank of the expert-parallel group, in the current topology."""

    name: str  #: Name of the pod.
    rank: Count  #: Number of the rank in the topology.
    phase: str  #: loading, standby, serving or broken.


class OperationSeconds(ApiStruct, frozen=True):
    """Duration of each phase of an operation in seconds. Unset: the phase has not ended."""

    #: The operation waited for its members to register and for the operation before it to end.
    waiting: Annotated[float, Meta(ge=0)] | None = None
    #: Its members prepared the next generation while the present one served.
    preparing: Annotated[float, Meta(ge=0)] | None = None
    #: Its members committed the next generation.
    committing: Annotated[float, Meta(ge=0)] | None = None


class OperationStatus(ApiStruct, frozen=True):
    """The change of the topology that is in progress. If none is: the last change."""

    id: str  #: Id of the operator's request. -: the group started the operation itself.
    kind: str  #: form, scale, recover or rebalance.
    phase: str  #: waiting, preparing, committing, done, failed or superseded.
    generation: Count  #: Generation that the operation prepares. 0: not assigned yet.
    seconds: OperationSeconds
    reason: str | None = None  #: Why the operation failed, or what it waits for.


class TopologyStatus(ApiStruct, frozen=True):
    """The state of the expert-parallel group in the last report of its coordinator."""

    coordinator: str  #: Address of the coordinator's Service.
    generation: Count  #: Number of the current topology. 0: none was formed yet.
    ranks: list[RankStatus]  #: Members of the current topology.
    operation: OperationStatus | None = None


class DecodeStatus(GroupStatus, kw_only=True, frozen=True):
    """The status of the decode group. The scale subresource reads replicas and selector."""

    #: Pods that serve, of any revision. With expert: ranks that serve in the current generation.
    ready: Count
    replicas: Count  #: Pods that exist, draining ones included.
    selector: str  #: Label selector of the decode pods, for autoscalers.
    topology: TopologyStatus | None = None
    autoscaling: AutoscalingStatus | None = None


_BY_TYPE = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}


class Status(ApiStruct, frozen=True):
    """The state that the operator observed last."""

    #: metadata.generation of the spec that this status describes.
    observed_generation: Count | None = None
    endpoint: str | None = None  #: URL of the gateway inside the cluster.
    ingress_endpoint: str | None = None  #: URL of the Ingress, if the spec has one.
    #: The state of each part of the service. Ready summarizes the others. Available is True while
    #: the service answers requests.
    conditions: Annotated[list[Condition], Meta(extra_json_schema=_BY_TYPE)] | None = None
    spec_revision: str | None = None  #: ControllerRevision with the spec that was rolled out last.
    #: ControllerRevision with the last spec with which the whole service was ready. In a pause, and
    #: while a rollout stalls, lost pods are created again from it.
    served_revision: str | None = None
    model: ModelStatus | None = None
    prefill: PrefillStatus | None = None
    decode: DecodeStatus | None = None
    gateway: GroupStatus | None = None  #: Pods of the gateway.


class LLMService(ApiStruct, frozen=True):
    """A large language model, served by prefill pods, decode pods and a gateway."""

    spec: Spec
    status: Status | None = None


def decode_spec(spec: Any) -> Spec:
    """Convert `.spec` of an object from the API server to a `Spec`, without checking the rules.

    Raises:
        msgspec.ValidationError: the spec is too large or nested too deeply, or a field does not
            match the schema. Such a mismatch can occur if the object was stored under another
            version of the CRD. The message names the field.
    """
    try:
        num_bytes = len(msgspec.json.encode(spec))
        is_deep = is_deeper(spec, MAX_SPEC_DEPTH)
    except RecursionError:
        is_deep = True
    if is_deep:
        raise msgspec.ValidationError("the spec is nested too deeply")
    if num_bytes > MAX_SPEC_BYTES:
        raise msgspec.ValidationError(
            f"the spec has {num_bytes} bytes of JSON, and at most {MAX_SPEC_BYTES} are allowed"
        )
    return msgspec.convert(spec, Spec)


def value_at(spec: Spec, path: str) -> Any:
    """Return the value at `path` in the spec; None if the value or a parent struct is unset.

    Args:
        path: names of fields, joined by dots. Empty: the whole spec.
    """
    value: Any = spec
    for name in filter(None, path.split(".")):
        value = None if value is None else getattr(value, name)
    return value


def is_deeper(value: Any, num_levels: int) -> bool:
    """Return whether `value` has more than `num_levels` levels.

    A scalar and an empty object have one level. An object or list has one level more than its
    deepest value.
    """
    level = [value]
    for _ in range(num_levels):
        level = [
            below
            for each in level
            if isinstance(each, dict | list)
            for below in (each.values() if isinstance(each, dict) else each)
        ]
    return bool(level)
