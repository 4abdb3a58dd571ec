"""What the ranks of an expert-parallel group and their coordinator tell each other (msgspec over ZMQ), and the HTTP resource.

    rank                             coordinator
    Status          ->                                  every STATUS_INTERVAL_S, and at once when it changes
                    <-               Directive          answer to each, and at once when it changes

Both are whole states, never events: whoever missed one knows everything after the next, and a coordinator that was restarted
learns from the ranks what it needs. Only what a rank does with a directive depends on its own state:

    target None              drop what is prepared and was not committed
    target, commit False     prepare it beside what serves; say so in Status.prepared, or why not in Status.failure
    target, commit True      adopt it. Members of a living generation do so at one step that all of them agree on (`elastic.rank.waves`);
                             newcomers, and all members if `urgent`, at once

Between ranks only StartWave travels.
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

    name: str
    """Of the pod: what topologies are asked for by."""
    instance_id: str
    host: str
    engine_port: int
    link_port: int
    """Where StartWave goes: a ROUTER of the rank's link."""
    store_port: int
    """The rank's own rendezvous store."""


Placement = tuple[tuple[tuple[int, ...], ...], ...]
"""[sparse layer][rank][slot]: the expert in the slot. Every rank has equally many slots; every expert has one or more."""


class Generation(_Wire, frozen=True):
    """A topology: who the ranks are and which experts each holds. Never changed; another one is another generation."""

    number: int
    """From 1. What names an older one is refused."""
    nonce: str
    """Two attempts at one number are two generations: process groups are named after both."""
    members: tuple[Member, ...]
    """In rank order."""
    placement: Placement
    store_host: str
    """Of the member in whose store the process groups of this generation meet."""
    store_port: int
    operation_id: str = ""
    urgent: bool = False
    """The generation before it is broken: its members adopt this one without a step of theirs."""

    @property
    def size(self) -> int:
        return len(self.members)

    def rank_of(self, instance_id: str) -> int | None:
        for rank, member in enumerate(self.members):
            if member.instance_id == instance_id:
                return rank
        return None


class RankPhase(enum.StrEnum):
    LOADING = "loading"
    """Not ready to be a member."""
    STANDBY = "standby"
    """Loaded, without a generation: it serves nobody."""
    SERVING = "serving"
    BROKEN = "broken"
    """Of a generation that lost a member: it keeps its requests and waits for the next generation."""


class Activity(enum.StrEnum):
    """Of a rank's loop, as its link sees it: also while the loop stands still."""

    RESTS = "rests"
    """Outside steps."""
    WAITS = "waits"
    """In the exchange of votes before a step."""
    RUNS = "runs"
    """A step, in which the ranks exchange tokens, too."""


class ExpertLoads(_Wire, frozen=True):
    """Tokens routed since the generation began, as this rank's own requests chose: [sparse layer][expert]."""

    tokens: tuple[tuple[int, ...], ...]


class Status(_Wire, frozen=True):
    """All the coordinator needs to know of a rank."""

    member: Member
    phase: RankPhase
    num_experts: int = 0
    """Of each sparse layer; known once loaded."""
    num_sparse_layers: int = 0
    num_redundant_experts: int = 0
    """As the rank is configured: slots beyond one per expert that the group should have at least."""
    generation: Generation | None = None
    """What it serves in, or served in when it broke."""
    prepared: str = ""
    """Nonce of the generation that is prepared and not adopted yet."""
    commit_seen: str = ""
    """Nonce of the generation whose commit it was told."""
    failed: str = ""
    """Nonce of the generation that could not be prepared."""
    failure: str = ""
    """Why it could not, or why the generation broke."""
    suspects: tuple[str, ...] = ()
    """Instance ids of members that do not answer."""
    wave: int = 0
    wave_running: bool = False
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    loads: ExpertLoads | None = None
    leaving: bool = False
    """It was told to shut down, takes no new requests, and asks for a generation without it."""
    committed: Generation | None = None
    """That it was told to adopt, and has not adopted yet."""
    step: int = 0
    """Exchanges of votes that it has begun, in all generations."""
    activity: Activity = Activity.RESTS
    """Of that step. Who compares it with what was said before sees whether the loop stands still."""


class Directive(_Wire, frozen=True):
    coordinator_id: str
    """Drawn at process start."""
    target: Generation | None = None
    commit: bool = False
    dismissed: bool = False
    """The group goes on, or ends, without this instance: it gives its requests back and begins anew as STANDBY."""


class StartWave(_Wire, frozen=True):
    """Whoever gets work outside a wave wakes the others. Repeated until the wave's first exchange; harmless when late or lost."""

    generation: int
    nonce: str
    wave: int


# The HTTP resource: GET /topology, PUT /topology


class TopologyRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """PUT /topology: what should be. The same operation id again changes nothing; a newer one supersedes what is not committed."""

    operation_id: str
    members: list[str]
    """Names of pods, in no order."""


class OperationPhase(enum.StrEnum):
    WAITING = "waiting"
    """For members that have not registered."""
    PREPARING = "preparing"
    COMMITTING = "committing"
    DONE = "done"
    FAILED = "failed"
    """Tried again after a while, if it is still what should be."""
    SUPERSEDED = "superseded"


class OperationStatus(msgspec.Struct, kw_only=True, omit_defaults=True):
    operation_id: str
    """Empty: nobody asked for it. The ranks recover, or place experts anew, by themselves."""
    kind: str
    """form, scale, recover or rebalance."""
    phase: OperationPhase
    generation: int
    """That it leads to; 0: not drawn yet."""
    reason: str = ""
    seconds: dict[str, float] = {}
    """How long each phase took, by its name; the present one so far."""


class MemberStatus(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str
    instance_id: str
    phase: RankPhase
    rank: int | None = None
    """None: not of the present generation."""
    num_running: int = 0
    num_waiting: int = 0
    reason: str = ""


class TopologyStatus(msgspec.Struct, kw_only=True, omit_defaults=True):
    """GET /topology: what is."""

    generation: int
    """0: none yet."""
    desired: list[str]
    members: list[MemberStatus]
    """All that are registered, ranks first."""
    operation: OperationStatus | None = None
    """The running one, or the last."""
    store: str = ""
    """host:port of the store in which the process groups of the generation have met."""
