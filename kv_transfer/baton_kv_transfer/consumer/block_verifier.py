"""Reads published blocks into this engine's memory, and verifies their checksums there.

A block that differs from its checksum is read once more. The agent's thread moves bytes while the
connector's thread verifies blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from baton_kv_transfer.agent.agent import XferHandle
from baton_kv_transfer.connector import FailureReason
from baton_kv_transfer.connector_context import ConnectorContext
from baton_kv_transfer.consumer.load_state import LoadState, RankTransfer
from baton_kv_transfer.consumer.peer import Peer
from baton_kv_transfer.consumer.read_window import ReadBatch, ReadWindow, blocks_per_batch
from baton_kv_transfer.memory import checksum
from baton_kv_transfer.transports.transfer import TransportError

#: After this time, `verify_arrived` returns, so that messages and deadlines are handled.
VERIFY_SLICE_S = 0.02


class BlockVerifier:
    """Reads and verifies the blocks of all per-rank transfers (`RankTransfer`).

    Callers add blocks with `read()` or `verify()`. `verify_arrived()` yields each verified batch of
    blocks whose load has not failed.
    """

    def __init__(self, context: ConnectorContext) -> None:
        self._context = context
        self._agent, self._memory, self._stats = context.agent, context.memory, context.stats
        self._windows: dict[Peer, ReadWindow] = {}
        self._in_flight: list[tuple[ReadBatch, ReadWindow, XferHandle]] = []
        self._arrived: deque[ReadBatch] = deque()

    @property
    def has_unverified(self) -> bool:
        """Whether some arrived blocks are not verified yet.

        If so, call `verify_arrived` without waiting for an event.
        """
        return bool(self._arrived)

    @property
    def is_reading(self) -> bool:
        """Whether reads into this engine's memory are in flight."""
        return any(self._agent.check_xfer_state(handle) == "PROC" for *_, handle in self._in_flight)

    def read(self, rank_transfer: RankTransfer, positions: list[int]) -> None:
        """Queue published blocks to be read from the producer's memory and then verified."""
        window = self._windows.get(rank_transfer.peer)
        if window is None:
            window = ReadWindow(self._context.config.max_inflight_bytes, self._stats)
            self._windows[rank_transfer.peer] = window
        window.enqueue(rank_transfer, positions)

    def verify(self, rank_transfer: RankTransfer, positions: list[int]) -> None:
        """Queue blocks, which the producer has written into the load's slots, to be verified."""
        load, step = rank_transfer.load, blocks_per_batch(rank_transfer, self._memory)
        assert load.slots is not None
        for start in range(0, len(positions), step):
            part = positions[start : start + step]
            rank_transfer.num_batches += 1
            slots = [load.slots[position] for position in part]
            self._arrived.append(ReadBatch(rank_transfer, part, slots))

    def drop(self, rank_transfer: RankTransfer) -> None:
        """Drop the queued reads of a per-rank transfer whose load has failed."""
        if rank_transfer.peer in self._windows:
            self._windows[rank_transfer.peer].drop(rank_transfer)

    def drop_peer(self, peer: Peer) -> None:
        """Drop queued reads from a lost peer. `verify_arrived` still collects reads in flight."""
        self._windows.pop(peer, None)

    def verify_arrived(self) -> Iterator[tuple[RankTransfer, list[int]]]:
        """Collect reads that have ended, post queued reads, and verify arrived blocks.

        Reads are posted before each verification, so that bytes arrive during the verification.
        After VERIFY_SLICE_S seconds, the iteration ends even if arrived blocks are left.

        Yields:
            The per-rank transfer of each verified batch, and the positions of blocks that differed
            from their checksums twice. If there are such positions, the caller must fail the load
            before the next iteration.
        """
        until = self._context.clock() + VERIFY_SLICE_S
        self._collect()
        self.post()
        self._collect()  # some transports end a read at once
        while self._arrived:
            batch = self._arrived.popleft()
            if batch.rank_transfer.load.state is LoadState.LOADING:
                yield batch.rank_transfer, self._verify(batch)
            else:
                self._discard(batch)
            self.post()
            self._collect()
            if self._context.clock() >= until:
                return

    def discard_all(self) -> None:
        """Discard all batches that are in flight or not verified yet (see `_discard`).

        Call this only after `Agent.fence` or `Agent.close`, when no transfer touches the memory.
        """
        for batch, window, _ in self._in_flight:
            window.release(batch)
            self._discard(batch)
        self._in_flight.clear()
        while self._arrived:
            self._discard(self._arrived.popleft())

    def post(self) -> None:
        """Post queued reads, up to each peer's limit of bytes in flight."""
        for peer, window in self._windows.items():
            while not peer.error and (batch := window.take_batch(self._memory)) is not None:
                assert peer.slot_descs is not None
                rank_transfer = batch.rank_transfer
                local_descs = self._context.local_slot_descs(rank_transfer.heads)
                peer_slots = rank_transfer.peer_slots[batch.positions]
                try:
                    handle = self._agent.make_prepped_xfer(
                        "READ", local_descs, batch.slots, peer.slot_descs, peer_slots
                    )
                    self._agent.transfer(handle)
                except (KeyError, ValueError, TransportError) as error:
                    # The agent has removed the peer.
                    window.release(batch)
                    self._fail_read(batch, str(error))
                else:
                    self._in_flight.append((batch, window, handle))
                    self._stats.descriptors_posted += handle.num_descs

    def _collect(self) -> None:
        """Check all reads in flight.

        If a read is DONE, queue its blocks for `_verify`. If a read is in ERR, fail the peer.
        """
        in_flight = []
        for batch, window, handle in self._in_flight:
            outcome = self._agent.check_xfer_state(handle)
            if outcome == "PROC":
                in_flight.append((batch, window, handle))
                continue
            window.release(batch)
            self._agent.release_xfer_handle(handle)
            if outcome == "DONE":
                self._arrived.append(batch)
            else:
                self._fail_read(batch, handle.error)
        self._in_flight = in_flight

    def _fail_read(self, batch: ReadBatch, error: str) -> None:
        peer = batch.rank_transfer.peer
        peer.fail(FailureReason.PEER_LOST, f"reading from {peer.name} failed: {error}")
        self._discard(batch)

    def _verify(self, batch: ReadBatch) -> list[int]:
        """Verify a batch, and copy the blocks whose checksums match into the KV cache.

        Blocks that differ from their checksums are read again. If one of them differs for the
        second time, no block is read again.

        Returns:
            The positions of blocks that differ from their checksums for the second time.
        """
        rank_transfer, load = batch.rank_transfer, batch.rank_transfer.load
        word_sums = self._memory.block_sums(batch.slots, rank_transfer.heads).tolist()
        right, right_slots, wrong = [], [], []
        for position, slot, word_sum in zip(batch.positions, batch.slots, word_sums, strict=True):
            computed = checksum.bind(
                word_sum,
                transfer_id=load.transfer_id,
                generation=load.generation,
                chain_hash=load.request.block_hashes[position],
                heads=rank_transfer.heads,
            )
            if computed == rank_transfer.checksums[position]:
                right.append(position)
                right_slots.append(slot)
            else:
                wrong.append(position)
        if right:
            self._memory.commit(
                right_slots,
                [load.request.block_ids[position] for position in right],
                rank_transfer.heads,
            )
            load.missing[right] -= 1
            rank_transfer.num_verified += len(right)
            self._stats.blocks_received += int((load.missing[right] == 0).sum())
            self._stats.bytes_received += len(right) * rank_transfer.block_nbytes
        self._stats.checksum_failures += len(wrong)
        self._discard(batch)
        twice = [position for position in wrong if rank_transfer.reread[position]]
        if wrong and not twice:
            rank_transfer.reread[wrong] = True
            self.read(rank_transfer, wrong)
        return twice

    def _discard(self, batch: ReadBatch) -> None:
        """Remove a batch from its per-rank transfer.

        Release the batch's slots, unless they are slots of the load (`Load.slots`).
        """
        batch.rank_transfer.num_batches -= 1
        if batch.rank_transfer.load.slots is None:
            self._memory.release(batch.slots)
