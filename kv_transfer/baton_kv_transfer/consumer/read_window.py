"""What is read from one peer next: batches of a few MiB within a window of bytes, each load in its turn."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from baton_kv_transfer.agent.agent import XferHandle
from baton_kv_transfer.connector import ConnectorStats
from baton_kv_transfer.consumer.load_state import RankTransfer
from baton_kv_transfer.memory.kv_memory import KVMemory

BATCH_BYTES = 4 * 2**20
"""Of a transfer, and of what is proved at once: while one batch is proved the next ones travel."""


@dataclass(slots=True, eq=False)
class Batch:
    """Blocks of a rank_transfer that travel and are proved together."""

    rank_transfer: RankTransfer
    positions: list[int]
    slots: list[int]
    """Of this engine's memory."""
    owns_slots: bool
    """They are released with the batch; otherwise they are the load's (push)."""
    window: ReadWindow | None = None
    """Whose bytes in flight these are; None: written by push."""
    handle: XferHandle | None = None

    @property
    def nbytes(self) -> int:
        return len(self.positions) * self.rank_transfer.block_nbytes


def blocks_per_batch(rank_transfer: RankTransfer, memory: KVMemory) -> int:
    return max(1, min(BATCH_BYTES // rank_transfer.block_nbytes, memory.num_slots))


def _accept(memory: KVMemory, block_ids: list[int]) -> list[int]:
    """Slots for the first of the blocks; for fewer if too few are free for all: who waited for many would wait for ever."""
    while block_ids:
        slots = memory.accept(block_ids)
        if slots is not None:
            return slots
        block_ids = block_ids[: len(block_ids) // 2]
    return []


class ReadWindow:
    def __init__(self, max_inflight_bytes: int, stats: ConnectorStats) -> None:
        self._max_inflight_bytes = max_inflight_bytes
        self._inflight_bytes = 0
        self._turns: deque[RankTransfer] = (
            deque()
        )  # those that want something; the first one is next
        self._stats = stats

    def enqueue(self, rank_transfer: RankTransfer, positions: list[int]) -> None:
        if not positions:
            return
        if not rank_transfer.queued:
            self._turns.append(rank_transfer)
        rank_transfer.queued += positions
        self._stats.queued_bytes += len(positions) * rank_transfer.block_nbytes

    def drop(self, rank_transfer: RankTransfer) -> None:
        """Nothing more is posted for it."""
        if rank_transfer.queued:
            self._turns.remove(rank_transfer)
            self._stats.queued_bytes -= len(rank_transfer.queued) * rank_transfer.block_nbytes
            rank_transfer.queued.clear()

    def take_batch(self, memory: KVMemory) -> Batch | None:
        """The next batch that fits into the window and for which the memory has slots; from now on it counts as in flight.

        A batch larger than the window travels alone.
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
                slots = _accept(
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
            return Batch(
                rank_transfer, positions, slots, owns_slots=load.slots is None, window=self
            )
        return None

    def release(self, batch: Batch) -> None:
        """Its transfer has: local memory is not touched any more."""
        self._inflight_bytes -= batch.nbytes
        self._stats.inflight_bytes -= batch.nbytes
