"""`.status` of an LLMService: what the operator saw last."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from baton_operator.api_autoscaling import AutoscalingStatus
from baton_operator.api_model import ModelStatus
from baton_operator.api_types import ApiStruct


class Condition(ApiStruct, frozen=True):
    """One aspect of the state, in Kubernetes' usual form."""

    type: Annotated[str, Meta(min_length=1, max_length=316, description="Which aspect; Ready sums up the others.")]
    status: Annotated[Literal["True", "False", "Unknown"], Meta(description="Whether it is as it should be.")]
    reason: Annotated[str, Meta(min_length=1, max_length=1024, description="Why, in one word for programs.")]
    message: Annotated[str, Meta(max_length=32768, description="Why, for people: what is wrong and where.")]
    last_transition_time: Annotated[
        str, Meta(description="When the status changed last.", extra_json_schema={"format": "date-time"})
    ]
    observed_generation: Annotated[int, Meta(ge=0, description="metadata.generation of the spec that was judged.")]


Revision = Annotated[str, Meta(description="Of the newest pods, a hash of all that they are made of.")]
Updated = Annotated[int, Meta(ge=0, description="Pods of that revision, those that are not ready included.")]


class GroupStatus(ApiStruct, frozen=True):
    """Pods of one group."""

    desired: Annotated[int, Meta(ge=0, description="Pods wanted.")]
    ready: Annotated[int, Meta(ge=0, description="Pods that serve, of any revision.")]
    updated: Updated = 0
    revision: Revision | None = None


class PrefillStatus(GroupStatus, frozen=True):
    """Pods of the prefill group."""

    autoscaling: AutoscalingStatus | None = None


class RankStatus(ApiStruct, frozen=True):
    """One rank of the present generation."""

    name: Annotated[str, Meta(description="Of the pod.")]
    rank: Annotated[int, Meta(ge=0, description="Its number in this generation.")]
    phase: Annotated[str, Meta(description="loading, standby, serving or broken.")]


class OperationSeconds(ApiStruct, frozen=True):
    """How long each phase took; what is under way is not counted yet."""

    waiting: Annotated[float, Meta(ge=0, description="For its members, or for the operation before it.")] | None = None
    preparing: Annotated[float, Meta(ge=0, description="The next generation, beside the one that serves.")] | None = (
        None
    )
    committing: Annotated[float, Meta(ge=0, description="Until all members had adopted it.")] | None = None


class OperationStatus(ApiStruct, frozen=True):
    """The operation on the topology that runs, or ran last."""

    id: Annotated[str, Meta(description="As it was asked for by; - if the ranks did so by themselves.")]
    kind: Annotated[str, Meta(description="form, scale, recover or rebalance.")]
    phase: Annotated[str, Meta(description="waiting, preparing, committing, done, failed or superseded.")]
    generation: Annotated[int, Meta(ge=0, description="That it leads to; 0: not drawn yet.")]
    seconds: OperationSeconds
    reason: Annotated[str, Meta(description="Why it failed, or what it waits for.")] | None = None


class TopologyStatus(ApiStruct, frozen=True):
    """The expert-parallel group as its coordinator reports it; what was reported last while it does not answer."""

    coordinator: Annotated[str, Meta(description="Address that the ranks report to.")]
    generation: Annotated[int, Meta(ge=0, description="Number of the present topology; 0: none was formed yet.")]
    ranks: Annotated[list[RankStatus], Meta(description="Members of that topology, and pods that are to be.")]
    operation: OperationStatus | None = None


class DecodeStatus(ApiStruct, frozen=True):
    """Pods of the decode group, as the scale subresource reads them."""

    desired: Annotated[int, Meta(ge=0, description="Pods wanted.")]
    ready: Annotated[int, Meta(ge=0, description="With expert: ranks that serve in the present generation.")]
    replicas: Annotated[int, Meta(ge=0, description="Pods that exist, those that drain included.")]
    selector: Annotated[str, Meta(description="Finds the decode pods; for autoscalers.")]
    updated: Updated = 0
    revision: Revision | None = None
    topology: TopologyStatus | None = None
    autoscaling: AutoscalingStatus | None = None


class Status(ApiStruct, frozen=True):
    """What the operator saw last."""

    observed_generation: (
        Annotated[int, Meta(ge=0, description="metadata.generation of the spec that all of this is about.")] | None
    ) = None
    endpoint: Annotated[str, Meta(description="URL of the gateway, from nodes and pods.")] | None = None
    ingress_endpoint: Annotated[str, Meta(description="URL through the Ingress, if one was asked for.")] | None = None
    conditions: (
        Annotated[
            list[Condition],
            Meta(
                description="What is as it should be and what is not; Ready sums up the others.",
                extra_json_schema={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
            ),
        ]
        | None
    ) = None
    spec_revision: (
        Annotated[str, Meta(description="ControllerRevision that holds the spec that was rolled out last.")] | None
    ) = None
    served_revision: (
        Annotated[
            str,
            Meta(
                description="ControllerRevision of the spec with which all pods were ready last. Pods that die in a pause, or "
                "while a rollout stalls, are made of it."
            ),
        ]
        | None
    ) = None
    model: ModelStatus | None = None
    prefill: PrefillStatus | None = None
    decode: DecodeStatus | None = None
    gateway: GroupStatus | None = None
