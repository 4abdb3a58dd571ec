"""A step under construction: its token budget, contents and scheduled ranges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from baton_engine.executor.step import BlockCopy, SchedulerOutput
from baton_engine.kv_cache.block_pool import Block
from baton_engine.kv_cache.kv_cache_manager import KVCacheManager
from baton_engine.scheduling.request import Request
from baton_engine.scheduling.step import in_flight
from baton_engine.scheduling.step.in_flight import ScheduledRange
from baton_engine.scheduling.step.worker_mirror import WorkerMirror


class StepBuilder:
    """Builds the `SchedulerOutput` of one step. Each call of `run` or `run_decode` adds tokens."""

    def __init__(self, kv: KVCacheManager, worker: WorkerMirror, step_id: int, budget: int) -> None:
        """Create an empty step.

        Args:
            budget: number of tokens that the step may run.
        """
        self.output = SchedulerOutput([], [], {}, [], step_id=step_id)
        self.ranges: list[ScheduledRange] = []
        self.budget = budget
        #: Running sequences with more than one token to compute when the step began.
        self.prefills: list[Request] = []
        self._kv = kv
        self._worker = worker
        self._block_size = kv.block_size

    def num_scheduled(self, sequence: Request) -> int:
        """Return the number of tokens of `sequence` that this step runs."""
        return self.output.num_scheduled_tokens.get(sequence.request_id, 0)

    def may_write(self, sequence: Request) -> bool:
        """Return whether the next token's KV can be written without allocating or copying a block.

        The block of this token must be allocated, not shared, and not in the prefix cache.
        """
        slot = sequence.num_computed_tokens // self._block_size
        if slot >= len(sequence.blocks):
            return False
        block = sequence.blocks[slot]
        return block.ref_count == 1 and block.block_hash is None

    def copies_to_block_at(self, sequence: Request, position: int) -> bool:
        """Return whether the block of `position` is the target of one of this step's block copies.

        The content of such a block is complete only after the copy. Therefore, no other sequence
        may share the block in this step.
        """
        slot = position // self._block_size
        return slot < len(sequence.blocks) and any(
            copy.target == sequence.blocks[slot].block_id for copy in self.output.block_copies
        )

    def has_memory_for(self, sequences: Sequence[Request]) -> bool:
        """Return whether enough blocks are free to write KV at the next position of each sequence.

        A sequence needs a free block if its block for this position is shared or not yet allocated.
        The last sequence that shares a block needs no copy.
        """
        if len(sequences) <= self._kv.num_free_blocks:  # each needs one block at most
            return True
        num_blocks = 0
        writers: Counter[Block] = Counter()
        for sequence in sequences:
            slot = sequence.num_computed_tokens // self._block_size
            if slot < len(sequence.blocks):
                writers[sequence.blocks[slot]] += 1
            else:
                num_blocks += 1
        # The last holder of a block writes in place.
        num_blocks += sum(min(count, block.ref_count - 1) for block, count in writers.items())
        return num_blocks <= self._kv.num_free_blocks

    def reserve(self, sequence: Request, end: int) -> list[BlockCopy] | None:
        """Allocate writable blocks for the positions of `sequence` up to `end`.

        The sequence keeps the blocks even if this step does not run it.

        Returns:
            Block copies that this step must make. None if too few blocks are free.
        """
        if not self._kv.allocate(sequence, end):
            return None
        return self._kv.make_writable(sequence, sequence.num_computed_tokens, end)

    def run_decode(self, sequence: Request) -> None:
        """Schedule the next token of a sequence. Allocate or copy a block if the token needs one.

        Call this method only after `has_memory_for` has returned True.
        """
        if self.may_write(sequence):
            self.run(sequence, 1)
            return
        copies = self.reserve(sequence, sequence.num_computed_tokens + 1)
        assert copies is not None, "the blocks were counted"
        self.run(sequence, 1, copies)

    def run(
        self, sequence: Request, num_tokens: int, copies: list[BlockCopy] | None = None
    ) -> None:
        """Schedule the next `num_tokens` tokens of a sequence whose blocks are allocated.

        Args:
            copies: block copies that `reserve` has returned. None: no block is copied.
        """
        entry = in_flight.count_scheduled(sequence, num_tokens)
        self.ranges.append(entry)
        self.budget -= num_tokens
        self.output.num_scheduled_tokens[sequence.request_id] = num_tokens
        if copies:
            self.output.block_copies += copies
        self._worker.send(self.output, entry, copies)
