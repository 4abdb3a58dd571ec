"""Sends the blocks of transfers, and the end of each transfer, to subscribers.

PUBLISH    blocks that the subscriber may read, or that were written to its memory
CANCELLED  nothing more will be published or written
RELEASED   with push: no write to the subscriber is in flight, and none will follow
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from baton_kv_transfer import side_channel
from baton_kv_transfer.connector_context import ConnectorContext
from baton_kv_transfer.producer.block_writer import BlockWriter
from baton_kv_transfer.producer.sessions import Send
from baton_kv_transfer.producer.transfer_state import (
    OfferedBlock,
    Subscriber,
    SubscriberState,
    checksum_blocks,
)
from baton_kv_transfer.side_channel import PublishedBlock

#: Maximum size in bytes of the blocks in one PUBLISH, without push. The consumer reads these blocks
#: while the checksums of the next blocks are computed.
PART_BYTES = 16 * 2**20


class Publisher:
    """Makes blocks available to subscribers, by PUBLISH messages or, with push, by writes."""

    def __init__(self, context: ConnectorContext, writer: BlockWriter, send: Send) -> None:
        """Create a publisher.

        Args:
            context: state that both sides of the connector share.
            writer: writes blocks to consumers.
            send: sends a message to a connection.
        """
        self._memory, self._stats, self._clock = context.memory, context.stats, context.clock
        self._writer = writer
        self._send = send

    def send_blocks(self, subscriber: Subscriber, blocks: Sequence[OfferedBlock]) -> None:
        """Publish the blocks that the subscriber requested. With push, queue writes of them."""
        first = subscriber.first_block_index
        end = first + len(subscriber.slots) if subscriber.push else math.inf
        wanted = [block for block in blocks if first <= block.index < end]
        if subscriber.push and wanted:
            self._writer.enqueue(subscriber, wanted)
            return
        step = max(1, PART_BYTES // self._memory.layout.block_nbytes)
        while len(wanted) > step:
            part, wanted = wanted[:step], wanted[step:]
            self.publish(subscriber, checksum_blocks(self._memory, subscriber, part), more=True)
        self.publish(subscriber, checksum_blocks(self._memory, subscriber, wanted))

    def publish(
        self, subscriber: Subscriber, blocks: list[PublishedBlock], *, more: bool = False
    ) -> None:
        """Send PUBLISH for `blocks`, marked as the last PUBLISH if no more blocks follow.

        If `blocks` is empty, PUBLISH is sent only if it is the last one. With push, the last
        PUBLISH names all written blocks again.

        Args:
            subscriber: the receiver.
            blocks: blocks that the consumer may read; empty with push.
            more: the caller sends another PUBLISH directly after this one.
        """
        last = (
            not more
            and subscriber.transfer.has_last_blocks
            and subscriber.is_idle
            and not subscriber.all_published_at
        )
        if not blocks and not last:
            return
        if last:
            subscriber.all_published_at = self._clock()
            # Names written blocks again: their notifications may arrive after this message.
            blocks = blocks or subscriber.written
        transfer_id, generation = subscriber.transfer.transfer_id, subscriber.generation
        publish = side_channel.Publish(
            transfer_id, generation, blocks, last, written=subscriber.push
        )
        self._send(subscriber.session.identity, publish)
        if not subscriber.push:
            self._stats.blocks_sent += len(blocks)

    def stop(self, subscriber: Subscriber, reason: str) -> None:
        """Publish and write nothing more to an ACTIVE subscriber, and send CANCELLED."""
        if subscriber.state is SubscriberState.ACTIVE:
            subscriber.state = SubscriberState.STOPPED
            self._writer.stop(subscriber)
            cancelled = side_channel.Cancelled(
                subscriber.transfer.transfer_id, subscriber.generation, reason
            )
            self._send(subscriber.session.identity, cancelled)

    def confirm(self, subscriber: Subscriber) -> None:
        """Send RELEASED to a subscriber with push. No write to the subscriber may be in flight."""
        subscriber.is_confirmed = True
        self._stats.send_seconds += subscriber.last_write - subscriber.first_write
        released = side_channel.Released(subscriber.transfer.transfer_id, subscriber.generation)
        self._send(subscriber.session.identity, released)
