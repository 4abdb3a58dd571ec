"""The KV connector: how an engine hands a request's blocks to another engine, or takes them.

The scheduler side decides (no I/O, no torch) and describes its wishes as a `ConnectorMetadata` that travels with the step to
the worker side, which owns the memory and a thread that moves bytes. The worker answers with a `ConnectorOutput`.

    producer   request prefills; each step that completes blocks carries a `BlockSave`; the worker publishes the blocks to the
               consumer once the step has run. When the request ends, its blocks stay until the worker reports `finished_sending`.
    consumer   request waits (WAITING_FOR_REMOTE_KV) with its blocks allocated; one `BlockLoad` starts the transfer; the worker
               reports a `LoadResult` when all blocks arrived and were proved, or when it gave up.

Life cycle of the blocks on both sides: a block that may be read or written by the transfer belongs to it until the worker says
otherwise; cancelling only shortens the wait for that.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from baton_engine.protocol.block_hash import BlockHash


class KVCacheLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of one engine's KV memory: [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim], contiguous."""

    num_blocks: int
    num_kv_heads: int
    num_layers: int
    block_size: int
    head_dim: int
    dtype: str
    """torch's name without prefix: float32, bfloat16, float16."""
    name: str = "NHL2BD"

    @property
    def block_nbytes(self) -> int:
        itemsize = {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]
        return self.num_kv_heads * self.num_layers * 2 * self.block_size * self.head_dim * itemsize


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
class BlockLoad:
    """Consumer: fetch these blocks."""

    transfer_id: str
    remote_host: str
    remote_port: int
    peer_instance_id: str
    first_block_index: int
    """Index in the sequence of block_ids[0]; earlier blocks were found in the local prefix cache."""
    block_ids: list[int]
    block_hashes: list[BlockHash]
    """What each block must hold: compared with what the producer says it is."""


@dataclass(slots=True)
class ConnectorMetadata:
    """From the scheduler side to the worker side, with a step."""

    saves: list[BlockSave] = field(default_factory=list)
    loads: list[BlockLoad] = field(default_factory=list)
    offers: dict[str, str] = field(default_factory=dict)
    """Producer: transfer id -> instance id of the only consumer that may ask for it. Sent when the request is accepted."""
    cancels: list[str] = field(default_factory=list)
    """Transfer ids the scheduler no longer wants; each still ends in finished_sending or load_results."""

    def __bool__(self) -> bool:
        return bool(self.saves or self.loads or self.offers or self.cancels)


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
    """By transfer id; exactly one per BlockLoad."""

    def __bool__(self) -> bool:
        return bool(self.finished_sending or self.load_results)


class ConnectorStats(msgspec.Struct):
    """Counters since start; the engine's metrics read them."""

    blocks_sent: int = 0
    blocks_received: int = 0
    bytes_received: int = 0
    transfers_completed: int = 0
    transfers_failed: int = 0
    checksum_failures: int = 0
    leases_expired: int = 0
    receive_seconds: float = 0.0
    """Time between a load's start and its end, summed."""
    failure: str = ""
    """Why the connector moves nothing any more; empty while it works."""


class KVConnectorWorker(abc.ABC):
    """Owns the transfer agent and its thread. All methods are called by the engine's thread and return at once."""

    port: int
    """Port of the side channel, bound on the pod's address; 0 if this engine only consumes."""

    @abc.abstractmethod
    def register_kv_cache(self, base_address: int, layout: KVCacheLayout) -> None:
        """Gives the memory to the agent and starts serving.

        Args:
            base_address: of block 0 in host memory; block i begins at base_address + i * layout.block_nbytes.
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
