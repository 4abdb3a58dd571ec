"""The reads from one peer, in batches of a few MiB.

The bytes in flight from a peer are limited, and the loads from that peer take turns.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from baton_kv_transfer.connector import ConnectorStats
from baton_kv_transfer.consumer.load_state import RankTransfer
from baton_kv_transfer.memory.slot_memory import SlotMemory

#: Maximum size of a batch, unless one block is larger. Loads take turns after each batch. A batch
#: is verified in one call, while the next batches are read.
MAX_READ_BYTES = 4 * 2**20


@dataclass(slots=True, eq=False)
class ReadBatch:
    """Blocks of one per-rank transfer that are verified together."""

    rank_transfer: RankTransfer
    #: Indices of the blocks among the load's blocks.
    positions: list[int]
    #: Slots of this engine's memory, one for each block. With push, they are slots of the load
    #: (`Load.slots`). Without push, they were allocated for this batch.
    slots: list[int]

    @property
    def nbytes(self) -> int:
        return len(self.positions) * self.rank_transfer.block_nbytes


def blocks_per_batch(rank_transfer: RankTransfer, memory: SlotMemory) -> int:
    return max(1, min(MAX_READ_BYTES // rank_transfer.block_nbytes, memory.num_slots))


def _take_slots(memory: SlotMemory, block_ids: list[int]) -> list[int]:
    """Return a slot for each block, or for only the first blocks if too few slots are free.

    The number of blocks is halved until enough slots are free. The result is empty if no slot is
    free.
    """
    while block_ids:
        slots = memory.accept(block_ids)
        if slots is not None:
            return slots
        block_ids = block_ids[: len(block_ids) // 2]
    return []


class ReadWindow:
    """The queued reads from one peer, and the limit of bytes that may be in flight from it."""

    def __init__(self, max_inflight_bytes: int, stats: ConnectorStats) -> None:
        self._max_inflight_bytes = max_inflight_bytes
        self._inflight_bytes = 0
        #: Per-rank transfers with queued blocks. The next batch is of the first transfer.
        self._turns: deque[RankTransfer] = deque()
        self._stats = stats

    def enqueue(self, rank_transfer: RankTransfer, positions: list[int]) -> None:
        if not positions:
            return
        if not rank_transfer.queued:
            self._turns.append(rank_transfer)
        rank_transfer.queued += positions
        self._stats.queued_bytes += len(positions) * rank_transfer.block_nbytes

    def drop(self, rank_transfer: RankTransfer) -> None:
        """Drop the queued blocks of a per-rank transfer."""
        if rank_transfer.queued:
            self._turns.remove(rank_transfer)
            self._stats.queued_bytes -= len(rank_transfer.queued) * rank_transfer.block_nbytes
            rank_transfer.queued.clear()

    def take_batch(self, memory: SlotMemory) -> ReadBatch | None:
        """Return the next batch to read, with its slots; None if no batch can be read now.

        A batch must fit into the limit for bytes in flight, and needs free slots. A batch larger
        than the limit is read alone. The returned batch counts as in flight until `release`.
        """
        for _ in range(len(self._turns)):
            rank_transfer = self._turns.popleft()
            load = rank_transfer.load
            positions = rank_transfer.queued[: blocks_per_batch(rank_transfer, memory)]
            if (
                self._inflight_bytes
                and self._inflight_bytes + len(positions) * rank_transfer.block_nbytes
                > self._max_inflight_bytes
            ):
                self._turns.appendleft(rank_transfer)
                return None
            if load.slots is not None:
                slots = [load.slots[position] for position in positions]
            else:
                slots = _take_slots(
                    memory, [load.request.block_ids[position] for position in positions]
                )
            if not slots:
                self._turns.append(rank_transfer)
                continue
            positions = positions[: len(slots)]
            nbytes = len(positions) * rank_transfer.block_nbytes
            del rank_transfer.queued[: len(positions)]
            if rank_transfer.queued:
                self._turns.append(rank_transfer)
            rank_transfer.num_batches += 1
            self._inflight_bytes += nbytes
            self._stats.queued_bytes -= nbytes
            self._stats.inflight_bytes += nbytes
            return ReadBatch(rank_transfer, positions, slots)
        return None

    def release(self, batch: ReadBatch) -> None:
        """Stop counting a batch as in flight. Call this after the batch's read has ended."""
        self._inflight_bytes -= batch.nbytes
        self._stats.inflight_bytes -= batch.nbytes
