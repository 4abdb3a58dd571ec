"""Moves published blocks into this engine's memory and proves them where they lie; the agent's thread moves bytes meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from baton_kv_transfer import checksum
from baton_kv_transfer.connector import FailureReason
from baton_kv_transfer.context import ConnectorContext
from baton_kv_transfer.load import Leg, LoadState
from baton_kv_transfer.peer import Peer
from baton_kv_transfer.reads import Batch, ReadWindow, blocks_per_batch
from baton_kv_transfer.transports.base import TransportError

PROVE_SLICE_S = 0.02
"""Proving lets messages and deadlines in after this long."""


class BlockMover:
    """A leg's blocks come in by `read` or `written`, and leave by `proved` or, once the load failed, silently."""

    def __init__(
        self,
        context: ConnectorContext,
        proved: Callable[[Leg, list[int]], None],
    ) -> None:
        """
        Args:
            proved: takes the leg and those positions of a batch whose proof failed; the others are committed and counted.
        """
        self._context = context
        self._agent, self._memory, self._stats = context.agent, context.memory, context.stats
        self._proved = proved
        self._windows: dict[Peer, ReadWindow] = {}
        self._in_flight: list[Batch] = []
        self._arrived: deque[Batch] = deque()

    @property
    def busy(self) -> bool:
        """There is something to prove: `move` is to be called again at once."""
        return bool(self._arrived)

    @property
    def reading(self) -> bool:
        """Transfers into this engine's memory are in flight."""
        handles = [batch.handle for batch in self._in_flight if batch.handle is not None]
        return any(self._agent.check_xfer_state(handle) == "PROC" for handle in handles)

    def read(self, leg: Leg, positions: list[int]) -> None:
        window = self._windows.get(leg.peer)
        if window is None:
            window = self._windows[leg.peer] = ReadWindow(
                self._context.config.max_inflight_bytes, self._stats
            )
        window.want(leg, positions)

    def written(self, leg: Leg, positions: list[int]) -> None:
        """The producer wrote them to the load's slots."""
        load, step = leg.load, blocks_per_batch(leg, self._memory)
        assert load.slots is not None
        for start in range(0, len(positions), step):
            part = positions[start : start + step]
            leg.num_batches += 1
            self._arrived.append(
                Batch(leg, part, [load.slots[position] for position in part], owns_slots=False)
            )

    def forget(self, leg: Leg) -> None:
        """The load failed: what is not posted will not be."""
        if leg.peer in self._windows:
            self._windows[leg.peer].forget(leg)

    def lose(self, peer: Peer) -> None:
        """Nothing more is read from this peer; its loads were forgotten. Reads in flight end by themselves."""
        self._windows.pop(peer, None)

    def move(self) -> None:
        """Takes in reads that ended, posts others, proves what came; the windows are filled before each proof."""
        until = self._context.clock() + PROVE_SLICE_S
        self.collect()
        self.post()
        self.collect()  # some transports end at once
        while self._arrived:
            self._prove(self._arrived.popleft())
            self.post()
            self.collect()
            if self._context.clock() >= until:
                return

    def collect(self) -> None:
        """Takes in the reads that ended."""
        in_flight = []
        for batch in self._in_flight:
            assert batch.handle is not None
            outcome = self._agent.check_xfer_state(batch.handle)
            if outcome == "PROC":
                in_flight.append(batch)
                continue
            self._ended(batch)
            self._agent.release_xfer_handle(batch.handle)
            if outcome == "DONE":
                self._arrived.append(batch)
            else:
                self._read_failed(batch, batch.handle.error)
        self._in_flight = in_flight

    def discard_all(self) -> None:
        """Drops what is in hand; only once the agent touches no memory any more."""
        for batch in self._in_flight:
            self._ended(batch)
            self._discard(batch)
        self._in_flight.clear()
        while self._arrived:
            self._discard(self._arrived.popleft())

    def post(self) -> None:
        """Posts what fits into the peers' windows."""
        for peer, window in self._windows.items():
            while not peer.error and (batch := window.take(self._memory)) is not None:
                assert peer.blocks is not None
                leg = batch.leg
                ours, theirs = (
                    self._context.local_slots(leg.heads),
                    leg.slots_there[batch.positions],
                )
                try:
                    handle = self._agent.make_prepped_xfer(
                        "READ", ours, batch.slots, peer.blocks, theirs
                    )
                    self._agent.transfer(handle)
                except (
                    KeyError,
                    ValueError,
                    TransportError,
                ) as error:  # the agent does not know the peer any more
                    self._ended(batch)
                    self._read_failed(batch, str(error))
                else:
                    batch.handle = handle
                    self._in_flight.append(batch)
                    self._stats.descriptors_posted += handle.num_descs

    def _ended(self, batch: Batch) -> None:
        assert batch.window is not None
        batch.window.ended(batch)

    def _read_failed(self, batch: Batch, error: str) -> None:
        peer = batch.leg.peer
        peer.fail(FailureReason.PEER_LOST, f"reading from {peer.name} failed: {error}")
        self._discard(batch)

    def _prove(self, batch: Batch) -> None:
        """Commits and counts those blocks that are whole and the right ones."""
        leg, load = batch.leg, batch.leg.load
        if load.state is not LoadState.LOADING:
            self._discard(batch)
            return
        word_sums = self._memory.block_sums(batch.slots, leg.heads).tolist()
        right, right_slots, wrong = [], [], []
        for position, slot, word_sum in zip(batch.positions, batch.slots, word_sums, strict=True):
            computed = checksum.bind(
                word_sum,
                transfer_id=load.transfer_id,
                generation=load.generation,
                chain_hash=load.wish.block_hashes[position],
                heads=leg.heads,
            )
            if computed == leg.checksums[position]:
                right.append(position)
                right_slots.append(slot)
            else:
                wrong.append(position)
        if right:
            self._memory.commit(
                right_slots, [load.wish.block_ids[position] for position in right], leg.heads
            )
            load.missing[right] -= 1
            leg.num_proved += len(right)
            self._stats.blocks_received += int((load.missing[right] == 0).sum())
            self._stats.bytes_received += len(right) * leg.block_nbytes
        self._stats.checksum_failures += len(wrong)
        self._discard(batch)
        self._proved(leg, wrong)

    def _discard(self, batch: Batch) -> None:
        """The batch is dealt with."""
        batch.leg.num_batches -= 1
        if batch.owns_slots:
            self._memory.release(batch.slots)
