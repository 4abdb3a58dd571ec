"""What is read from one peer next: batches of a few MiB within a window of bytes, each load in its turn."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from baton_kv_transfer.agent import XferHandle
from baton_kv_transfer.connector import ConnectorStats
from baton_kv_transfer.load import Leg
from baton_kv_transfer.memory import KVMemory

BATCH_BYTES = 4 * 2**20
"""Of a transfer, and of what is proved at once: while one batch is proved the next ones travel."""


@dataclass(slots=True, eq=False)
class Batch:
    """Blocks of a leg that travel and are proved together."""

    leg: Leg
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
        return len(self.positions) * self.leg.block_nbytes


def blocks_per_batch(leg: Leg, memory: KVMemory) -> int:
    return max(1, min(BATCH_BYTES // leg.block_nbytes, memory.num_slots))


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
        self._turns: deque[Leg] = deque()  # those that want something; the first one is next
        self._stats = stats

    def want(self, leg: Leg, positions: list[int]) -> None:
        if not positions:
            return
        if not leg.wanted:
            self._turns.append(leg)
        leg.wanted += positions
        self._stats.queued_bytes += len(positions) * leg.block_nbytes

    def forget(self, leg: Leg) -> None:
        """Nothing more is posted for it."""
        if leg.wanted:
            self._turns.remove(leg)
            self._stats.queued_bytes -= len(leg.wanted) * leg.block_nbytes
            leg.wanted.clear()

    def take(self, memory: KVMemory) -> Batch | None:
        """The next batch that fits into the window and for which the memory has slots; from now on it counts as in flight.

        A batch larger than the window travels alone.
        """
        for _ in range(len(self._turns)):
            leg = self._turns.popleft()
            load = leg.load
            positions = leg.wanted[: blocks_per_batch(leg, memory)]
            if (
                self._inflight_bytes
                and self._inflight_bytes + len(positions) * leg.block_nbytes
                > self._max_inflight_bytes
            ):
                self._turns.appendleft(leg)
                return None
            if load.slots is not None:
                slots = [load.slots[position] for position in positions]
            else:
                slots = _accept(memory, [load.wish.block_ids[position] for position in positions])
            if not slots:
                self._turns.append(leg)
                continue
            positions = positions[: len(slots)]
            nbytes = len(positions) * leg.block_nbytes
            del leg.wanted[: len(positions)]
            if leg.wanted:
                self._turns.append(leg)
            leg.num_batches += 1
            self._inflight_bytes += nbytes
            self._stats.queued_bytes -= nbytes
            self._stats.inflight_bytes += nbytes
            return Batch(leg, positions, slots, owns_slots=load.slots is None, window=self)
        return None

    def ended(self, batch: Batch) -> None:
        """Its transfer has: local memory is not touched any more."""
        self._inflight_bytes -= batch.nbytes
        self._stats.inflight_bytes -= batch.nbytes
