"""Who takes a transfer's blocks, and what each may ask for.

A subscriber is one worker of the consumer.

    ACTIVE    told of every block; its heartbeats renew its lease
    STOPPED   was told CANCELLED: nothing more is published or written. It may still read, until it releases or its lease ends
    LEFT      released, or its lease ended; out of the way once none of its writes is in flight
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer import side_channel
from baton_kv_transfer.connector import BlockSave, ConnectorStats
from baton_kv_transfer.memory import checksum
from baton_kv_transfer.memory.kv_memory import KVMemory
from baton_kv_transfer.memory.layout import HeadRange, KVCacheLayout
from baton_kv_transfer.producer.sessions import MAX_ID_LENGTH, Session
from baton_kv_transfer.side_channel import PublishedBlock
from baton_protocol.block_hash import BlockHash


class SubscriberState(enum.Enum):
    ACTIVE = enum.auto()
    STOPPED = enum.auto()
    LEFT = enum.auto()


@dataclass(slots=True, eq=False)
class Subscriber:
    transfer: Transfer
    session: Session
    generation: int
    heads: HeadRange
    first_block_index: int
    slots: NDArray[np.int64]
    """Push: of the consumer's memory, for the blocks from first_block_index on."""
    push: bool
    deadline: float
    """End of the lease; of the time for its last writes once it LEFT."""
    state: SubscriberState = SubscriberState.ACTIVE
    last_sent_at: float = 0.0
    """When it was told that there is nothing to come; 0: not yet."""
    confirmed: bool = False
    """RELEASED was sent."""
    queue: deque[PublishedBlock] = field(default_factory=deque)
    """Push: to be written."""
    num_writes: int = 0
    """In flight."""
    written: list[PublishedBlock] = field(default_factory=list)
    """Push: in its memory."""
    first_write: float = 0.0
    last_write: float = 0.0
    writing_since: float = 0.0
    """While writes are in flight: when the first of them was begun, or one ended last."""

    @property
    def is_idle(self) -> bool:
        return not self.queue and self.num_writes == 0


@dataclass(slots=True)
class Block:
    index: int
    slot: int
    chain_hash: BlockHash
    sums: dict[HeadRange, int] = field(default_factory=dict)
    """Of the head ranges somebody subscribed to."""


@dataclass(slots=True, eq=False)
class Transfer:
    transfer_id: str
    peer_instance_id: str
    """Whose workers may subscribe."""
    deadline: float
    """HOLDING: those who have not come by then will not be waited for."""
    held_since: float = 0.0
    """When its first blocks were saved; 0: none yet."""
    num_subscribers: int = 0
    """0: nobody came yet."""
    subscribers: dict[int, Subscriber] = field(default_factory=dict)
    """By the consumer's own count of its workers."""
    blocks: list[Block] = field(default_factory=list)
    """In slots of the memory, published."""
    waiting: deque[BlockSave] = field(default_factory=deque)
    """Saves for which no slots were free; their blocks belong to the transfer all the same."""
    slots_deadline: float = 0.0
    """Of the first of them."""
    last: bool = False
    """No more blocks will be published."""
    closed: str = ""
    """CLOSED: why."""

    @property
    def num_blocks(self) -> int:
        """Held, published or not."""
        return len(self.blocks) + sum(len(save.block_ids) for save in self.waiting)

    @property
    def has_all_subscribers(self) -> bool:
        """Everybody came."""
        return len(self.subscribers) == self.num_subscribers > 0

    @property
    def is_waiting_for_subscribers(self) -> bool:
        """HOLDING, and the lease of those who have not come runs."""
        return (
            bool(self.blocks or self.waiting or self.last)
            and not self.has_all_subscribers
            and not self.closed
        )


def explain_invalid(
    layout: KVCacheLayout,
    session: Session,
    message: side_channel.Subscribe | side_channel.Release,
    stats: ConnectorStats,
) -> str:
    """What cannot be asked for, whatever the transfer; empty if nothing.

    Args:
        layout: of the producer's worker.
        stats: counts descriptors_refused.
    """
    most = layout.num_kv_heads
    if not 0 < len(message.transfer_id) <= MAX_ID_LENGTH or not 0 < message.generation < 2**63:
        return f"a transfer id of {len(message.transfer_id)} characters, or generation {message.generation}, cannot be"
    if not 0 <= message.subscriber < message.num_subscribers <= most:
        return f"subscriber {message.subscriber} of {message.num_subscribers} cannot be, this worker has {most} KV heads"
    if isinstance(message, side_channel.Release):
        return ""
    assert session.layout is not None, "the session is OPEN"
    heads, shared = message.heads, layout.heads.overlap(session.layout.heads)
    if heads != shared or not heads.count:
        stats.descriptors_refused += 1
        return f"KV heads [{heads.first}, {heads.end}) were asked for, the two workers share [{shared.first}, {shared.end})"
    if message.first_block_index < 0:
        return f"blocks from index {message.first_block_index} on cannot be"
    if message.push_slots is None:
        return ""
    if session.memory is None:
        return "blocks are to be pushed into memory that was not described"
    num_slots = session.memory.num_slots
    wrong = [slot for slot in message.push_slots if not 0 <= slot < num_slots]
    if wrong or len(set(message.push_slots)) != len(message.push_slots):
        stats.descriptors_refused += max(1, len(wrong))
        return f"slots to push into must be different ones in [0, {num_slots}), got {wrong[:8] or 'one twice'}"
    return ""


def explain_refusal(
    transfer: Transfer, session: Session, message: side_channel.Subscribe | side_channel.Release
) -> str:
    """Why this worker is not let in; empty if it is: the offered peer's workers are, each once, and nobody else."""
    if session.instance_id != transfer.peer_instance_id:
        return (
            f"transfer {transfer.transfer_id} is offered to instance {transfer.peer_instance_id}, "
            f"not to {session.instance_id}"
        )
    if transfer.closed:
        return f"transfer {transfer.transfer_id} has ended: {transfer.closed}"
    if transfer.num_subscribers not in (0, message.num_subscribers):
        return f"transfer {transfer.transfer_id} has {transfer.num_subscribers} subscribers, not {message.num_subscribers}"
    known = transfer.subscribers.get(message.subscriber)
    if known is not None:
        return (
            f"subscriber {message.subscriber} of transfer {transfer.transfer_id} came already "
            f"(generation {known.generation}, now {message.generation})"
        )
    return ""


def checksum_blocks(
    memory: KVMemory, subscriber: Subscriber, blocks: Sequence[Block]
) -> list[PublishedBlock]:
    """The blocks as this subscriber is told of them. Sums of heads that nobody asked for before are computed now, in one call."""
    heads, transfer_id = subscriber.heads, subscriber.transfer.transfer_id
    unknown = [block for block in blocks if heads not in block.sums]
    if unknown:
        sums = memory.block_sums([block.slot for block in unknown], heads).tolist()
        for block, word_sum in zip(unknown, sums, strict=True):
            block.sums[heads] = word_sum
    generation = subscriber.generation
    return [
        PublishedBlock(
            block.index,
            block.slot,
            block.chain_hash,
            checksum.bind(
                block.sums[heads],
                transfer_id=transfer_id,
                generation=generation,
                chain_hash=block.chain_hash,
                heads=heads,
            ),
        )
        for block in blocks
    ]
