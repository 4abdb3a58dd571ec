"""Messages of the side channel between a consumer's worker (DEALER) and a producer's worker (ROUTER); one msgpack frame each.

    consumer                          producer
    HELLO      version, hash, ids, nonce  ->
                                   <- WELCOME    nonce, proof of the shared token; or REFUSED naming both values
    DESCRIBE   proof, layout, and memory if blocks are to be pushed ->
                                   <- DESCRIPTION layout, memory, addresses of the engine's other workers; or REFUSED
    then, per transfer
    SUBSCRIBE  heads, how          ->            held until the producer's scheduler offers the transfer
                                   <- PUBLISH    blocks of a step, with proof. With push it is the notification of the write that
                                                 brought them, and the last word names all that were written once more
    HEARTBEAT  (extends leases)    ->
                                   <- PENDING    which of them are accepted and still wait, or are computed: no silence
    RELEASE                        ->            the consumer wants no more: all proved, given up, or a cancel acknowledged
                                   <- RELEASED   push only: no write to the consumer's memory is in flight or will be begun
                                   <- CANCELLED  the producer's side ended; RELEASE acknowledges it

A consumer's worker greets every worker of the producer whose heads it needs; the scheduler names the first one, whose DESCRIPTION
names the others. Nothing of phase two is said or read before hash and token matched. No message carries a point in time. Messages
about a transfer name the load's generation, drawn at random by the consumer: what belongs to another load is ignored.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from baton_kv_transfer.memory.layout import HeadRange, KVCacheLayout, RankAddress
from baton_protocol.block_hash import BlockHash

VERSION = 2
MAX_MESSAGE_BYTES = 64 * 2**20
MAX_HANDSHAKE_BYTES = 2**18
"""Of a message of a peer that has not proved the token: decoding one costs memory."""


class _Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    pass


class MemoryDescription(msgspec.Struct, array_like=True, gc=False):
    """A worker's memory for a peer's transfers; see `memory.KVMemory`."""

    agent_metadata: bytes
    base_address: int
    num_slots: int
    slot_nbytes: int
    mem_type: str
    device_id: int


class Hello(_Message):
    version: int
    compatibility_hash: str
    instance_id: str
    """Of the consumer's engine."""
    peer_instance_id: str
    """Whom the consumer expects to meet."""
    nonce: bytes


class Describe(_Message):
    proof: bytes
    layout: KVCacheLayout
    memory: MemoryDescription | None
    """None: blocks are only read."""


class Subscribe(_Message):
    transfer_id: str
    generation: int
    heads: HeadRange
    subscriber: int
    """Which of the consumer's workers this is, counting those that need heads of this producer's worker."""
    num_subscribers: int
    """How many those are: the transfer ends when all of them released it."""
    first_block_index: int
    """In the sequence: blocks before it are not wanted."""
    push_slots: list[int] | None
    """Slots of the consumer's memory for the blocks from first_block_index on. None: the consumer reads."""


class Release(_Message):
    transfer_id: str
    generation: int
    subscriber: int
    num_subscribers: int
    """As in SUBSCRIBE: a load that wants nothing releases without having subscribed."""
    completed: bool
    """All wanted blocks arrived and were proved."""


class Heartbeat(_Message):
    transfer_ids: list[str]


class Welcome(_Message):
    version: int
    compatibility_hash: str
    instance_id: str
    nonce: bytes
    proof: bytes


class Description(_Message):
    layout: KVCacheLayout
    memory: MemoryDescription
    lease_s: float
    """How long the producer keeps blocks after the last sign of this consumer."""
    ranks: list[RankAddress]
    """All workers of the producer's engine, in rank order."""


class PublishedBlock(msgspec.Struct, array_like=True, gc=False):
    index: int
    """In the sequence."""
    slot: int
    """Of the producer's memory."""
    chain_hash: BlockHash
    checksum: int
    """Of the heads subscribed to."""


class Publish(_Message):
    transfer_id: str
    generation: int
    blocks: list[PublishedBlock]
    last: bool
    written: bool
    """With push: the blocks are in the consumer's memory."""


class Pending(_Message):
    """Answers HEARTBEAT; left out if there is none."""

    transfer_ids: list[str]


class Released(_Message):
    transfer_id: str
    generation: int


class Cancelled(_Message):
    transfer_id: str
    generation: int
    """0: of every load of this transfer."""
    reason: str


class Refused(_Message):
    """Of a handshake: the consumer must not go on."""

    reason: str
    succeeded: bool = False
    """The instance that the consumer asked for is gone: another one has its address."""


ToProducer = Hello | Describe | Subscribe | Release | Heartbeat
ToConsumer = Welcome | Description | Publish | Pending | Released | Cancelled | Refused

_encoder = msgspec.msgpack.Encoder()
_to_producer: msgspec.msgpack.Decoder[ToProducer] = msgspec.msgpack.Decoder(ToProducer)
_to_consumer: msgspec.msgpack.Decoder[ToConsumer] = msgspec.msgpack.Decoder(ToConsumer)
_notification: msgspec.msgpack.Decoder[Publish] = msgspec.msgpack.Decoder(Publish)
_T = TypeVar("_T")


def encode(message: ToProducer | ToConsumer) -> bytes:
    return _encoder.encode(message)


def decode_to_producer(frame: bytes) -> ToProducer:
    """Raises msgspec.DecodeError on anything that is not a message to a producer."""
    return _decode(_to_producer, frame)


def decode_to_consumer(frame: bytes) -> ToConsumer:
    """Raises msgspec.DecodeError on anything that is not a message to a consumer."""
    return _decode(_to_consumer, frame)


def decode_notification(message: bytes) -> Publish:
    """Of a producer's write. Raises msgspec.DecodeError on anything else."""
    return _decode(_notification, message)


def _decode(decoder: msgspec.msgpack.Decoder[_T], frame: bytes) -> _T:
    try:
        return decoder.decode(frame)
    except (UnicodeDecodeError, RecursionError) as error:  # msgspec lets these two pass as they are
        raise msgspec.DecodeError(str(error)) from error
