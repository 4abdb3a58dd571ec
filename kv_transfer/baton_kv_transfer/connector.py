"""The interface of the KV connector, which moves the KV blocks of a request between engines.

The scheduler side decides what to transfer, without I/O and without torch. Each step carries these
decisions to the worker side in a `ConnectorMetadata`. The worker side owns the memory and a thread
that moves bytes, and returns results in a `ConnectorOutput`.

    producer   This engine computes the prompt of the request. Each step that completes blocks
               carries a `BlockSave`. The worker publishes the blocks as soon as their KV is
               written. The blocks stay allocated until the worker reports `finished_sending`.
    consumer   The request waits in WAITING_FOR_REMOTE_KV with its blocks allocated. One
               `LoadRequest` starts the load. The worker reports one `LoadResult`: all blocks
               arrived and were verified, or the load failed.

On both sides, the scheduler frees the blocks of a transfer only after the worker has reported its
end, even after a cancel.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from baton_kv_transfer.memory.layout import RankAddress
from baton_kv_transfer.memory.slot_memory import SlotMemory
from baton_protocol.block_hash import BlockHash


@dataclass(slots=True)
class BlockSave:
    """The blocks that one step of a producer completes for one transfer."""

    #: Id of the transfer, which the gateway draws for each attempt of a request.
    transfer_id: str
    #: Index of block_ids[0] in the sequence.
    first_block_index: int
    block_ids: list[int]
    #: Chained hash of the tokens of each block. A partial block has the hash of the tokens that it
    #: holds.
    block_hashes: list[BlockHash]
    #: Number of tokens from the start of the sequence to the end of these blocks.
    num_tokens: int
    #: No more blocks follow. The blocks include the partial block at the end of the prompt.
    last: bool


@dataclass(slots=True)
class LoadRequest:
    """A consumer's request to load blocks from a producer."""

    transfer_id: str
    remote_host: str
    #: Port of the side channel of the producer's first worker. That worker names the other workers.
    remote_port: int
    peer_instance_id: str
    #: Index of block_ids[0] in the sequence. Earlier blocks were found in the local prefix cache.
    first_block_index: int
    block_ids: list[int]
    #: Expected hash of each block, compared with the hash that the producer publishes.
    block_hashes: list[BlockHash]


@dataclass(slots=True)
class LoadWait:
    """A consumer's load that waits until the scheduler has allocated the request's blocks.

    Until the LoadRequest arrives, the worker sends heartbeats, so that the producer keeps the
    blocks. The LoadRequest has no blocks if this engine no longer needs any.
    """

    remote_host: str
    #: As in LoadRequest.
    remote_port: int
    peer_instance_id: str


@dataclass(slots=True)
class ConnectorMetadata:
    """Work that travels with a step from the scheduler side to the worker side."""

    saves: list[BlockSave] = field(default_factory=list)
    loads: list[LoadRequest] = field(default_factory=list)
    #: Producer: transfer id to the instance id of the only consumer that may fetch the blocks. The
    #: scheduler adds an offer when it accepts the request.
    offers: dict[str, str] = field(default_factory=dict)
    #: Ids of transfers that the scheduler cancelled. Each id still appears in finished_sending or
    #: load_results.
    cancels: list[str] = field(default_factory=list)
    #: Consumer: waiting loads by transfer id. A LoadRequest follows for each of them.
    waits: dict[str, LoadWait] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.saves or self.loads or self.offers or self.cancels or self.waits)


@dataclass(slots=True)
class LoadResult:
    """The number of leading valid blocks of a load, and the reason if blocks are missing."""

    #: Number of leading blocks that arrived and were verified. The content of the other blocks is
    #: undefined. Nothing writes to the load's blocks any more.
    num_valid_blocks: int
    #: Why blocks are missing; empty if no block is missing.
    error: str = ""


@dataclass(slots=True)
class ConnectorOutput:
    """Transfers and loads that have ended. `get_finished` returns them for the scheduler side."""

    #: Ids of transfers whose blocks no consumer reads any more. The blocks were fetched, the
    #: transfer was cancelled, or the lease expired.
    finished_sending: set[str] = field(default_factory=set)
    #: Results of loads, by transfer id. Each LoadRequest has exactly one result.
    load_results: dict[str, LoadResult] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.finished_sending or self.load_results)


class FailureReason(enum.StrEnum):
    """Reasons why a load fails, and the values of the label `reason` in metrics.

    LoadResult.error has the full message.
    """

    #: This engine's scheduler cancelled the load.
    CANCELLED = "cancelled"
    #: The producer ended the transfer: the request was cancelled or never arrived, no slot became
    #: free, or the lease expired.
    PRODUCER_CANCELLED = "producer_cancelled"
    #: The handshake failed: the model, layout, release or token differs.
    REFUSED = "refused"
    #: The connection or a transfer broke, or another instance answers at the producer's address.
    PEER_LOST = "peer_lost"
    #: No block arrived before the load's deadline, or the handshake took too long.
    TIMEOUT = "timeout"
    #: A block differed from its checksum twice.
    CHECKSUM = "checksum"
    #: The producer computed other tokens, or fewer tokens, than this engine's request has. The two
    #: engines received different requests.
    OTHER_PROMPT = "other_prompt"
    #: The producer sent an invalid message.
    PROTOCOL = "protocol"
    #: The connector's own thread failed.
    DEFECT = "defect"


class ConnectorStats(msgspec.Struct):
    """Counters and gauges of one worker's connector, for the engine's metrics.

    Counters count from the start of the engine. `total` adds the counters of several workers.
    """

    #: Blocks published to a consumer. With push, blocks written into its memory.
    blocks_sent: int = 0
    blocks_received: int = 0
    #: Bytes written into consumers' memory (push).
    bytes_sent: int = 0
    #: Bytes that arrived and were verified.
    bytes_received: int = 0
    #: Memory ranges in posted transfers, after adjacent ranges were merged.
    descriptors_posted: int = 0
    transfers_completed: int = 0
    #: Failed transfers by FailureReason.
    failures: dict[str, int] = {}
    checksum_failures: int = 0
    leases_expired: int = 0
    #: Memory ranges in peers' requests that were refused. The peers may not access these ranges.
    descriptors_refused: int = 0
    handshakes_refused: int = 0
    #: Number of fences. A fence cuts all peers off from the KV memory. It is needed when a producer
    #: does not confirm the end of its writes, or when reads do not end.
    memory_fences: int = 0
    #: Sum over loads of the time from the start to the end of the load.
    receive_seconds: float = 0.0
    #: Time from the first write of a push to the end of its last write, summed over all pushes. A
    #: push goes to one worker of a consumer.
    send_seconds: float = 0.0
    #: Gauge: bytes requested but not posted yet, because the peer's limit of bytes in flight is
    #: reached.
    queued_bytes: int = 0
    #: Gauge: bytes of posted transfers that have not ended.
    inflight_bytes: int = 0
    #: Bytes sent and received by transport, mechanism and device, such as `ucx tcp/lo`. Blocks that
    #: failed verification are included.
    bytes_moved: dict[str, int] = {}
    #: Why the connector cannot serve until the engine is restarted; empty while it works.
    failure: str = ""

    def count_failure(self, reason: FailureReason) -> None:
        self.failures[reason] = self.failures.get(reason, 0) + 1

    @staticmethod
    def total(parts: Sequence[ConnectorStats]) -> ConnectorStats:
        """Return the sum of the statistics of several workers.

        A transfer between several workers of an engine and a peer counts once for each of these
        workers. `failure` is taken from the first entry of `parts` in which it is set.
        """
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
    """The worker side of the KV connector: owns the transfer agent and a thread.

    In vLLM's `KVConnectorBase_V1`, `start` is called `start_load_kv`. `save` is `save_kv_layer` for
    all layers of a step.

    The engine's thread calls all methods. Only `register_kv_cache` and `shutdown` may block.
    """

    #: Port of the side channel, bound on the pod's address; 0 if this engine only consumes.
    port: int

    @abc.abstractmethod
    def register_kv_cache(self, memory: SlotMemory, ranks: Sequence[RankAddress] = ()) -> None:
        """Register the KV memory with the transfer agent and start the connector's thread.

        Args:
            memory: KV memory of this worker.
            ranks: addresses of all workers of this engine in rank order; empty for a single worker.

        Raises:
            ValueError: memory was registered before, the workers' heads do not add up to the
                model's, or the transport does not move memory of this type.
        """

    @abc.abstractmethod
    def start(self, metadata: ConnectorMetadata) -> None:
        """Queue the step's offers, waits, loads and cancels for the connector's thread.

        The engine calls this before the forward pass, and in steps without a forward pass.
        """

    @abc.abstractmethod
    def save(self, metadata: ConnectorMetadata) -> None:
        """Queue the blocks that the step completed (`metadata.saves`) for publication.

        The engine calls this after the forward pass.
        """

    @abc.abstractmethod
    def get_finished(self) -> ConnectorOutput:
        """Return the transfers and loads that ended since the previous call of this method."""

    @abc.abstractmethod
    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Set the function that the connector's thread calls when get_finished has new results."""

    @abc.abstractmethod
    def stats(self) -> ConnectorStats: ...

    @abc.abstractmethod
    def shutdown(self) -> None:
        """End the connector's thread and close the connections to peers."""
