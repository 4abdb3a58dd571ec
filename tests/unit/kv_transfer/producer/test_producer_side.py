"""Random actions of consumers, the scheduler, the transport and the clock.

Each offer ends exactly once, and not while its blocks may be accessed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton_kv_transfer.memory.layout import HeadRange
from baton_kv_transfer.side_channel import Cancelled, Publish, Refused, Released
from support.kv_transfer.producer_rig import LEASE_S, NUM_BLOCKS, Consumer, Producer

TRANSFERS = st.sampled_from(["a", "a", "a", "b"])
#: Two workers of consumer D and, rarely, one of consumer E, which has no offered transfer.
WORKERS = st.sampled_from([0, 0, 0, 1, 1, 1, 2])
#: Reasons in CANCELLED for subscriptions that the producer refused.
REFUSALS = (
    "exists already",
    "has ended",
    "is offered to",
    "subscribers, not",
    "was not offered",
    "released transfer",
)
RARELY = st.sampled_from([False, False, False, True])


class Load:
    """The consumer's view of a subscription."""

    def __init__(
        self, transfer_id: str, slots: list[int] | None, last_sign: float, number: int, of: int
    ) -> None:
        self.transfer_id = transfer_id
        self.slots = slots
        self.last_sign = last_sign
        self.number = number
        self.of = of
        #: After CANCELLED or a new handshake: heartbeats do not renew the lease.
        self.stopped = False
        #: Released by the consumer or refused: it reads nothing.
        self.gone = False
        #: Content of the slots when RELEASED arrived.
        self.released: np.ndarray | None = None
        self.is_last_received = False


class ProducerMachine(RuleBasedStateMachine):
    @initialize(window=st.sampled_from([1, 200, 2**20]), num_workers=st.integers(1, 2))
    def begin(self, window: int, num_workers: int) -> None:
        self.num_workers = num_workers
        self.producer = Producer(max_inflight_bytes=window)
        self.producer.memory.free = 10
        heads = [HeadRange(0, 2), HeadRange(2, 2), HeadRange(0, 4)]
        ids = [("D", 0), ("D", 1), ("E", 0)]
        self.consumers = [
            Consumer(self.producer, instance_id=name, rank=rank, heads=part, push=True)
            for (name, rank), part in zip(ids, heads, strict=True)
        ]
        self.loads: list[dict[int, Load]] = [{}, {}, {}]  # by generation
        self.generations = itertools.count(1)
        self.free_blocks = set(range(NUM_BLOCKS))
        self.blocks: dict[str, list[int]] = {}  # of the offers that live
        self.last: set[str] = set()
        self.offers: Counter[str] = Counter()
        self.num_finished = 0
        self.offer("a")

    # The scheduler

    @rule(transfer_id=TRANSFERS)
    def offer(self, transfer_id: str) -> None:
        self.producer.offer(transfer_id)
        if transfer_id not in self.blocks:
            self.offers[transfer_id] += 1
            self.blocks[transfer_id] = []
            self.last.discard(transfer_id)
        self.look()

    @rule(transfer_id=TRANSFERS, count=st.integers(1, 6), last=st.booleans())
    def save(self, transfer_id: str, count: int, last: bool) -> None:
        if transfer_id not in self.blocks:
            self.offer(transfer_id)
        if (
            transfer_id not in self.blocks
            or transfer_id in self.last
            or count > len(self.free_blocks)
        ):
            return
        chosen = [self.free_blocks.pop() for _ in range(count)]
        first = len(self.blocks[transfer_id])
        self.blocks[transfer_id] += chosen
        if last:
            self.last.add(transfer_id)
        self.producer.save(chosen, first, last=last, transfer_id=transfer_id)
        self.look()

    @rule(transfer_id=TRANSFERS, really=RARELY)
    def cancel(self, transfer_id: str, really: bool) -> None:
        if really:
            self.producer.cancel(transfer_id)
        self.look()

    # The consumers

    @rule(
        worker=WORKERS,
        transfer_id=TRANSFERS,
        push=st.booleans(),
        lie=RARELY,
        first=st.integers(0, 2),
    )
    def subscribe(self, worker: int, transfer_id: str, push: bool, lie: bool, first: int) -> None:
        of = self.num_workers if not lie else 3 - self.num_workers
        used = {
            slot
            for load in self.loads[worker].values()
            if load.released is None
            for slot in load.slots or ()
        }
        slots = sorted(set(range(NUM_BLOCKS)) - used)[:4] if push else None
        generation = next(self.generations)
        number = worker % 2 if of == 2 else 0
        load = Load(transfer_id, slots, self.producer.now, number, of)
        for other in self.loads[worker].values():
            if set(other.slots or ()) & set(slots or ()):
                other.slots = []  # its slots may be reused now
        self.loads[worker][generation] = load
        consumer = self.consumers[worker]
        failed = any(
            session.agent_name == consumer.agent.name
            for session in self.producer.side._sessions.failed
        )
        responses = consumer.subscribe(
            transfer_id, generation, first=first, slots=slots, worker=number, of=of
        )
        # The session has ended or is about to end.
        load.gone = load.stopped = failed or any(
            isinstance(message, Refused) for message in responses
        )
        self.look(worker, responses)

    @rule(worker=WORKERS, transfer_id=TRANSFERS, last=st.booleans())
    def push(self, worker: int, transfer_id: str, last: bool) -> None:
        """Subscribe and save: chosen one by one, they seldom lead to a write."""
        self.subscribe(worker, transfer_id, push=True, lie=False, first=0)
        self.save(transfer_id, 2, last)

    @rule(worker=WORKERS, data=st.data(), lie=st.sampled_from([0, 0, 0, 1]))
    def release(self, worker: int, data: st.DataObject, lie: int) -> None:
        """Release a load that exists or does not exist."""
        known = [generation for generation, load in self.loads[worker].items() if not load.gone]
        if known:
            generation = data.draw(st.sampled_from(known))
            load = self.loads[worker][generation]
            load.gone = not lie
            responses = self.consumers[worker].release(
                load.transfer_id, generation + 1000 * lie, worker=load.number, of=load.of
            )
            self.look(worker, responses)

    @rule(worker=WORKERS, transfer_id=TRANSFERS, really=RARELY)
    def want_nothing(self, worker: int, transfer_id: str, really: bool) -> None:
        if not really:
            return
        consumer, generation = self.consumers[worker], next(self.generations)
        self.look(worker, consumer.release(transfer_id, generation, worker=worker % 2, of=2))

    @rule(worker=WORKERS)
    def heartbeat(self, worker: int) -> None:
        self.look(worker, self.consumers[worker].heartbeat("a", "b", "c"))
        for load in self.loads[worker].values():
            if not load.stopped:
                load.last_sign = self.producer.now

    @rule(worker=WORKERS, really=RARELY)
    def reconnect(self, worker: int, really: bool) -> None:
        if not really:
            return
        for load in self.loads[worker].values():
            load.stopped = True
            # The subscription is dropped before the offer.
            load.gone = load.gone or load.transfer_id not in self.blocks
        self.consumers[worker].send_hello()
        self.look()

    # The transport and the clock

    @rule(data=st.data(), fail=st.booleans())
    def end_a_write(self, data: st.DataObject, fail: bool) -> None:
        if held := self.producer.agent.held:
            self.producer.agent.let_go(data.draw(st.integers(0, len(held) - 1)), fail=fail)
            self.producer.advance()
            self.look()

    @rule()
    def let_failed_writes_arrive(self) -> None:
        self.producer.agent.let_failed_arrive()

    @rule(frozen=st.booleans())
    def freeze(self, frozen: bool) -> None:
        self.producer.agent.frozen = frozen

    @rule(seconds=st.sampled_from([1.0, 1.0, 1.0, LEASE_S / 2, LEASE_S]))
    def wait(self, seconds: float) -> None:
        self.producer.advance(seconds)
        self.look()

    # Invariants

    def look(self, worker: int | None = None, responses: list[Any] | None = None) -> None:
        for row, consumer in enumerate(self.consumers):
            for message in (
                (responses or []) + consumer.received() if row == worker else consumer.received()
            ):
                self.check_messages(row, message)
        for transfer_id in self.producer.finished[self.num_finished :]:
            for loads in self.loads:
                for load in loads.values():
                    if load.transfer_id == transfer_id and not load.gone:
                        assert self.producer.now >= load.last_sign + LEASE_S, (
                            "the offer ended before its lease"
                        )
                        load.gone = load.stopped = True
            self.free_blocks |= set(self.blocks.pop(transfer_id))
        self.num_finished = len(self.producer.finished)

    def check_messages(self, worker: int, message: Any) -> None:
        if isinstance(message, Refused):  # the session has ended; its writes are not confirmed
            for load in self.loads[worker].values():
                load.stopped = True
            return
        load = self.loads[worker].get(getattr(message, "generation", -1))
        if load is None:
            return
        match message:
            case Cancelled(reason=reason):
                load.stopped = True
                load.gone = load.gone or any(refusal in reason for refusal in REFUSALS)
            case Released():
                assert load.released is None, "a repeated message"
                load.released = self.consumers[worker].bytes[load.slots].copy()
            case Publish(last=last):
                assert not load.stopped, "nothing is published after CANCELLED"
                assert not load.is_last_received, "nothing is published after the last"
                load.is_last_received = last
                if load.slots:
                    self.check_written(worker, load, message)

    def check_written(self, worker: int, load: Load, message: Publish) -> None:
        consumer = self.consumers[worker]
        nbytes = consumer.bytes.shape[1]
        offset = consumer.layout.first_kv_head * consumer.layout.head_nbytes
        for block in message.blocks:
            source = self.producer.memory.bytes[block.slot, offset : offset + nbytes]
            assert any((consumer.bytes[slot] == source).all() for slot in load.slots or ())

    @invariant()
    def each_offer_ends_at_most_once(self) -> None:
        ended = Counter(self.producer.finished)
        assert all(
            ended[name] == self.offers[name] - (name in self.blocks) for name in ended | self.offers
        )

    @invariant()
    def writes_touch_only_held_blocks(self) -> None:
        memory = self.producer.memory
        held = set(memory.exposed)
        assert held <= {block for blocks in self.blocks.values() for block in blocks}
        for handle in self.producer.agent.held:
            first = (handle.local[:, 0] - memory.base_address) // memory.layout.block_nbytes
            last = (
                handle.local[:, 0] + handle.local[:, 1] - 1 - memory.base_address
            ) // memory.layout.block_nbytes
            assert {
                slot for a, b in zip(first, last, strict=True) for slot in range(a, b + 1)
            } <= held

    @invariant()
    def nothing_is_written_after_released(self) -> None:
        for consumer, loads in zip(self.consumers, self.loads, strict=True):
            for load in loads.values():
                if load.released is not None and load.slots:
                    assert (consumer.bytes[load.slots] == load.released).all()

    def teardown(self) -> None:
        for transfer_id in list(self.blocks):
            self.producer.cancel(transfer_id)
        self.producer.agent.frozen = False
        for _ in range(5):
            self.producer.let_writes_end()
            self.producer.advance(LEASE_S)
            self.look()
        self.producer.agent.let_failed_arrive()
        self.nothing_is_written_after_released()
        assert not self.blocks, "an offer did not end"
        assert self.producer.memory.exposed == []
        stats = self.producer.stats
        assert (stats.queued_bytes, stats.inflight_bytes) == (0, 0)
        assert len(self.producer.side.transfers._early) == 0
        for loads in self.loads:
            assert all(
                load.released is not None
                for load in loads.values()
                if load.slots and not load.stopped
            )
        for consumer in self.consumers:
            consumer.close()
        self.producer.close()


ProducerMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None
)
TestProducer = ProducerMachine.TestCase
