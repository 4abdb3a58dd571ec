"""The LLMService resource, v1alpha1, as typed structs.

The structs of the model, the groups and access are in `spec_*.py`.

`crd.py` turns them into the CRD's schema. Docstrings and the `#:` comments of fields become
descriptions. Types, `Meta` and defaults become bounds and defaults. With `rules.py`, they define
what the API server refuses.

The schema accepts only what the engine can do. The description of a temporary bound says so.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from baton_operator.api.field_types import ApiStruct, Count, Quantity, Time
from baton_operator.api.spec_access import Gateway, Security
from baton_operator.api.spec_groups import AutoscalingStatus, Decode, Prefill, UpdateStrategy
from baton_operator.api.spec_model import Model, ModelStatus

#: Leaves room for `-prefill-<ordinal>` and hashes in a DNS label.
MAX_NAME_LENGTH = 40


class KVTransfer(ApiStruct, frozen=True):
    """How KV blocks travel from prefill to decode pods."""

    #: ucx: UCX over TCP or RDMA. Its port has no authentication, so it needs an enforced
    #: NetworkPolicy. tcp: authenticated sockets, for untrusted networks. shm: copies between
    #: processes of one host and namespaces. nixl: the NIXL library (in the CUDA image), exposed as
    #: ucx. auto: the first of shm, tcp and ucx that reaches the peer.
    transport: Literal["ucx", "tcp", "shm", "nixl", "auto"] = "ucx"
    #: true: an engine without an RDMA device, or with a UCX that has no verbs, does not start. Its
    #: message names what to change.
    rdma: bool = False
    #: pull: decode pods read the blocks that prefill published. push: prefill writes blocks while
    #: it computes the next ones.
    mode: Literal["pull", "push"] = "pull"
    #: What a decode pod does about blocks that did not arrive intact: compute them, or fail the
    #: request.
    load_failure_policy: Literal["recompute", "fail"] = "recompute"


class Engine(ApiStruct, frozen=True):
    """Tuning of every engine of the service. An unset field has the engine's default."""

    #: auto: cuda where the pod has a device, else cpu.
    device: Literal["auto", "cpu", "cuda"] | None = None
    block_size: Literal[8, 16, 32, 64, 128] | None = None  #: Tokens per KV block.
    #: KV blocks per engine; unset: what kvCacheMemory holds.
    num_blocks: Annotated[int, Meta(ge=2, le=2**31 - 1)] | None = None
    kv_cache_memory: Quantity | None = None  #: KV memory of one engine on a CPU, for example 512Mi.
    #: Host memory of one engine for prefix blocks that its cache evicts. They are copied back when
    #: needed.
    offload_memory: Quantity | None = None
    enable_prefix_caching: bool | None = None  #: Keep and share the blocks of equal prefixes.
    #: Token budget of one step; longer prompts are chunked.
    max_num_batched_tokens: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    #: Sequences that run at the same time.
    max_num_seqs: Annotated[int, Meta(ge=1, le=2**16)] | None = None
    #: Waiting requests per engine; more are refused as overload.
    max_queue: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    #: Compute threads per engine. Engines on one machine must divide its cores among them.
    num_threads: Annotated[int, Meta(ge=1, le=1024)] | None = None


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
    #: How long a draining pod may take to finish its requests before it is deleted.
    drain_timeout_seconds: Annotated[int, Meta(ge=0, le=86400)] = 120
    update_strategy: UpdateStrategy = UpdateStrategy()
    #: A pod of a new revision that is not ready for this long counts as stalled. Condition Updating
    #: is then False with reason RolloutStalled, and the remaining pods of the earlier revision keep
    #: serving.
    progress_deadline_seconds: Annotated[int, Meta(ge=1, le=86400)] = 600
    #: true: edits wait, except those of replicas and autoscaling. Pods that die are replaced by
    #: pods of the spec before the pause.
    paused: bool = False


class Condition(ApiStruct, frozen=True):
    """One aspect of the state, in Kubernetes' usual form."""

    #: The aspect. Ready sums up the others.
    type: Annotated[str, Meta(min_length=1, max_length=316)]
    status: Literal["True", "False", "Unknown"]  #: Whether the condition holds.
    #: The cause in one word, for programs.
    reason: Annotated[str, Meta(min_length=1, max_length=1024)]
    #: The cause as a sentence: what happened, and to which object.
    message: Annotated[str, Meta(max_length=32768)]
    last_transition_time: Time  #: When the status changed last.
    observed_generation: Count  #: metadata.generation of the spec that the condition describes.


class GroupStatus(ApiStruct, frozen=True):
    """Pods of one group."""

    desired: Count  #: Desired number of pods.
    ready: Count  #: Pods that serve, of any revision.
    updated: Count = 0  #: Pods of the newest revision, ready or not.
    #: The newest revision: a hash over template and configuration of its pods.
    revision: str | None = None


class PrefillStatus(GroupStatus, frozen=True):
    """Pods of the prefill group."""

    autoscaling: AutoscalingStatus | None = None


class RankStatus(ApiStruct, frozen=True):
    """One rank of the current generation."""

    name: str  #: Name of the pod.
    rank: Count  #: Its number in this generation.
    phase: str  #: loading, standby, serving or broken.


class OperationSeconds(ApiStruct, frozen=True):
    """How long each phase took. A phase that has not ended is missing."""

    #: Until its members existed and the operation before it ended.
    waiting: Annotated[float, Meta(ge=0)] | None = None
    #: Until the next generation was ready, beside the one that serves.
    preparing: Annotated[float, Meta(ge=0)] | None = None
    #: Until all members had committed the generation.
    committing: Annotated[float, Meta(ge=0)] | None = None


class OperationStatus(ApiStruct, frozen=True):
    """The running or the last operation on the topology."""

    id: str  #: Id of its request; - if the ranks started it themselves.
    kind: str  #: form, scale, recover or rebalance.
    phase: str  #: waiting, preparing, committing, done, failed or superseded.
    generation: Count  #: The generation that it prepares; 0: not assigned yet.
    seconds: OperationSeconds
    reason: str | None = None  #: Why it failed, or what it waits for.


class TopologyStatus(ApiStruct, frozen=True):
    """The expert-parallel group as the coordinator last reported it."""

    coordinator: str  #: Address that the ranks report to.
    generation: Count  #: Number of the current topology; 0: none was formed yet.
    ranks: list[RankStatus]  #: Members of that topology, and pods that will join.
    operation: OperationStatus | None = None


class DecodeStatus(ApiStruct, frozen=True):
    """Pods of the decode group, as the scale subresource reads them."""

    desired: Count  #: Desired number of pods.
    ready: Count  #: With expert: ranks that serve in the current generation.
    replicas: Count  #: Pods that exist, draining ones included.
    selector: str  #: Label selector of the decode pods, for autoscalers.
    updated: Count = 0  #: Pods of the newest revision, ready or not.
    #: The newest revision: a hash over template and configuration of its pods.
    revision: str | None = None
    topology: TopologyStatus | None = None
    autoscaling: AutoscalingStatus | None = None


_BY_TYPE = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}


class Status(ApiStruct, frozen=True):
    """The state that the operator observed last."""

    #: metadata.generation of the spec that this status describes.
    observed_generation: Count | None = None
    endpoint: str | None = None  #: URL of the gateway inside the cluster.
    ingress_endpoint: str | None = None  #: URL of the Ingress, if the spec has one.
    #: The state of each part; Ready sums up the others.
    conditions: Annotated[list[Condition], Meta(extra_json_schema=_BY_TYPE)] | None = None
    spec_revision: str | None = None  #: ControllerRevision with the spec that was rolled out last.
    #: ControllerRevision with the last spec of which all pods were ready. Pods that die in a pause
    #: or while a rollout stalls are created from it.
    served_revision: str | None = None
    model: ModelStatus | None = None
    prefill: PrefillStatus | None = None
    decode: DecodeStatus | None = None
    gateway: GroupStatus | None = None


class LLMService(ApiStruct, frozen=True):
    """A large language model, served by prefill pods, decode pods and a gateway."""

    spec: Spec
    status: Status | None = None


def decode_spec(spec: Any) -> Spec:
    """Return the typed form of `.spec` as the API server returns it.

    Raises:
        msgspec.ValidationError: naming the field, for an object stored under another version of the
            CRD.
    """
    return msgspec.convert(spec, Spec)
