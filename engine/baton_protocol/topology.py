"""Messages between the ranks of an expert-parallel group and their coordinator (msgspec over ZMQ).

    rank                             coordinator
    Status          ->                            every STATUS_INTERVAL_S, and when it changes
                    <-               Directive    in answer to each Status, and when it changes

Each message contains the whole state of its sender, so the next message replaces a lost message. A
restarted coordinator recovers its state from the ranks' statuses. A rank follows each Directive:

    target None              Drop a prepared generation that is not committed.
    target, commit False     Prepare the target beside the serving generation. Report the result in
                             Status.prepared or Status.failure.
    target, commit True      Commit the target. Members of the serving generation agree on a step
                             for the commit (`elastic.rank.waves`). New members commit at once, and
                             so do all members of an `urgent` target.

Ranks send each other only StartWave. This module also declares the structs of the HTTP resource
`/topology`.
"""

from __future__ import annotations

import enum

import msgspec

STATUS_INTERVAL_S = 0.2
COORDINATOR_PORT = 5560
COORDINATOR_HTTP_PORT = 8001


class _Wire(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """Base of all wire structs. New fields go last and have a default."""


class TopologyMember(_Wire, frozen=True):
    """The process of one rank. A restarted pod is a new member, which has the same name."""

    #: Name of the pod, as used in topology requests.
    name: str
    instance_id: str
    host: str
    engine_port: int
    #: Port of the rank's ROUTER that receives StartWave.
    link_port: int
    #: Port of the rank's own rendezvous store.
    store_port: int


#: [sparse layer][rank][slot]: id of the expert in the slot. All ranks have the same number of
#: slots, and every expert has at least one slot.
Placement = tuple[tuple[tuple[int, ...], ...], ...]


class Generation(_Wire, frozen=True):
    """Immutable topology of an expert-parallel group: its ranks, and the experts of each rank."""

    #: Counts from 1. Messages that name an older generation are refused.
    number: int
    #: Distinguishes two attempts with the same number. Process groups are named after number and
    #: nonce.
    nonce: str
    #: In rank order.
    members: tuple[TopologyMember, ...]
    placement: Placement
    #: Address of the rendezvous store of this generation's process groups. A member runs the store.
    store_host: str
    store_port: int
    operation_id: str = ""
    #: The previous generation is broken, so members commit this generation without a vote.
    urgent: bool = False

    @property
    def size(self) -> int:
        return len(self.members)

    def rank_of(self, instance_id: str) -> int | None:
        for rank, member in enumerate(self.members):
            if member.instance_id == instance_id:
                return rank
        return None


class RankPhase(enum.StrEnum):
    #: Not ready to be a member.
    LOADING = "loading"
    #: Loaded, without a generation, so it serves no requests.
    STANDBY = "standby"
    SERVING = "serving"
    #: The generation lost a member. The rank keeps its requests and waits for the next generation.
    BROKEN = "broken"


class Activity(enum.StrEnum):
    """Current activity of a rank's engine loop. The rank reports it even if the loop is stalled."""

    #: The loop is outside steps.
    RESTS = "rests"
    #: The loop is in the exchange of votes before a step.
    WAITS = "waits"
    #: The loop is in a step, in which the ranks exchange tokens.
    RUNS = "runs"


class ExpertLoads(_Wire, frozen=True):
    """Number of a rank's tokens that were routed to each expert since the `Generation` began."""

    #: Indexed by [sparse layer][expert].
    tokens: tuple[tuple[int, ...], ...]


class Status(_Wire, frozen=True):
    """State of a rank, as sent to the coordinator."""

    member: TopologyMember
    phase: RankPhase
    #: Number of experts in each sparse layer; 0 until the model is loaded.
    num_experts: int = 0
    num_sparse_layers: int = 0
    #: Minimum number of slots in each layer of the group in addition to one slot per expert, from
    #: the configuration.
    num_redundant_experts: int = 0
    #: The generation of which the rank is a member, even if that generation is broken.
    generation: Generation | None = None
    #: Nonce of the prepared generation, until that generation is committed.
    prepared: str = ""
    #: Nonce of the generation whose commit the rank received.
    commit_seen: str = ""
    #: Nonce of the generation that could not be prepared.
    failed: str = ""
    #: The reason of `failed`, or of a broken generation.
    failure: str = ""
    #: Instance ids of members that do not answer.
    suspects: tuple[str, ...] = ()
    num_running: int = 0
    num_waiting: int = 0
    loads: ExpertLoads | None = None
    #: The rank is shutting down. It refuses new requests and needs a generation without this rank.
    leaving: bool = False
    #: The generation whose commit was received, until this rank has committed that generation.
    committed: Generation | None = None
    #: Number of steps whose vote the rank began, in all generations.
    step: int = 0
    #: Activity of the loop in step `step`. A loop is stalled if neither field changes.
    activity: Activity = Activity.RESTS
    #: Size of one expert of a sparse layer, of all tensor ranks together. 0: not loaded.
    expert_bytes: int = 0


class Directive(_Wire, frozen=True):
    target: Generation | None = None
    commit: bool = False
    #: The group no longer includes this instance. The instance becomes STANDBY, and ends its
    #: requests with DRAINING, so the gateway continues these requests on other engines.
    dismissed: bool = False


class StartWave(_Wire, frozen=True):
    """Message that starts a wave: a period in which all ranks take every step together.

    A rank that gets work between waves sends this message to the other ranks. The rank repeats the
    message until all ranks have joined the wave. A late or lost message does no harm.
    """

    generation: int
    nonce: str
    wave: int


# The HTTP resource: GET /topology, PUT /topology


class TopologyRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of PUT /topology: the requested topology.

    A request that repeats the operation id of the latest request changes nothing. A request with a
    new id replaces the current operation, unless that operation has committed.
    """

    operation_id: str
    #: Names of pods, in any order.
    members: list[str]


class OperationPhase(enum.StrEnum):
    #: The operation waits for members that have not registered.
    WAITING = "waiting"
    PREPARING = "preparing"
    COMMITTING = "committing"
    DONE = "done"
    #: The coordinator retries the operation later, if it is still requested.
    FAILED = "failed"
    #: The operation ended before its commit, because the group or the desired members changed.
    SUPERSEDED = "superseded"


#: Phases of an operation that has not ended, in order.
ACTIVE_PHASES = (OperationPhase.WAITING, OperationPhase.PREPARING, OperationPhase.COMMITTING)


class OperationStatus(msgspec.Struct, kw_only=True, omit_defaults=True):
    #: Empty for operations without a request: recovery and rebalancing.
    operation_id: str
    #: form, scale, recover or rebalance.
    kind: str
    phase: OperationPhase
    #: Number of the generation to which the operation leads; 0: not known yet.
    generation: int
    reason: str = ""
    #: Seconds spent in each phase, including the current phase so far.
    seconds: dict[str, float] = {}


class MemberStatus(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str
    instance_id: str
    phase: RankPhase
    #: None: not a member of the present generation.
    rank: int | None = None
    num_running: int = 0
    num_waiting: int = 0
    reason: str = ""


class TopologyStatus(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The body of GET /topology: the present topology."""

    #: Number of the present generation; 0: none yet.
    generation: int
    desired: list[str]
    #: All registered processes, members of the present generation first.
    members: list[MemberStatus]
    #: The running operation, or the last one.
    operation: OperationStatus | None = None
    #: host:port of the rendezvous store of the generation's process groups.
    store: str = ""
