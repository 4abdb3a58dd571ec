"""Push: writes blocks into consumers' memory, on the connector's thread.

A subscriber is one worker of a consumer. A block for a subscriber has these states:

    queued      The block is in Subscriber.queue. `stop` drops the block.
    in flight   A write of the block is posted to the agent. The write ends in DONE or ERR. Removing
                the peer ends the write in ERR.
    written     `write_queued` has reported the write, and the writer has no record of it.

The bytes in flight to each peer are limited. The transfers to one peer take turns, so that a long
transfer does not delay a short one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from baton_kv_transfer import side_channel
from baton_kv_transfer.agent.agent import XferHandle
from baton_kv_transfer.connector_context import ConnectorContext
from baton_kv_transfer.producer.sessions import Session
from baton_kv_transfer.producer.transfer_state import OfferedBlock, Subscriber, checksum_blocks
from baton_kv_transfer.side_channel import PublishedBlock
from baton_kv_transfer.transports.transfer import TransportError

#: Maximum size of a write, unless one block is larger. Subscribers take turns after each write.
MAX_WRITE_BYTES = 4 * 2**20


@dataclass(slots=True, eq=False)
class _PeerWindow:
    """Number of bytes in flight to one peer, and the peer's subscribers with queued blocks."""

    inflight_bytes: int = 0
    #: Subscribers with queued blocks. The next write goes to the first subscriber.
    turns: deque[Subscriber] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class _Write:
    """A posted write of some blocks to one subscriber."""

    window: _PeerWindow
    subscriber: Subscriber
    blocks: list[PublishedBlock]
    nbytes: int
    handle: XferHandle


class EndedWrite(NamedTuple):
    """A write that has ended. Subscriber.num_writes no longer counts it."""

    subscriber: Subscriber
    #: The blocks that are now in the subscriber's memory; empty if the write failed.
    blocks: list[PublishedBlock]
    #: Why the write failed; empty if it succeeded.
    error: str


class BlockWriter:
    """Queues and posts writes to all consumers."""

    def __init__(self, context: ConnectorContext) -> None:
        self._context = context
        self._agent, self._stats, self._clock = context.agent, context.stats, context.clock
        self._windows: dict[str, _PeerWindow] = {}  # by agent name
        self._in_flight: list[_Write] = []

    def enqueue(self, subscriber: Subscriber, blocks: list[OfferedBlock]) -> None:
        """Queue blocks to write. Their checksums are computed when the write is posted."""
        if not blocks:
            return
        window = self._windows.setdefault(subscriber.session.agent_name, _PeerWindow())
        if not subscriber.queue:
            window.turns.append(subscriber)
        subscriber.queue += blocks
        self._stats.queued_bytes += len(blocks) * subscriber.block_nbytes

    def stop(self, subscriber: Subscriber) -> None:
        """Drop the queued blocks of a subscriber. Writes in flight continue."""
        if subscriber.queue:
            self._stats.queued_bytes -= len(subscriber.queue) * subscriber.block_nbytes
            subscriber.queue.clear()

    def has_writes_to(self, session: Session) -> bool:
        """Return whether a write to the memory of the session's consumer is in flight."""
        return any(write.subscriber.session is session for write in self._in_flight)

    def write_queued(self) -> Iterator[EndedWrite]:
        """Yield ended writes. Post queued blocks, up to each peer's limit of bytes in flight.

        Each ended write is yielded before further blocks are posted. So the caller can stop
        subscribers after a failed write.
        """
        for write in list(self._in_flight):
            state = self._agent.check_xfer_state(write.handle)
            if state != "PROC":
                no_reason = "the transport gave no reason"
                yield self._end(write, write.handle.error or no_reason if state == "ERR" else "")
        for name, window in list(self._windows.items()):
            yield from self._post_queued(window)
            if not window.turns and not window.inflight_bytes:
                del self._windows[name]

    def _post_queued(self, window: _PeerWindow) -> Iterator[EndedWrite]:
        """Post queued blocks to one peer. Yield an EndedWrite for each write that fails to post."""
        while window.turns:
            subscriber = window.turns[0]
            if not subscriber.queue:  # stopped
                window.turns.popleft()
                continue
            nbytes = subscriber.block_nbytes
            room = self._context.config.max_inflight_bytes - window.inflight_bytes
            count = min(len(subscriber.queue), max(1, min(room, MAX_WRITE_BYTES) // nbytes))
            if window.inflight_bytes and count * nbytes > room:
                return
            window.turns.popleft()
            blocks = [subscriber.queue.popleft() for _ in range(count)]
            self._stats.queued_bytes -= count * nbytes
            if subscriber.queue:
                window.turns.append(subscriber)
            try:
                self._post_write(window, subscriber, blocks, count * nbytes)
            except (ValueError, LookupError, TransportError) as error:
                # The peer was removed, possibly by a fence (`Agent.fence`).
                yield EndedWrite(subscriber, [], str(error))

    def _post_write(
        self, window: _PeerWindow, subscriber: Subscriber, blocks: list[OfferedBlock], nbytes: int
    ) -> None:
        published = checksum_blocks(self._context.memory, subscriber, blocks)
        handle = self._make_transfer(subscriber, published)
        self._agent.transfer(handle)
        if not subscriber.num_writes:
            subscriber.writing_since = self._clock()
        subscriber.num_writes += 1
        subscriber.first_write = subscriber.first_write or self._clock()
        window.inflight_bytes += nbytes
        self._stats.inflight_bytes += nbytes
        self._stats.descriptors_posted += handle.num_descs
        self._in_flight.append(_Write(window, subscriber, published, nbytes, handle))

    def _make_transfer(self, subscriber: Subscriber, blocks: list[PublishedBlock]) -> XferHandle:
        remote_side = subscriber.session.slot_descs
        if remote_side is None:
            raise ValueError("the consumer's memory was removed")
        our_slots = [block.slot for block in blocks]
        their_slots = subscriber.slots[
            [block.index - subscriber.first_block_index for block in blocks]
        ]
        local_side = self._context.local_slot_descs(subscriber.heads)
        publish = side_channel.Publish(
            subscriber.transfer.transfer_id, subscriber.generation, blocks, last=False, written=True
        )
        notif = side_channel.encode(publish)
        return self._agent.make_prepped_xfer(
            "WRITE", local_side, our_slots, remote_side, their_slots, notif
        )

    def _end(self, write: _Write, error: str) -> EndedWrite:
        subscriber = write.subscriber
        self._in_flight.remove(write)
        self._agent.release_xfer_handle(write.handle)
        write.window.inflight_bytes -= write.nbytes
        self._stats.inflight_bytes -= write.nbytes
        subscriber.num_writes -= 1
        if error:
            subscriber.has_failed_write = True
            return EndedWrite(subscriber, [], error)
        subscriber.last_write = subscriber.writing_since = self._clock()
        self._stats.bytes_sent += write.nbytes
        return EndedWrite(subscriber, write.blocks, "")
