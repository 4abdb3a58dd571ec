"""The KV connector: how an engine hands a request's blocks to another engine, or takes them.

The scheduler side decides (no I/O, no torch) and describes its requests as a `ConnectorMetadata` that travels with the step to
the worker side, which owns the memory and a thread that moves bytes. The worker answers with a `ConnectorOutput`.

    producer   request prefills; each step that completes blocks carries a `BlockSave`; the worker publishes the blocks to the
               consumer once the step has run. When the request ends, its blocks stay until the worker reports `finished_sending`.
    consumer   request waits (WAITING_FOR_REMOTE_KV) with its blocks allocated; one `LoadRequest` starts the transfer; the worker
               reports a `LoadResult` when all blocks arrived and were proved, or when it gave up.

Life cycle of the blocks on both sides: a block that may be read or written by the transfer belongs to it until the worker says
otherwise; cancelling only shortens the wait for that.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from baton_kv_transfer.memory.kv_memory import KVMemory
from baton_kv_transfer.memory.layout import RankAddress
from baton_protocol.block_hash import BlockHash


@dataclass(slots=True)
class BlockSave:
    """Producer: this step completes these blocks (and, with `last`, the partial one at the prompt's end)."""

    transfer_id: str
    first_block_index: int
    """Index in the sequence of block_ids[0]."""
    block_ids: list[int]
    block_hashes: list[BlockHash]
    """Chained hash of each block's tokens; of the tokens it holds for a partial one."""
    num_tokens: int
    """Tokens of the sequence covered once these blocks are counted in."""
    last: bool


@dataclass(slots=True)
class LoadRequest:
    """Consumer: fetch these blocks."""

    transfer_id: str
    remote_host: str
    remote_port: int
    """Side channel of the producer's first worker: it names the others."""
    peer_instance_id: str
    first_block_index: int
    """Index in the sequence of block_ids[0]; earlier blocks were found in the local prefix cache."""
    block_ids: list[int]
    block_hashes: list[BlockHash]
    """What each block must hold: compared with what the producer says it is."""


@dataclass(slots=True)
class LoadWait:
    """Consumer: a load has no memory yet. Until it begins, be it with no blocks, the producer is asked to keep its blocks."""

    remote_host: str
    remote_port: int
    """As in LoadRequest."""
    peer_instance_id: str


@dataclass(slots=True)
class ConnectorMetadata:
    """From the scheduler side to the worker side, with a step."""

    saves: list[BlockSave] = field(default_factory=list)
    loads: list[LoadRequest] = field(default_factory=list)
    offers: dict[str, str] = field(default_factory=dict)
    """Producer: transfer id -> instance id of the only consumer that may ask for it. Sent when the request is accepted."""
    cancels: list[str] = field(default_factory=list)
    """Transfer ids the scheduler no longer wants; each still ends in finished_sending or load_results."""
    waits: dict[str, LoadWait] = field(default_factory=dict)
    """Consumer: by transfer id. A LoadRequest follows each."""

    def __bool__(self) -> bool:
        return bool(self.saves or self.loads or self.offers or self.cancels or self.waits)


@dataclass(slots=True)
class LoadResult:
    num_valid_blocks: int
    """Leading blocks of the load that arrived whole and right. The rest holds nothing of use, and is no longer written to."""
    error: str = ""
    """Non-empty: why not all."""


@dataclass(slots=True)
class ConnectorOutput:
    """From the worker side to the scheduler side."""

    finished_sending: set[str] = field(default_factory=set)
    """Transfer ids whose blocks nobody will read any more: fetched, cancelled, or the lease ended."""
    load_results: dict[str, LoadResult] = field(default_factory=dict)
    """By transfer id; exactly one per LoadRequest."""

    def __bool__(self) -> bool:
        return bool(self.finished_sending or self.load_results)


class FailureReason(enum.StrEnum):
    """Why a load did not bring all its blocks: a label of the metrics. The text for people is LoadResult.error."""

    CANCELLED = "cancelled"
    """By this engine's scheduler."""
    PRODUCER_CANCELLED = "producer_cancelled"
    """It ended the transfer: its request was cancelled, never came, found no slots, or heard of no consumer in time."""
    REFUSED = "refused"
    """The handshake: another model, layout, release or token."""
    PEER_LOST = "peer_lost"
    """Its connection, or a transfer to or from it, broke; or another instance answers at its address."""
    TIMEOUT = "timeout"
    CHECKSUM = "checksum"
    OTHER_PROMPT = "other_prompt"
    """The producer computed other tokens, or fewer, than are asked for: the two engines were given different requests."""
    PROTOCOL = "protocol"
    """The producer said something that cannot be."""
    DEFECT = "defect"
    """The connector's own thread failed."""


class ConnectorStats(msgspec.Struct):
    """Counters since start, and a few gauges; the engine's metrics read them. Those of several workers add up."""

    blocks_sent: int = 0
    """Published to a consumer; with push also written into its memory."""
    blocks_received: int = 0
    bytes_sent: int = 0
    """Written by push."""
    bytes_received: int = 0
    """Proved, read or written by push."""
    descriptors_posted: int = 0
    """After merging."""
    transfers_completed: int = 0
    transfers_failed: int = 0
    failures: dict[str, int] = {}
    """transfers_failed by FailureReason."""
    checksum_failures: int = 0
    leases_expired: int = 0
    descriptors_refused: int = 0
    """A peer named memory that it may not touch."""
    handshakes_refused: int = 0
    memory_fences: int = 0
    """Times all peers were cut off because one did not confirm that it writes no more."""
    receive_seconds: float = 0.0
    """Time between a load's start and its end, summed."""
    send_seconds: float = 0.0
    """Time between a push's first write and its last, summed."""
    queued_bytes: int = 0
    """Gauge: wanted, not posted yet, because a peer's window is full."""
    inflight_bytes: int = 0
    """Gauge: posted."""
    bytes_moved: dict[str, int] = {}
    """Sent and received, by transport and transport: `ucx tcp/lo`. Blocks that failed verification count."""
    failure: str = ""
    """Why the connector moves nothing any more; empty while it works."""

    def count_failure(self, reason: FailureReason) -> None:
        self.transfers_failed += 1
        self.failures[reason] = self.failures.get(reason, 0) + 1

    @staticmethod
    def total(parts: Sequence[ConnectorStats]) -> ConnectorStats:
        """Of several workers; transfers are counted once per worker that took part."""
        total = ConnectorStats()
        for part in parts:
            for name in ConnectorStats.__struct_fields__:
                mine, theirs = getattr(total, name), getattr(part, name)
                if isinstance(theirs, dict):
                    for key, value in theirs.items():
                        mine[key] = mine.get(key, 0) + value
                else:
                    setattr(
                        total, name, mine or theirs if isinstance(theirs, str) else mine + theirs
                    )
        return total


class KVConnectorWorker(abc.ABC):
    """Owns the transfer agent and its thread. All methods are called by the engine's thread and return at once."""

    port: int
    """Port of the side channel, bound on the pod's address; 0 if this engine only consumes."""

    @abc.abstractmethod
    def register_kv_cache(self, memory: KVMemory, ranks: Sequence[RankAddress] = ()) -> None:
        """Gives the memory to the agent and starts serving.

        Args:
            ranks: all workers of this engine, this one included, in rank order; empty: there is only this one.
        """

    @abc.abstractmethod
    def start(self, metadata: ConnectorMetadata) -> None:
        """Begins offers, loads and cancels; called before the step's forward pass (and also in steps without one)."""

    @abc.abstractmethod
    def save(self, metadata: ConnectorMetadata) -> None:
        """Publishes the step's saves; called after the forward pass: the blocks are complete in memory."""

    @abc.abstractmethod
    def get_finished(self) -> ConnectorOutput:
        """What ended since the last call."""

    @abc.abstractmethod
    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """`wakeup` is called from the transfer thread whenever get_finished would return something new."""

    @abc.abstractmethod
    def stats(self) -> ConnectorStats: ...

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Ends the thread; peers see the connection go away."""
