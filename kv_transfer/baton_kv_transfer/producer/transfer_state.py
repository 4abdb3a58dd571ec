"""The data of transfers and of their subscribers, and the checks of subscribers' requests.

A lease is the time for which blocks stay allocated without a message of the consumer. A transfer
has these states:

    OFFERED   There are no blocks yet, and no lease, because the request may wait in a busy engine.
    HOLDING   There are blocks. Each subscriber has a lease, and workers that have not subscribed
              yet share one lease.
    CLOSED    The transfer was cancelled, a worker of the consumer never subscribed, or no slots
              became free. No further subscriber is admitted.

A subscriber is one worker of the consumer. It has these states:

    ACTIVE    Blocks are published to the subscriber. Its heartbeats renew its lease.
    STOPPED   CANCELLED was sent, and nothing more is published or written. The subscriber may read
              until it sends RELEASE or its lease ends.
    LEFT      The subscriber sent RELEASE, or its lease ended. Writes to it may be in flight.
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
from baton_kv_transfer.memory.layout import HeadRange, KVCacheLayout
from baton_kv_transfer.memory.slot_memory import SlotMemory
from baton_kv_transfer.producer.sessions import MAX_ID_LENGTH, Session
from baton_kv_transfer.side_channel import PublishedBlock
from baton_protocol.block_hash import BlockHash


class TransferState(enum.Enum):
    OFFERED = enum.auto()
    HOLDING = enum.auto()
    CLOSED = enum.auto()


class SubscriberState(enum.Enum):
    ACTIVE = enum.auto()
    STOPPED = enum.auto()
    LEFT = enum.auto()


@dataclass(slots=True, eq=False)
class Subscriber:
    """A worker of the consumer that fetches a transfer's blocks."""

    transfer: OfferedTransfer
    session: Session
    generation: int
    heads: HeadRange
    #: Size of `heads` in a block, in bytes.
    block_nbytes: int
    first_block_index: int
    #: Push: slots of the consumer's memory for the blocks from first_block_index on.
    slots: NDArray[np.int64]
    #: True: this producer writes the blocks to `slots`. False: the consumer reads the blocks.
    push: bool
    #: End of the lease. In the state LEFT: the deadline for writes in flight.
    deadline: float
    state: SubscriberState = SubscriberState.ACTIVE
    #: Time at which the last PUBLISH was sent; 0: it was not sent yet.
    all_published_at: float = 0.0
    #: Whether RELEASED was sent.
    is_confirmed: bool = False
    #: Push: blocks whose writes are not posted yet.
    queue: deque[OfferedBlock] = field(default_factory=deque)
    #: Number of writes in flight.
    num_writes: int = 0
    #: Whether a posted write ended in ERR. Its bytes may still arrive, so RELEASED is never sent.
    has_failed_write: bool = False
    #: Push: blocks that were written to the consumer's memory.
    written: list[PublishedBlock] = field(default_factory=list)
    #: Time at which the first write was posted; 0: no write was posted.
    first_write: float = 0.0
    #: Time at which the last write ended; 0: no write has ended.
    last_write: float = 0.0
    #: While writes are in flight: time at which a write last ended. Before the first end: time at
    #: which the first of these writes was posted.
    writing_since: float = 0.0

    @property
    def is_idle(self) -> bool:
        return not self.queue and self.num_writes == 0


@dataclass(slots=True)
class OfferedBlock:
    """A block of an offered transfer, in a slot that subscribers may read."""

    #: Index of the block in the sequence.
    index: int
    #: Slot of this worker's memory that holds the block.
    slot: int
    #: Hash of the tokens of the block and of all blocks before it.
    chain_hash: BlockHash
    #: Word sums by range of heads. A sum is computed when a subscriber needs it.
    sums: dict[HeadRange, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class OfferedTransfer:
    """A transfer that the scheduler has offered, with its blocks and its subscribers."""

    transfer_id: str
    #: Id of the engine instance whose workers may subscribe.
    peer_instance_id: str
    #: HOLDING: end of the lease of the workers that have not subscribed yet.
    deadline: float
    #: Time at which the first blocks were saved; 0: no blocks were saved yet.
    held_since: float = 0.0
    #: Number of the consumer's workers that will subscribe; 0 before the first worker subscribes.
    num_subscribers: int = 0
    #: Key: `Subscribe.subscriber`.
    subscribers: dict[int, Subscriber] = field(default_factory=dict)
    #: Published blocks, each in a slot of this worker's memory.
    blocks: list[OfferedBlock] = field(default_factory=list)
    #: Saves that wait for free slots. The transfer also holds the blocks of these saves.
    waiting_saves: deque[BlockSave] = field(default_factory=deque)
    #: Time until which the first waiting save must get its slots; 0: no save waits.
    slots_deadline: float = 0.0
    #: Whether the last blocks of the prompt were published.
    has_last_blocks: bool = False
    #: Why the transfer is CLOSED; empty otherwise.
    close_reason: str = ""

    @property
    def state(self) -> TransferState:
        if self.close_reason:
            return TransferState.CLOSED
        has_blocks = self.blocks or self.waiting_saves or self.has_last_blocks
        return TransferState.HOLDING if has_blocks else TransferState.OFFERED

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the transfer holds: published, or waiting for slots."""
        return len(self.blocks) + sum(len(save.block_ids) for save in self.waiting_saves)

    @property
    def has_all_subscribers(self) -> bool:
        """Whether all workers of the consumer have subscribed."""
        return len(self.subscribers) == self.num_subscribers > 0

    @property
    def is_waiting_for_subscribers(self) -> bool:
        """Whether the transfer is HOLDING, and some workers have not subscribed yet."""
        return self.state is TransferState.HOLDING and not self.has_all_subscribers


def explain_invalid(
    layout: KVCacheLayout,
    session: Session,
    message: side_channel.Subscribe | side_channel.Release,
    stats: ConnectorStats,
) -> str:
    """Return why SUBSCRIBE or RELEASE is invalid; empty if it is valid.

    This check does not need the transfer, which may not be offered yet. `explain_refusal` checks
    the message against the transfer.

    Args:
        layout: layout of the producer's worker.
        session: session of the consumer's worker.
        message: the message.
        stats: counters; refused descriptors are added to descriptors_refused.
    """
    most = layout.num_kv_heads
    if not 0 < len(message.transfer_id) <= MAX_ID_LENGTH or not 0 < message.generation < 2**63:
        return (
            f"a transfer id of {len(message.transfer_id)} characters or generation "
            f"{message.generation} is invalid"
        )
    if not 0 <= message.subscriber < message.num_subscribers <= most:
        return (
            f"subscriber {message.subscriber} of {message.num_subscribers} is invalid: "
            f"this worker has {most} KV heads"
        )
    if isinstance(message, side_channel.Release):
        return ""
    assert session.layout is not None, "the session is OPEN"
    heads, shared = message.heads, layout.heads.overlap(session.layout.heads)
    if heads != shared or not heads.count:
        stats.descriptors_refused += 1
        return (
            f"KV heads [{heads.first}, {heads.end}) were requested, "
            f"the two workers share [{shared.first}, {shared.end})"
        )
    if message.first_block_index < 0:
        return f"first block index {message.first_block_index} is invalid"
    if message.push_slots is None:
        return ""
    if session.memory is None:
        return "a push was requested into memory that was not described"
    num_slots = session.memory.num_slots
    wrong = [slot for slot in message.push_slots if not 0 <= slot < num_slots]
    if wrong or len(set(message.push_slots)) != len(message.push_slots):
        stats.descriptors_refused += max(1, len(wrong))
        return (
            f"push slots must be different numbers in [0, {num_slots}), "
            f"got {wrong[:8] or 'the same number twice'}"
        )
    return ""


def explain_refusal(
    transfer: OfferedTransfer,
    session: Session,
    message: side_channel.Subscribe | side_channel.Release,
) -> str:
    """Return why a transfer refuses SUBSCRIBE or RELEASE; empty if it accepts the message.

    Only workers of the instance to which the transfer is offered are accepted, each of them once.
    """
    if session.instance_id != transfer.peer_instance_id:
        return (
            f"transfer {transfer.transfer_id} is offered to instance {transfer.peer_instance_id}, "
            f"not to {session.instance_id}"
        )
    if transfer.state is TransferState.CLOSED:
        return f"transfer {transfer.transfer_id} has ended: {transfer.close_reason}"
    if transfer.num_subscribers not in (0, message.num_subscribers):
        return (
            f"transfer {transfer.transfer_id} has {transfer.num_subscribers} subscribers, "
            f"not {message.num_subscribers}"
        )
    known = transfer.subscribers.get(message.subscriber)
    if known is not None:
        return (
            f"subscriber {message.subscriber} of transfer {transfer.transfer_id} exists already "
            f"(generation {known.generation}, now {message.generation})"
        )
    return ""


def checksum_blocks(
    memory: SlotMemory, subscriber: Subscriber, blocks: Sequence[OfferedBlock]
) -> list[PublishedBlock]:
    """Return `blocks` as entries of a PUBLISH, with checksums of the subscriber's heads.

    The checksums are computed from `OfferedBlock.sums`. Missing sums are computed first, in one
    call.
    """
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
