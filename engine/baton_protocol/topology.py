"""Messages between the ranks of an expert-parallel group and their coordinator (msgspec over ZMQ).

    rank                             coordinator
    Status          ->                            every STATUS_INTERVAL_S, and when it changes
                    <-               Directive    the answer to each, and when it changes

Both are whole states, never events, so the next message repairs a lost one. A restarted
coordinator recovers its state from the ranks' statuses. A rank acts on a directive by its own
state:

    target None              drop a prepared generation that is not committed
    target, commit False     prepare it beside the serving one; report Status.prepared or .failure
    target, commit True      commit it: members of a living generation at one step that they agree
                             on (`elastic.rank.waves`), new members at once; all at once if `urgent`

Between ranks only StartWave travels. The module also declares the HTTP resource `/topology`.
"""

from __future__ import annotations

import enum

import msgspec

STATUS_INTERVAL_S = 0.2
COORDINATOR_PORT = 5560
COORDINATOR_HTTP_PORT = 8001


class _Wire(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """Options shared by all wire structs; new fields go last, with a default."""


class Member(_Wire, frozen=True):
    """One rank's process. A restarted pod is another member of the same name."""

    #: The pod's name. Topology requests use it.
    name: str
    instance_id: str
    host: str
    engine_port: int
    #: Where StartWave goes: a ROUTER of the rank's link.
    link_port: int
    #: The rank's own rendezvous store.
    store_port: int


#: [sparse layer][rank][slot]: the expert in the slot. Every rank has equally many slots; every
#: expert has one or more.
Placement = tuple[tuple[tuple[int, ...], ...], ...]


class Generation(_Wire, frozen=True):
    """A topology: the ranks and the experts that each holds. It never changes."""

    #: From 1. Messages that name an older one are refused.
    number: int
    #: Two attempts at one number are two generations: process groups are named after both.
    nonce: str
    #: In rank order.
    members: tuple[Member, ...]
    placement: Placement
    #: Address of the rendezvous store of this generation's process groups. A member runs it.
    store_host: str
    store_port: int
    operation_id: str = ""
    #: The previous generation is broken, so its members commit this one at once.
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
    #: Its generation lost a member. It keeps its requests and waits for the next generation.
    BROKEN = "broken"


class Activity(enum.StrEnum):
    """The activity of a rank's loop, as its link reports it, also while the loop is stalled."""

    #: Outside steps.
    RESTS = "rests"
    #: In the exchange of votes before a step.
    WAITS = "waits"
    #: In a step. The ranks exchange tokens in it.
    RUNS = "runs"


class ExpertLoads(_Wire, frozen=True):
    """Tokens of this rank's own requests per expert, since the generation began.

    Indexed by [sparse layer][expert].
    """

    tokens: tuple[tuple[int, ...], ...]


class Status(_Wire, frozen=True):
    """The state of a rank, for the coordinator."""

    member: Member
    phase: RankPhase
    #: Experts of each sparse layer; known once loaded.
    num_experts: int = 0
    num_sparse_layers: int = 0
    #: The rank's configuration: least number of slots beyond one per expert.
    num_redundant_experts: int = 0
    #: The generation that it serves in, or that broke.
    generation: Generation | None = None
    #: Nonce of the prepared generation, until it is committed.
    prepared: str = ""
    #: Nonce of the generation whose commit it received.
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
    #: It is shutting down, refuses new requests and needs a generation without it.
    leaving: bool = False
    #: The generation whose commit was received, until this rank has committed it.
    committed: Generation | None = None
    #: Number of exchanges of votes that it began, in all generations.
    step: int = 0
    #: Activity in that step. The coordinator detects a stalled loop by step and activity that do
    #: not change.
    activity: Activity = Activity.RESTS


class Directive(_Wire, frozen=True):
    target: Generation | None = None
    commit: bool = False
    #: The group continues or ends without this instance. It returns its requests and becomes
    #: STANDBY.
    dismissed: bool = False


class StartWave(_Wire, frozen=True):
    """Sent by a rank that gets work outside a wave, to wake the others.

    It is repeated until the wave's first exchange, and harmless when late or lost.
    """

    generation: int
    nonce: str
    wave: int


# The HTTP resource: GET /topology, PUT /topology


class TopologyRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of PUT /topology: the requested topology.

    A repeated operation id changes nothing. A new one supersedes an operation that has not
    committed.
    """

    operation_id: str
    #: Names of pods, in no order.
    members: list[str]


class OperationPhase(enum.StrEnum):
    #: The operation waits for members that have not registered.
    WAITING = "waiting"
    PREPARING = "preparing"
    COMMITTING = "committing"
    DONE = "done"
    #: The coordinator retries the operation later, if it is still requested.
    FAILED = "failed"
    SUPERSEDED = "superseded"


#: Phases of an operation that has not ended, in order.
ACTIVE_PHASES = (OperationPhase.WAITING, OperationPhase.PREPARING, OperationPhase.COMMITTING)


class OperationStatus(msgspec.Struct, kw_only=True, omit_defaults=True):
    #: Empty for operations without a request: recovery and rebalancing.
    operation_id: str
    #: form, scale, recover or rebalance.
    kind: str
    phase: OperationPhase
    #: Number of the generation that it leads to; 0: not known yet.
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
