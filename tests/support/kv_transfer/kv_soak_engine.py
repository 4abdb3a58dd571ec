"""An engine for the KV soak: connectors over memory whose words follow from the chain hash.

For the soak test of KV transfers.

To find stray writes, free blocks and slots contain a poison, which is checked at allocation.
"""

from __future__ import annotations

import hashlib
import random
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton_engine.executor.multiproc.connector_outputs import OutputAggregator
from baton_kv_transfer.connector import (
    BlockSave,
    ConnectorMetadata,
    ConnectorStats,
    LoadRequest,
    LoadResult,
)
from baton_kv_transfer.memory.layout import HeadRange, KVCacheLayout, RankAddress
from baton_kv_transfer.memory.slot_memory import HostMemory
from baton_kv_transfer.transfer_connector import TransferConnector
from baton_protocol.options.config import KVRole, KVTransferConfig
from baton_protocol.service_key import ServiceKey

HOST = "127.0.0.1"
NUM_HEADS = 4
NUM_BLOCKS = 160
#: Maximum number of blocks of one transfer.
MAX_BLOCKS = 24
LEASE_S = 1.0
LOAD_TIMEOUT_S = 1.0
POISON = np.uint64(0xBAD0BAD0BAD0BAD0)


@dataclass(frozen=True)
class EngineSpec:
    name: str
    role: KVRole
    #: Number of heads of each worker.
    heads: tuple[int, ...]
    transport: str
    mode: str = "pull"
    #: Number of slots in which blocks are staged. 0: they are accessed in place.
    num_slots: int = 0
    head_dim: int = 32
    #: Fraction of the blocks that are damaged in transit.
    corrupt: float = 0.0
    #: Fraction of the transfers that this side cancels.
    cancel: float = 0.0
    service_key_file: str = ""


def chain_hash(sequence: int, index: int) -> bytes:
    return hashlib.blake2b(f"{sequence}/{index}".encode(), digest_size=16).digest()


def head_content(block_hash: bytes, head: int, num_words: int) -> NDArray[np.uint64]:
    """Return the expected content of one head of a block: [num_words]."""
    key = int.from_bytes(
        hashlib.blake2b(block_hash + bytes([head]), digest_size=8).digest(), "little"
    )
    with np.errstate(over="ignore"):
        return np.arange(key & 0xFFFF, (key & 0xFFFF) + num_words, dtype=np.uint64) * np.uint64(
            key | 1
        )


class SoakMemory(HostMemory):
    """Memory that counts used slots, sometimes refuses slots, and damages blocks in transit.

    A producer's block is damaged after its checksum is computed. A consumer's block is damaged
    before.
    """

    def __init__(self, spec: EngineSpec, layout: KVCacheLayout, rng: random.Random) -> None:
        num_slots = spec.num_slots or layout.num_blocks
        words = layout.head_nbytes // 8
        self.blocks = np.full(
            (layout.num_blocks, layout.num_kv_heads, words), POISON, dtype=np.uint64
        )
        self.slots = (
            self.blocks
            if not spec.num_slots
            else np.full((num_slots, *self.blocks.shape[1:]), POISON)
        )
        super().__init__(self.slots.ctypes.data, layout)
        self.num_slots = num_slots
        #: Number of uses by slot.
        self.in_use: dict[int, int] = {}
        self.num_damaged = 0
        self.problems: list[str] = []
        self._spec = spec
        self._rng = rng
        self._free = list(range(spec.num_slots))
        #: Head, word and original value of damaged slots.
        self._damaged: dict[int, tuple[int, int, np.uint64]] = {}

    def expose(self, block_ids: Sequence[int]) -> list[int] | None:
        slots = self._take(block_ids)
        if slots is not None and self._spec.num_slots:
            self.slots[slots] = self.blocks[block_ids]
        return slots

    def accept(self, block_ids: Sequence[int]) -> list[int] | None:
        return self._take(block_ids)

    def commit(self, slots: Sequence[int], block_ids: Sequence[int], heads: HeadRange) -> None:
        if self._spec.num_slots:
            first = heads.first - self.layout.first_kv_head
            self.blocks[block_ids, first : first + heads.count] = self.slots[
                slots, first : first + heads.count
            ]

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot not in self.in_use:
                self.problems.append(f"slot {slot} was released and is not in use")
                continue
            self.in_use[slot] -= 1
            if not self.in_use[slot]:
                del self.in_use[slot]
                self._heal(slot)
                if self._spec.num_slots:
                    self.slots[slot] = POISON
                    self._free.append(slot)

    def block_sums(self, slots: Sequence[int], heads: HeadRange) -> NDArray[np.uint64]:
        producing = self._spec.role is KVRole.PRODUCER
        for slot in slots:
            self._heal(slot)
            if not producing:
                self._damage(slot, heads)
        sums = super().block_sums(slots, heads)
        for slot in slots if producing else ():
            self._damage(slot, heads)
        return sums

    def _take(self, block_ids: Sequence[int]) -> list[int] | None:
        if self.in_use and self._rng.random() < 0.05:
            return None
        slots = list(block_ids)
        if self._spec.num_slots:
            if len(self._free) < len(block_ids):
                return None
            self._rng.shuffle(self._free)
            slots = [self._free.pop() for _ in block_ids]
            if (self.slots[slots] != POISON).any():
                self.problems.append("a free slot was written to")
        for slot in slots:
            self.in_use[slot] = self.in_use.get(slot, 0) + 1
        return slots

    def _damage(self, slot: int, heads: HeadRange) -> None:
        if self._rng.random() >= self._spec.corrupt:
            return
        head = self._rng.randrange(heads.first, heads.end) - self.layout.first_kv_head
        word = self._rng.randrange(self.slots.shape[2])
        if self._spec.role is KVRole.PRODUCER:  # a consumer reads the block again, over the damage
            self._damaged[slot] = head, word, self.slots[slot, head, word]
        self.slots[slot, head, word] ^= np.uint64(1 << self._rng.randrange(64))
        self.num_damaged += 1

    def _heal(self, slot: int) -> None:
        if slot in self._damaged:
            head, word, value = self._damaged.pop(slot)
            self.slots[slot, head, word] = value


@dataclass
class _Send:
    sequence: int
    num_blocks: int
    block_ids: list[int]
    published: int = 0
    cancelled: bool = False
    done: bool = False


@dataclass
class _Load:
    #: The sequence whose content is expected.
    sequence: int
    first: int
    block_ids: list[int]
    cancelled: bool = False


@dataclass
class Ended:
    """The end of one side of a transfer."""

    #: Name of the engine.
    name: str
    transfer_id: str
    #: Whether the side is the producer.
    sent: bool
    num_valid: int = 0
    num_wanted: int = 0
    error: str = ""
    #: Failed rank transfers of this engine so far, by reason.
    failures: dict[str, int] = field(default_factory=dict)


@dataclass
class Report:
    """The state of one engine."""

    name: str
    #: Requests that have not ended.
    busy: list[str]
    #: Violated invariants.
    problems: list[str]
    checksum_failures: int
    memory_fences: int
    num_damaged: int


class SoakEngine:
    """The connectors and memory of one engine. Call `step()` repeatedly. Not thread-safe."""

    def __init__(self, spec: EngineSpec, seed: str, port: int, wakeup: Callable[[], None]) -> None:
        """Create an engine.

        Args:
            port: side-channel port of the first worker; 0 for any.
        """
        self.spec = spec
        self.instance_id = f"{spec.name}-{uuid.uuid4().hex[:8]}"
        self._rng = random.Random(seed)
        self._problems: list[str] = []
        self._free = list(range(NUM_BLOCKS))
        self._backlog: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._sends: dict[str, _Send] = {}
        self._loads: dict[str, _Load] = {}
        self._ended: set[str] = set()
        self._memories: list[SoakMemory] = []
        config = KVTransferConfig(
            role=spec.role,
            transport=spec.transport,
            mode=spec.mode,
            port=port,
            lease_s=LEASE_S,
            load_timeout_s=LOAD_TIMEOUT_S,
            max_inflight_bytes=2**18,
        )
        first, ranges = 0, []
        for count in spec.heads:
            ranges.append(HeadRange(first, count))
            first += count
        self._connectors = [
            TransferConnector(
                config,
                instance_id=self.instance_id,
                compatibility_hash="soak",
                host=HOST,
                rank=rank,
                service_key=ServiceKey.load(spec.service_key_file),
            )
            for rank in range(len(ranges))
        ]
        self._outputs = OutputAggregator(len(ranges))
        self.port = self._connectors[0].port
        ranks = [
            RankAddress(HOST, connector.port, heads)
            for connector, heads in zip(self._connectors, ranges, strict=True)
        ]
        for rank, (connector, heads) in enumerate(zip(self._connectors, ranges, strict=True)):
            layout = KVCacheLayout(
                num_blocks=NUM_BLOCKS,
                num_kv_heads=heads.count,
                num_layers=2,
                block_size=4,
                head_dim=spec.head_dim,
                dtype="float32",
                first_kv_head=heads.first,
                total_kv_heads=NUM_HEADS,
            )
            memory = SoakMemory(spec, layout, random.Random(f"{seed}/{rank}"))
            self._memories.append(memory)
            connector.set_wakeup(wakeup)
            connector.register_kv_cache(memory, ranks)

    @property
    def is_active(self) -> bool:
        """Whether `step()` has work even without a wakeup."""
        return bool(self._backlog or self._loads) or any(
            not send.done for send in self._sends.values()
        )

    def offer(self, transfer_id: str, consumer: str, sequence: int, num_blocks: int) -> None:
        self._deliver(ConnectorMetadata(offers={transfer_id: consumer}))
        self._sends[transfer_id] = _Send(sequence, num_blocks, [])
        self._backlog.append(("send", (transfer_id,)))

    def load(
        self, transfer_id: str, port: int, producer: str, sequence: int, first: int, num_blocks: int
    ) -> None:
        self._backlog.append(("load", (transfer_id, port, producer, sequence, first, num_blocks)))

    def step(self) -> list[Ended]:
        """Take random actions, and return the transfers that ended."""
        self._admit()
        for transfer_id, send in list(self._sends.items()):
            self._advance(transfer_id, send)
        for transfer_id, load in self._loads.items():
            if not load.cancelled and self._rng.random() < self.spec.cancel / 20:
                load.cancelled = True
                self._deliver(ConnectorMetadata(cancels=[transfer_id]))
        for rank, connector in enumerate(self._connectors):
            self._outputs.add(rank, connector.get_finished())
        output = self._outputs.take()
        ended = [self._sent(transfer_id) for transfer_id in output.finished_sending]
        return ended + [
            self._loaded(transfer_id, result) for transfer_id, result in output.load_results.items()
        ]

    def report(self) -> Report:
        stats = [connector.stats() for connector in self._connectors]
        busy = [f"send {transfer_id}" for transfer_id in self._sends] + [
            f"load {name}" for name in self._loads
        ]
        busy += [f"backlog {request}" for request in self._backlog]
        for rank, (memory, stat) in enumerate(zip(self._memories, stats, strict=True)):
            if memory.in_use:
                busy.append(f"worker {rank}: slots {memory.in_use}")
            if stat.queued_bytes or stat.inflight_bytes:
                busy.append(
                    f"worker {rank}: {stat.queued_bytes} bytes queued, "
                    f"{stat.inflight_bytes} in flight"
                )
        if not busy:
            for memory in self._memories:
                if (memory.blocks[self._free] != POISON).any() or len(
                    set(self._free)
                ) != NUM_BLOCKS:
                    self._problems.append(
                        "at the end blocks are missing or were written to while they were free"
                    )
        problems = self._problems + [
            problem for memory in self._memories for problem in memory.problems
        ]
        problems += [stat.failure for stat in stats if stat.failure]
        return Report(
            self.spec.name,
            busy,
            [f"{self.instance_id}: {problem}" for problem in problems],
            sum(stat.checksum_failures for stat in stats),
            sum(stat.memory_fences for stat in stats),
            sum(memory.num_damaged for memory in self._memories),
        )

    def close(self) -> None:
        for connector in self._connectors:
            connector.shutdown()

    def _deliver(self, metadata: ConnectorMetadata) -> None:
        for connector in self._connectors:
            connector.start(metadata)

    def _admit(self) -> None:
        """Start waiting requests in order, while enough blocks are free."""
        while self._backlog:
            kind, arguments = self._backlog[0]
            transfer_id = arguments[0]
            send = self._sends.get(transfer_id) if kind == "send" else None
            if kind == "send" and (send is None or send.cancelled):
                self._backlog.popleft()
                continue
            num_blocks = send.num_blocks if send is not None else arguments[5]
            if num_blocks > len(self._free):
                return
            self._backlog.popleft()
            block_ids = self._take(num_blocks)
            if send is not None:
                send.block_ids = block_ids
                continue
            _, port, producer, sequence, first, _ = arguments
            self._loads[transfer_id] = _Load(sequence, first, block_ids)
            hashes = [chain_hash(sequence, first + i) for i in range(num_blocks)]
            self._deliver(
                ConnectorMetadata(
                    loads=[LoadRequest(transfer_id, HOST, port, producer, first, block_ids, hashes)]
                )
            )

    def _advance(self, transfer_id: str, send: _Send) -> None:
        """Simulate a step of the model, which completes the next blocks."""
        if send.done or send.cancelled:
            return
        if self._rng.random() < self.spec.cancel / 4:
            send.cancelled = True
            self._deliver(ConnectorMetadata(cancels=[transfer_id]))
            return
        if not send.block_ids or self._rng.random() < 0.3:
            return
        first = send.published
        send.published = min(send.num_blocks, first + self._rng.choice([1, 2, 4, 8, MAX_BLOCKS]))
        block_ids = send.block_ids[first : send.published]
        hashes = [chain_hash(send.sequence, first + i) for i in range(len(block_ids))]
        self._fill(block_ids, hashes)
        send.done = send.published == send.num_blocks
        save = BlockSave(transfer_id, first, block_ids, hashes, send.published * 4, send.done)
        for connector in self._connectors:
            connector.save(ConnectorMetadata(saves=[save]))

    def _fill(self, block_ids: list[int], hashes: list[bytes]) -> None:
        for memory in self._memories:
            heads = memory.layout.heads
            for block_id, block_hash in zip(block_ids, hashes, strict=True):
                for head in range(heads.count):
                    block = memory.blocks[block_id, head]
                    block[:] = head_content(block_hash, heads.first + head, len(block))

    def _sent(self, transfer_id: str) -> Ended:
        send = self._sends.pop(transfer_id, None)
        if send is None:
            self._problems.append(f"{transfer_id} finished sending twice, or never began")
        else:
            self._give_back(send.block_ids)
        return Ended(self.spec.name, transfer_id, sent=True)

    def _loaded(self, transfer_id: str, result: LoadResult) -> Ended:
        load = self._loads.pop(transfer_id, None)
        if load is None:
            self._problems.append(f"{transfer_id} has two results, or never began")
            return Ended(self.spec.name, transfer_id, sent=False)
        wanted = len(load.block_ids)
        if not 0 <= result.num_valid_blocks <= wanted or (
            not result.error and result.num_valid_blocks < wanted
        ):
            self._problems.append(f"{transfer_id}: {result} of {wanted} blocks")
        for position, block_id in enumerate(load.block_ids[: result.num_valid_blocks]):
            block_hash = chain_hash(load.sequence, load.first + position)
            for rank, memory in enumerate(self._memories):
                for head in range(memory.layout.num_kv_heads):
                    block = memory.blocks[block_id, head]
                    if (
                        block
                        != head_content(block_hash, memory.layout.first_kv_head + head, len(block))
                    ).any():
                        self._problems.append(
                            f"{transfer_id}: block {position} of {wanted} is wrong "
                            f"at worker {rank}, head {head}: {result}"
                        )
        self._give_back(load.block_ids)
        failures = ConnectorStats.total(
            [connector.stats() for connector in self._connectors]
        ).failures
        return Ended(
            self.spec.name,
            transfer_id,
            False,
            result.num_valid_blocks,
            wanted,
            result.error,
            failures,
        )

    def _take(self, num_blocks: int) -> list[int]:
        self._rng.shuffle(self._free)
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        for memory in self._memories:
            if (memory.blocks[block_ids] != POISON).any():
                self._problems.append(f"a free block among {block_ids} was written to")
        return block_ids

    def _give_back(self, block_ids: list[int]) -> None:
        for memory in self._memories:
            memory.blocks[block_ids] = POISON
        self._free += block_ids
