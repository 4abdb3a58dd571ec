"""The transfers that the scheduler has offered. The connector's thread calls all methods.

A transfer begins with the scheduler's offer and ends exactly once. `take_finished` then returns the
transfer's id. The blocks stay allocated until the end. `transfer_state` describes the states.

A transfer ends when all subscribers have left and no write to a subscriber is in flight. A
subscriber is one worker of the consumer.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator

import numpy as np

from baton_kv_transfer import side_channel
from baton_kv_transfer.connector import BlockSave
from baton_kv_transfer.connector_context import ConnectorContext
from baton_kv_transfer.memory.layout import HeadRange
from baton_kv_transfer.producer.block_writer import BlockWriter
from baton_kv_transfer.producer.early_subscriptions import EarlySubscriptions, refuse_subscription
from baton_kv_transfer.producer.publisher import Publisher
from baton_kv_transfer.producer.sessions import Send, Session
from baton_kv_transfer.producer.transfer_state import (
    OfferedBlock,
    OfferedTransfer,
    Subscriber,
    SubscriberState,
    TransferState,
    explain_invalid,
    explain_refusal,
)
from baton_kv_transfer.side_channel import PublishedBlock

logger = logging.getLogger(__name__)

#: Number of ended transfers that are remembered, so that late subscriptions are refused at once.
MAX_ENDED = 4096
#: Heartbeats keep blocks at most for this time after the last block was published. A consumer that
#: never sends RELEASE must not keep the blocks without end.
MAX_HOLD_S = 600.0
#: Heartbeats of a load that waits for memory keep blocks at most for this time after the first
#: block. Two engines may wait for each other's memory without end, so one side must give up.
MAX_WAIT_S = 120.0
#: Time within which writes to a subscriber must end after it has left. Later, the subscriber's
#: session is cut off.
DRAIN_TIMEOUT_S = 5.0
#: Interval at which transfers that wait for slots try again.
SLOT_RETRY_S = 0.02


class TransferManager:
    """The transfers that this worker offers, and their subscribers."""

    def __init__(self, context: ConnectorContext, writer: BlockWriter, send: Send) -> None:
        """Create a manager without transfers.

        Args:
            context: state that both sides of the connector share.
            writer: writes blocks to consumers.
            send: sends a message to a connection.
        """
        self._writer = writer
        self._publisher = Publisher(context, writer, send)
        self._lease_s = context.config.lease_s
        self._memory, self._stats, self._clock = context.memory, context.stats, context.clock
        self._send = send
        self._transfers: dict[str, OfferedTransfer] = {}
        #: Ids of ended transfers, until `take_finished` removes them.
        self._finished: list[str] = []
        self._early = EarlySubscriptions(self._lease_s, send, self._clock)
        self._ended: OrderedDict[str, str] = OrderedDict()  # transfer id -> why
        #: Transfers that wait for slots, in the order in which they began to wait.
        self._waiting_for_slots: dict[str, OfferedTransfer] = {}
        #: No lease ends before this time. A new lease may lower it, and `expire` computes it again.
        #: Heartbeats leave it unchanged.
        self._next_expiry = math.inf

    # From the scheduler

    def offer(self, transfer_id: str, peer_instance_id: str) -> None:
        """Add a transfer. Handle SUBSCRIBE and RELEASE messages that arrived before the offer."""
        if transfer_id in self._transfers:
            logger.warning("transfer %s was offered twice; ignoring the second offer", transfer_id)
            return
        self._ended.pop(transfer_id, None)
        self._transfers[transfer_id] = OfferedTransfer(
            transfer_id, peer_instance_id, self._deadline_in(self._lease_s)
        )
        for session, message in self._early.take(transfer_id):
            if isinstance(message, side_channel.Subscribe):
                self.subscribe(session, message)
            else:
                self.release(session, message)

    def save(self, save: BlockSave) -> None:
        """Publish the blocks that a step has completed, as soon as slots are free.

        Do nothing if the transfer has ended or is CLOSED.
        """
        transfer = self._transfers.get(save.transfer_id)
        if transfer is None or transfer.state is TransferState.CLOSED:
            return
        transfer.held_since = transfer.held_since or self._clock()
        transfer.waiting_saves.append(save)
        if transfer.is_waiting_for_subscribers:
            transfer.deadline = self._deadline_in(self._lease_s)
        if transfer.num_blocks > (room := self._memory.num_slots):
            self._close(
                transfer,
                f"its {transfer.num_blocks} blocks do not fit into the producer's {room} slots",
            )
        elif transfer.blocks or not self._waiting_for_slots:
            # A transfer that has slots goes first, because it frees them sooner.
            self._expose(transfer)
        else:
            self._wait_for_slots(transfer)

    def cancel(self, transfer_id: str) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is not None and transfer.state is not TransferState.CLOSED:
            self._close(transfer, "cancelled by the producer")

    def end_all(self) -> list[str]:
        """End every transfer without waiting for consumers. Call only after closing the agent.

        Return the ids that `take_finished` has not returned.
        """
        self._finished += self._transfers
        self._transfers.clear()
        return self.take_finished()

    # From consumers

    def subscribe(self, session: Session, message: side_channel.Subscribe) -> None:
        """Handle SUBSCRIBE: hold it until the offer, admit the subscriber, or refuse it."""
        transfer = self._transfers.get(message.transfer_id)
        refusal = (
            session.error
            or explain_invalid(self._memory.layout, session, message, self._stats)
            or (
                self._admit(transfer, session, message)
                if transfer
                else self._hold_until_offer(session, message)
            )
        )
        if refusal:
            refuse_subscription(self._send, session, message, refusal)

    def release(self, session: Session, message: side_channel.Release) -> None:
        """Handle RELEASE: end the subscriber's load, or hold the message until the offer."""
        if explain_invalid(self._memory.layout, session, message, self._stats):
            return
        transfer = self._transfers.get(message.transfer_id)
        if transfer is None:
            if message.transfer_id not in self._ended:
                self._early.release(session, message)
            return
        subscriber = transfer.subscribers.get(message.subscriber)
        if subscriber is None:  # a load without blocks sends no SUBSCRIBE
            if explain_refusal(transfer, session, message):
                return
            subscribe = side_channel.Subscribe(
                message.transfer_id,
                message.generation,
                HeadRange(0, 0),
                message.subscriber,
                message.num_subscribers,
                first_block_index=0,
                push_slots=None,
            )
            subscriber = self._add_subscriber(transfer, session, subscribe)
        elif (subscriber.session, subscriber.generation) != (session, message.generation):
            return  # another load
        self._leave(subscriber)
        self._confirm_and_end(transfer)

    def heartbeat(self, session: Session, transfer_ids: list[str]) -> None:
        """Renew the leases of these transfers, and send PENDING.

        PENDING names the transfers of which more blocks will be published. A consumer that waits
        for memory has not subscribed yet. For such a consumer, PENDING names the transfer only
        until the transfer has blocks. Then the consumer can time out. Without this timeout, two
        engines could wait for each other's memory without end.
        """
        now = self._clock()
        pending = []
        for transfer_id in dict.fromkeys(transfer_ids):
            if (transfer := self._transfers.get(transfer_id)) is None:
                continue
            subscribers = [
                each for each in transfer.subscribers.values() if each.session is session
            ]
            pending += [
                transfer_id
                for each in subscribers
                if each.state is SubscriberState.ACTIVE and self._renew(each, now)
            ]
            if not subscribers and session.instance_id == transfer.peer_instance_id:
                if transfer.state is TransferState.OFFERED:
                    pending.append(transfer_id)
                limit = (transfer.held_since or now) + MAX_WAIT_S
                transfer.deadline = max(transfer.deadline, min(now + self._lease_s, limit))
        self._early.extend(session, transfer_ids)
        if pending:
            self._send(session.identity, side_channel.Pending(pending))

    def drop_sessions(self, sessions: Iterable[Session]) -> None:
        """Stop publishing and writing to sessions that have failed or were removed.

        Blocks that the consumer may still read stay allocated until its lease ends.
        """
        for session in sessions:
            self._early.drop(session)
            for subscriber in self._subscribers():
                if subscriber.session is session:
                    self._publisher.stop(subscriber, session.error)
                    self._confirm_and_end(subscriber.transfer)

    # From the writes

    def record_written(self, subscriber: Subscriber, blocks: list[PublishedBlock]) -> None:
        """Record that a write has ended.

        Args:
            subscriber: the receiver of the write.
            blocks: the written blocks, which the write's notification has published; empty if the
                write failed.
        """
        subscriber.written += blocks
        self._stats.blocks_sent += len(blocks)
        if subscriber.state is SubscriberState.ACTIVE:
            self._publisher.publish(subscriber, [])
        self._confirm_and_end(subscriber.transfer)

    # From the thread's loop

    def take_finished(self) -> list[str]:
        """Remove and return the ids of ended transfers. No consumer reads their blocks any more."""
        finished, self._finished = self._finished, []
        return finished

    def expose_waiting(self) -> None:
        """Publish blocks that waited for slots.

        Transfers that have slots already go first. The others follow, the longest wait first.
        If one of these others gets no slot, the transfers after it must wait.
        """
        for transfer in sorted(
            self._waiting_for_slots.values(), key=lambda transfer: not transfer.blocks
        ):
            self._expose(transfer)
            if transfer.waiting_saves and not transfer.blocks:
                return  # smaller transfers must not overtake the one that has waited longest

    def expire(self, now: float) -> list[Session]:
        """End subscriptions and transfers whose lease has expired.

        Read the messages of consumers before this call, because an unread heartbeat may renew a
        lease.

        Returns:
            Sessions to cut off, because writes to them did not end within DRAIN_TIMEOUT_S.
        """
        self._early.expire(now)
        if now < self._next_expiry:
            return []
        stalled: list[Session] = []
        for transfer in list(self._transfers.values()):
            stalled += self._expire_transfer(transfer, now)
        deadlines = [
            subscriber.deadline
            for subscriber in self._subscribers()
            if subscriber.state is not SubscriberState.LEFT or subscriber.num_writes
        ]
        deadlines += [
            transfer.deadline
            for transfer in self._transfers.values()
            if transfer.is_waiting_for_subscribers
        ]
        deadlines += [transfer.slots_deadline for transfer in self._waiting_for_slots.values()]
        self._next_expiry = min(deadlines, default=math.inf)
        return stalled

    def next_deadline(self) -> float:
        """Return the next time to call `expire` and `expose_waiting`; infinity if there is none."""
        deadline = min(self._next_expiry, self._early.next_expiry)
        return min(deadline, self._clock() + SLOT_RETRY_S) if self._waiting_for_slots else deadline

    def _expire_transfer(self, transfer: OfferedTransfer, now: float) -> list[Session]:
        """End expired subscriptions of a transfer. Close the transfer if a deadline has passed.

        A transfer has a deadline for further subscribers, and a deadline for free slots.

        Return the sessions to cut off (see `expire`).
        """
        stalled = []
        for subscriber in list(transfer.subscribers.values()):
            if now < subscriber.deadline:
                continue
            if subscriber.state is not SubscriberState.LEFT:
                was_held = subscriber.deadline == subscriber.all_published_at + MAX_HOLD_S
                self._record_expiry(transfer, MAX_HOLD_S if was_held else None)
                self._publisher.stop(subscriber, "the producer's lease expired")
                self._leave(subscriber)
            elif subscriber.num_writes:
                subscriber.deadline = self._deadline_in(DRAIN_TIMEOUT_S)
                stalled.append(subscriber.session)
        if transfer.is_waiting_for_subscribers and now >= transfer.deadline:
            was_held = transfer.deadline == transfer.held_since + MAX_WAIT_S
            self._record_expiry(transfer, MAX_WAIT_S if was_held else None)
            self._close(transfer, "its lease expired")
        elif transfer.waiting_saves and now >= transfer.slots_deadline:
            self._close(
                transfer,
                f"no slot became free at the producer within {self._lease_s:g} s",
            )
        else:
            self._confirm_and_end(transfer)
        return stalled

    # One subscriber

    def _renew(self, subscriber: Subscriber, now: float) -> bool:
        """Renew a subscriber's lease.

        Returns:
            Whether to send PENDING. False after the last PUBLISH. Also False if writes are in
            flight, and none has ended for the duration of a lease. Without PENDING, the consumer
            does not extend its own deadline.
        """
        until = now + self._lease_s
        if subscriber.all_published_at:
            until = min(until, subscriber.all_published_at + MAX_HOLD_S)
        subscriber.deadline = max(subscriber.deadline, until)
        stalls = subscriber.num_writes > 0 and now >= subscriber.writing_since + self._lease_s
        return not subscriber.all_published_at and not stalls

    def _hold_until_offer(self, session: Session, message: side_channel.Subscribe) -> str:
        """Hold a SUBSCRIBE whose transfer is not offered yet.

        Returns:
            Why the SUBSCRIBE is refused; empty if it is held.
        """
        if ended := self._ended.get(message.transfer_id):
            return f"transfer {message.transfer_id} has ended: {ended}"
        return self._early.add(session, message)

    def _admit(
        self, transfer: OfferedTransfer, session: Session, message: side_channel.Subscribe
    ) -> str:
        """Add a subscriber to an offered transfer, and publish the blocks that are in slots.

        A repeated SUBSCRIBE is ignored until the subscriber has left and its writes have ended.
        After that, a repeated SUBSCRIBE is refused.

        Returns:
            Why the SUBSCRIBE is refused; empty if it is not refused.
        """
        known = transfer.subscribers.get(message.subscriber)
        if known and (known.session, known.generation) == (session, message.generation):
            if known.state is SubscriberState.LEFT and known.is_idle:
                return (
                    f"generation {message.generation} released transfer {message.transfer_id} "
                    "already"
                )
            return ""
        refusal = explain_refusal(transfer, session, message)
        if not refusal:
            subscriber = self._add_subscriber(transfer, session, message)
            self._publisher.send_blocks(subscriber, transfer.blocks)
        return refusal

    def _add_subscriber(
        self, transfer: OfferedTransfer, session: Session, message: side_channel.Subscribe
    ) -> Subscriber:
        transfer.deadline = self._deadline_in(self._lease_s)
        subscriber = Subscriber(
            transfer,
            session,
            message.generation,
            message.heads,
            message.heads.count * self._memory.layout.head_nbytes,
            message.first_block_index,
            np.array(message.push_slots or (), dtype=np.int64),
            message.push_slots is not None,
            transfer.deadline,
        )
        transfer.num_subscribers = message.num_subscribers
        transfer.subscribers[message.subscriber] = subscriber
        return subscriber

    def _leave(self, subscriber: Subscriber) -> None:
        """Mark a subscriber as LEFT, and drop the blocks that are queued for it."""
        if subscriber.state is not SubscriberState.LEFT:
            subscriber.state = SubscriberState.LEFT
            subscriber.deadline = self._deadline_in(DRAIN_TIMEOUT_S)
            self._writer.stop(subscriber)

    # One transfer

    def _expose(self, transfer: OfferedTransfer) -> None:
        """Publish the blocks that wait for slots, one BlockSave at a time, while slots are free."""
        while transfer.waiting_saves:
            save = transfer.waiting_saves[0]
            slots = self._memory.expose(save.block_ids)
            if slots is None:
                self._wait_for_slots(transfer)
                return
            transfer.waiting_saves.popleft()
            transfer.slots_deadline = 0.0
            rows = zip(slots, save.block_hashes, strict=True)
            blocks = [
                OfferedBlock(save.first_block_index + row, slot, chain_hash)
                for row, (slot, chain_hash) in enumerate(rows)
            ]
            transfer.blocks += blocks
            transfer.has_last_blocks = transfer.has_last_blocks or save.last
            for subscriber in transfer.subscribers.values():
                if subscriber.state is SubscriberState.ACTIVE:
                    self._publisher.send_blocks(subscriber, blocks)
        self._waiting_for_slots.pop(transfer.transfer_id, None)

    def _wait_for_slots(self, transfer: OfferedTransfer) -> None:
        self._waiting_for_slots.setdefault(transfer.transfer_id, transfer)
        transfer.slots_deadline = transfer.slots_deadline or self._deadline_in(self._lease_s)

    def _close(self, transfer: OfferedTransfer, reason: str) -> None:
        """Close a transfer, so that no further subscriber is admitted.

        Each ACTIVE subscriber receives CANCELLED. Its lease is renewed a last time, so that it can
        send RELEASE.
        """
        transfer.close_reason = reason
        transfer.waiting_saves.clear()
        self._waiting_for_slots.pop(transfer.transfer_id, None)
        for subscriber in transfer.subscribers.values():
            if subscriber.state is SubscriberState.ACTIVE:
                self._publisher.stop(subscriber, reason)
                subscriber.deadline = self._deadline_in(self._lease_s)
        self._confirm_and_end(transfer)

    def _confirm_and_end(self, transfer: OfferedTransfer) -> None:
        """End the transfer if all subscribers have left and no further subscriber is expected.

        With push, first send RELEASED to each subscriber that is STOPPED or LEFT, unless a write
        to it has failed or is in flight. A transfer with a write in flight does not end.
        """
        if self._transfers.get(transfer.transfer_id) is not transfer:
            return
        subscribers = transfer.subscribers.values()
        for subscriber in subscribers:
            if (
                subscriber.push
                and subscriber.state is not SubscriberState.ACTIVE
                and subscriber.is_idle
                and not (subscriber.is_confirmed or subscriber.has_failed_write)
            ):
                self._publisher.confirm(subscriber)
        left = all(
            subscriber.state is SubscriberState.LEFT and subscriber.is_idle
            for subscriber in subscribers
        )
        if left and (transfer.has_all_subscribers or transfer.state is TransferState.CLOSED):
            self._end(transfer)

    def _end(self, transfer: OfferedTransfer) -> None:
        del self._transfers[transfer.transfer_id]
        self._waiting_for_slots.pop(transfer.transfer_id, None)
        self._ended[transfer.transfer_id] = transfer.close_reason or "released"
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        if transfer.blocks:
            self._memory.release([block.slot for block in transfer.blocks])
        self._finished.append(transfer.transfer_id)

    def _record_expiry(self, transfer: OfferedTransfer, limit_s: float | None) -> None:
        """Count and log the end of a lease.

        Args:
            transfer: the transfer of the lease.
            limit_s: the longest time in seconds for which heartbeats can renew the lease, if the
                lease ended after this time. None: no heartbeat arrived in time.
        """
        self._stats.leases_expired += 1
        logger.warning(
            "transfer %s: the consumer's lease has ended (%s); the blocks are freed once no write "
            "of them is in flight",
            transfer.transfer_id,
            f"no renewal for {self._lease_s:.1f} s"
            if limit_s is None
            else f"renewed up to the limit of {limit_s:.0f} s",
        )

    def _deadline_in(self, seconds: float) -> float:
        """Return the time `seconds` from now, and make `next_deadline` at most this time."""
        deadline = self._clock() + seconds
        self._next_expiry = min(self._next_expiry, deadline)
        return deadline

    def _subscribers(self) -> Iterator[Subscriber]:
        for transfer in list(self._transfers.values()):
            yield from list(transfer.subscribers.values())
