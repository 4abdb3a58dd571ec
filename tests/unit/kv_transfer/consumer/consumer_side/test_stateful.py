"""A consumer and a correct producer with random faults.

Messages arrive late or twice, blocks arrive damaged, reads and writes are slow, loads are
cancelled, and the producer restarts. Every load ends once. Later its blocks are not touched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton_kv_transfer import side_channel
from baton_kv_transfer.connector import LoadResult
from baton_kv_transfer.consumer.load_state import LoadState, RankTransfer, RankTransferState
from baton_kv_transfer.memory.layout import HeadRange, KVCacheLayout
from baton_kv_transfer.memory.staged_memory import StagedMemory
from baton_kv_transfer.side_channel import Cancelled, Pending, Publish, Released, Subscribe
from support.kv_transfer.consumer_rig import HEAD_NBYTES, HOST, WHOLE, Rig, Worker, tensor_parallel

#: Every byte of a free block.
FREE = 0xEE
TRANSFER_IDS = ["t0", "t1", "t2"]
MAX_BLOCKS = 6


@dataclasses.dataclass(eq=False)
class Part:
    """The state of one load at one of the producer's workers."""

    worker: Worker
    subscribe: Subscribe
    num_published: int = 0
    #: After a cancellation it sends only the confirmation.
    stopped: bool = False
    outbox: list[side_channel.ToConsumer] = dataclasses.field(default_factory=list)
    #: Writes in flight.
    writes: list[Any] = dataclasses.field(default_factory=list)


class ConsumerMachine(RuleBasedStateMachine):
    push: ClassVar[bool] = False
    #: Blocks are staged in few slots.
    staged: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(
            push=self.push, on_result=self._ended, memory=self._staged if self.staged else None
        )
        self.rig.agent.hold = True
        self.workers = tensor_parallel(2, "P0")
        self.dead: list[Worker] = []
        self.free = list(range(WHOLE.num_blocks))
        self.under_way: dict[str, list[int]] = {}
        self.parts: list[Part] = []
        #: Writes of dead producers and of ended loads.
        self.stray_writes: list[tuple[Worker, Any]] = []
        self.history: list[tuple[Worker, side_channel.ToConsumer]] = []

    def _staged(self, blocks: np.ndarray, layout: KVCacheLayout) -> StagedMemory:
        self._slots = np.zeros((5, layout.block_nbytes), dtype=np.uint8)

        def copy_in(slots: Any, block_ids: Any, heads: HeadRange) -> None:
            columns = slice(heads.first * HEAD_NBYTES, heads.end * HEAD_NBYTES)
            blocks[list(block_ids), columns] = self._slots[list(slots), columns]

        return StagedMemory(
            self._slots.ctypes.data, 5, layout, copy_out=lambda *_: None, copy_in=copy_in
        )

    # The engine

    @rule(
        transfer_id=st.sampled_from(TRANSFER_IDS),
        num_blocks=st.integers(0, MAX_BLOCKS),
        first=st.integers(0, 2),
    )
    def begin(self, transfer_id: str, num_blocks: int, first: int) -> None:
        if transfer_id in self.under_way:
            return
        block_ids = [self.free.pop(0) for _ in range(num_blocks)]
        self.under_way[transfer_id] = block_ids
        self.rig.begin(transfer_id, self.workers[0], block_ids, first)
        self._finish_handshakes()

    @precondition(lambda self: self.under_way)
    @rule(transfer_id=st.sampled_from(TRANSFER_IDS), rarely=st.integers(0, 3))
    def cancel(self, transfer_id: str, rarely: int) -> None:
        if rarely:
            return
        self.rig.consumer.cancel(transfer_id)
        self.rig.advance()

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 4.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.advance(seconds)

    # The network

    @precondition(lambda self: self.rig.agent.held)
    @rule(choice=st.integers(0, 7))
    def a_read_ends(self, choice: int) -> None:
        held = self.rig.agent.held
        self.rig.agent.land(held[choice % len(held)])
        self.rig.advance()

    @precondition(lambda self: self.rig.agent.held)
    @rule(rarely=st.integers(0, 7))
    def a_read_breaks(self, rarely: int) -> None:
        if rarely == 0:
            self.rig.agent.break_off(self.rig.agent.held[-1])
            self.rig.advance()

    @precondition(lambda self: any(part.writes for part in self.parts))
    @rule(choice=st.integers(0, 7))
    def a_write_completes(self, choice: int) -> None:
        part = self._choose(choice, lambda part: part.writes)
        part.worker.agent.transfer(part.writes.pop(0))

    @precondition(lambda self: self.stray_writes)
    @rule()
    def a_stray_write_completes(self) -> None:
        worker, handle = self.stray_writes.pop(0)
        worker.agent.transfer(handle)

    @precondition(lambda self: any(part.outbox for part in self.parts))
    @rule(choice=st.integers(0, 7))
    def a_message_arrives(self, choice: int) -> None:
        """Deliver a message. Only messages of one load and worker keep their order."""
        part = self._choose(choice, lambda part: part.outbox)
        self._deliver(part.worker, part.outbox.pop(0))

    @precondition(lambda self: self.history)
    @rule(choice=st.integers(0, 99))
    def a_message_arrives_again(self, choice: int) -> None:
        worker, message = self.history[-1 - choice % len(self.history)]
        if isinstance(message, Released) and self._part_of(message) is not None:
            return  # an honest producer confirms once
        self._deliver(worker, message)

    # The producer

    @precondition(lambda self: any(self._num_unpublished(part) for part in self.parts))
    @rule(
        choice=st.integers(0, 7),
        count=st.integers(1, MAX_BLOCKS),
        damage=st.sampled_from(["", "", "", "", "flipped", "other block"]),
        written=st.booleans(),
        notified=st.booleans(),
    )
    def publish(self, choice: int, count: int, damage: str, written: bool, notified: bool) -> None:
        self._publish(self._choose(choice, self._num_unpublished), count, damage, written, notified)

    def _publish(
        self, part: Part, count: int, damage: str, written: bool, notified: bool = False
    ) -> None:
        """Publish `count` blocks of the part.

        Args:
            notified: the notification of the write arrives before the message.
        """
        start = part.subscribe.first_block_index + part.num_published
        count = min(count, self._num_unpublished(part))
        last = count == self._num_unpublished(part)
        part.num_published += count
        publish = part.worker.published(
            part.subscribe, range(start, start + count), last, written and self.push
        )
        if damage == "flipped":
            part.worker.blocks[publish.blocks[-1].slot, 3] ^= 0x10
        elif damage == "other block":
            publish.blocks[-1].slot = part.worker.fill("other", [0])[0]
        if last or (publish.written and notified):
            self._land_all(part)
        part.outbox.append(publish)
        if publish.written:
            notification = b""
            if notified:
                notification = Publish(
                    publish.transfer_id, publish.generation, publish.blocks, False, True
                )
            assert part.worker.write(
                part.subscribe, publish.blocks, self.rig.layout, notification
            ) in ("DONE", "ERR")
            if notified:
                self.rig.advance()
                self._finish_handshakes()

    @precondition(
        lambda self: self.push and any(self._num_unpublished(part) for part in self.parts)
    )
    @rule(choice=st.integers(0, 7))
    def a_write_begins(self, choice: int) -> None:
        part = self._choose(choice, self._num_unpublished)
        index = part.subscribe.first_block_index + part.num_published
        slots = part.worker.fill(part.subscribe.transfer_id, [index])
        ours, theirs = part.worker.push_lists(part.subscribe.heads, self.rig.layout)
        target = [part.subscribe.push_slots[part.num_published]]
        part.writes.append(
            part.worker.agent.make_prepped_xfer("WRITE", ours, slots, theirs, target)
        )

    @precondition(lambda self: self.parts)
    @rule(choice=st.integers(0, 7), rarely=st.integers(0, 3))
    def the_producer_cancels(self, choice: int, rarely: int) -> None:
        part = self._choose(choice, lambda part: True)
        if not part.stopped and not rarely:
            part.stopped = True
            part.outbox.append(
                Cancelled(part.subscribe.transfer_id, part.subscribe.generation, "cancelled there")
            )

    @precondition(lambda self: any(self._may_confirm(part) for part in self.parts))
    @rule(choice=st.integers(0, 7))
    def the_producer_confirms(self, choice: int) -> None:
        part = self._choose(choice, self._may_confirm)
        self._land_all(part)
        part.stopped = True
        part.outbox.append(Released(part.subscribe.transfer_id, part.subscribe.generation))

    @precondition(lambda self: self.parts)
    @rule(choice=st.integers(0, 7))
    def the_producer_says_pending(self, choice: int) -> None:
        part = self._choose(choice, lambda part: True)
        self._deliver(part.worker, Pending(TRANSFER_IDS))

    @precondition(lambda self: self.parts)
    @rule(choice=st.integers(0, 7))
    def all_goes_well(self, choice: int) -> None:
        """Publish and deliver the rest of a load."""
        transfer_id = self._choose(choice, lambda part: True).subscribe.transfer_id
        for part in [part for part in self.parts if part.subscribe.transfer_id == transfer_id]:
            if part in self.parts and self._num_unpublished(part):
                self._publish(part, self._num_unpublished(part), "", written=True)
            while part in self.parts and part.outbox:
                self._deliver(part.worker, part.outbox.pop(0))
        while self.rig.agent.held:
            self.rig.agent.land(self.rig.agent.held[0])
            self.rig.advance()

    @precondition(lambda self: self.parts)
    @rule(rarely=st.integers(0, 7))
    def the_producer_restarts(self, rarely: int) -> None:
        """Restart the producer at the same addresses. Its writes are still in flight."""
        if rarely:
            return
        ports = [worker.port for worker in self.workers]
        known = {
            f":{port}"
            for port in ports
            if any(peer.name.endswith(f":{port}") for peer in self.rig.consumer.peers())
        }
        for part in self.parts:
            self.stray_writes += [(part.worker, handle) for handle in part.writes]
        self.parts.clear()
        self.history.clear()
        instance_id = f"P{len(self.dead) // 2 + 1}"
        for worker in self.workers:
            worker.hang_up()
        self.dead += self.workers
        while any(peer.name.endswith(tuple(known)) for peer in self.rig.consumer.peers()):
            self.rig.receive()
        self.rig.advance()  # the peers are lost in any order: end what only the last one ends
        self.workers = [
            Worker(instance_id, rank, worker.layout.heads, worker.port)
            for rank, worker in enumerate(self.workers)
        ]
        for worker in self.workers:
            worker.ranks = self.dead[-1].ranks

    # Invariants

    @invariant()
    def blocks_without_a_load_are_left_alone(self) -> None:
        assert (self.rig.blocks[self.free] == FREE).all()

    @invariant()
    def there_is_a_deadline_as_long_as_there_is_a_load(self) -> None:
        assert not self.under_way or self.rig.consumer.next_deadline() is not None
        assert self.rig.stats.queued_bytes >= 0
        assert self.rig.stats.inflight_bytes >= 0

    @invariant()
    def a_released_rank_transfer_has_no_batch_and_only_a_push_is_in_quarantine(self) -> None:
        for transfer_id in self.under_way:
            for rank_transfer in self._rank_transfers(transfer_id):
                assert not (rank_transfer.is_released and rank_transfer.num_batches)
                if rank_transfer.state is RankTransferState.QUARANTINE:
                    assert self.push
                    assert rank_transfer.load.state is LoadState.SETTLING

    def teardown(self) -> None:
        try:
            for _ in range(40):
                self.rig.advance(5.0)
                self.blocks_without_a_load_are_left_alone()
            assert not self.under_way, "a load did not end"
            for part in self.parts:
                self._land_all(part)
            for worker, handle in self.stray_writes:
                worker.agent.transfer(handle)
            self.blocks_without_a_load_are_left_alone()
            assert not self.rig.agent.held
            assert (self.rig.stats.queued_bytes, self.rig.stats.inflight_bytes) == (0, 0)
            if isinstance(self.rig.memory, StagedMemory):
                assert self.rig.memory.num_free_slots == self.rig.memory.num_slots
        finally:
            self.rig.close()
            for worker in [*self.workers, *self.dead]:
                worker.close()

    # Helpers

    def _ended(self, transfer_id: str, result: LoadResult) -> None:
        """Reuse the blocks at once for something else."""
        del self.rig.results[transfer_id]
        block_ids = self.under_way.pop(transfer_id)
        assert 0 <= result.num_valid_blocks <= len(block_ids)
        assert result.error or result.num_valid_blocks == len(block_ids)
        self.rig.blocks[block_ids] = FREE
        self.free += block_ids
        ended = [part for part in self.parts if part.subscribe.transfer_id == transfer_id]
        for part in ended:
            self.stray_writes += [(part.worker, handle) for handle in part.writes]
            self.parts.remove(part)

    def _rank_transfers(self, transfer_id: str) -> list[RankTransfer]:
        load = self.rig.consumer._loads.get(transfer_id)
        return load.rank_transfers if load is not None else []

    def _finish_handshakes(self) -> None:
        """Complete pending handshakes and subscriptions."""
        for worker in self.workers:
            if any(
                peer.name.endswith(f":{worker.port}") and not peer.is_ready
                for peer in self.rig.consumer.peers()
            ):
                self.rig.handshake(worker)
        for transfer_id in list(self.under_way):
            for rank_transfer in self._rank_transfers(transfer_id):
                worker = self.workers[rank_transfer.rank]
                known = any(
                    part.worker is worker
                    and part.subscribe.generation == rank_transfer.load.generation
                    for part in self.parts
                )
                if rank_transfer.is_open and not known and rank_transfer.load.num_blocks:
                    subscribe = worker.receive(Subscribe)
                    while subscribe.generation != rank_transfer.load.generation:
                        subscribe = worker.receive(Subscribe)
                    self.parts.append(Part(worker, subscribe))

    def _num_unpublished(self, part: Part) -> int:
        """Return the number of unpublished blocks."""
        wanted = len(self.under_way[part.subscribe.transfer_id])
        return 0 if part.stopped else wanted - part.num_published

    def _may_confirm(self, part: Part) -> bool:
        """Return whether the worker may confirm: after a RELEASE or a cancellation."""
        rank_transfers = [
            rank_transfer
            for rank_transfer in self._rank_transfers(part.subscribe.transfer_id)
            if rank_transfer.rank == part.worker.rank
        ]
        confirmed = any(isinstance(message, Released) for message in part.outbox)
        return (
            self.push
            and not confirmed
            and any(part.stopped or rank_transfer.is_released for rank_transfer in rank_transfers)
        )

    def _land_all(self, part: Part) -> None:
        while part.writes:
            part.worker.agent.transfer(part.writes.pop(0))

    def _part_of(self, message: Released) -> Part | None:
        return next(
            (part for part in self.parts if part.subscribe.generation == message.generation), None
        )

    def _choose(self, choice: int, which: Callable[[Part], Any]) -> Part:
        parts = [part for part in self.parts if which(part)]
        return parts[choice % len(parts)]

    def _deliver(self, worker: Worker, message: side_channel.ToConsumer) -> None:
        """Deliver a message if the consumer is still connected to this worker."""
        if worker in self.workers and any(
            peer.name == f"{worker.instance_id} at {HOST}:{worker.port}"
            for peer in self.rig.consumer.peers()
        ):
            if isinstance(message, Publish | Cancelled | Released):
                self.history.append((worker, message))
            self.rig.deliver(worker, message)
            self._finish_handshakes()


class StagedMachine(ConsumerMachine):
    staged = True


class PushMachine(ConsumerMachine):
    push = True


TestPull = ConsumerMachine.TestCase
TestStaged = StagedMachine.TestCase
TestPush = PushMachine.TestCase
TestPull.settings = TestStaged.settings = TestPush.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None
)
