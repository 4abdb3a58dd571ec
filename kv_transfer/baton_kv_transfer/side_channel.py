"""Messages over ZMQ between a consumer's worker (DEALER) and a producer's worker (ROUTER).

Each message is one msgpack frame.

    consumer                                producer
    HELLO      version, hash, ids, nonce ->
                                         <- WELCOME      nonce, proof of the token; or REFUSED
    DESCRIBE   proof, layout, memory     ->
                                         <- DESCRIPTION  layout, memory, workers; or REFUSED
    then, for each transfer
    SUBSCRIBE  heads, slots              ->              held until the transfer is offered
                                         <- PUBLISH      blocks of a step with their checksums
    HEARTBEAT  renews leases             ->
                                         <- PENDING      transfers with more blocks to publish
    RELEASE    ends the subscription     ->
                                         <- RELEASED     push: all writes have ended, none follows
                                         <- CANCELLED    the producer ended the transfer

A transfer is offered when the producer's scheduler has accepted the request. With push, DESCRIBE
describes the consumer's memory, and each write carries a PUBLISH of its blocks as a notification.
The last PUBLISH is sent as a message, and names all written blocks again. RELEASE means that all
blocks were verified, that the load failed, or that a CANCELLED was received.

A worker of the consumer and a worker of the producer connect if they share KV heads. The scheduler
gives the address of the producer's first worker, whose DESCRIPTION lists all workers. A side
describes its memory only after the compatibility hash and the token matched. No message carries a
point in time, because the clocks of two hosts differ.

SUBSCRIBE, PUBLISH, RELEASE, RELEASED and CANCELLED carry the generation of the load: a random
positive number that the consumer draws. Messages of another generation are ignored. A CANCELLED
with ALL_GENERATIONS ends every load of the transfer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import msgspec

from baton_kv_transfer.memory.layout import HeadRange, KVCacheLayout, RankAddress
from baton_protocol.block_hash import BlockHash

VERSION = 2
MAX_MESSAGE_BYTES = 64 * 2**20
#: Maximum size of a message from a sender that is not authenticated yet. Decoding takes memory.
MAX_HANDSHAKE_BYTES = 2**18
#: Limit of messages that a side reads from one socket before it serves other sockets and deadlines.
MAX_MESSAGES_PER_ROUND = 1024
#: `Cancelled.generation`: the transfer has ended for every load. No load has this generation.
ALL_GENERATIONS = 0
#: Limit of MemoryDescription.num_slots. The receiver allocates a descriptor for each slot.
MAX_SLOTS = 2**22
_MAX_ADDRESS = 2**63
#: Exceptions that an invalid MemoryDescription or KVCacheLayout of a peer can cause.
INVALID_DESCRIPTION = (
    ValueError,
    LookupError,
    ArithmeticError,
    MemoryError,
    RuntimeError,
    msgspec.MsgspecError,
)
#: Time from HELLO to DESCRIPTION after which a consumer gives up. The producer waits twice as long
#: for DESCRIBE, so that it does not refuse a consumer whose process was paused.
HANDSHAKE_TIMEOUT_S = 10.0


class _Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    pass


class MemoryDescription(msgspec.Struct, array_like=True, gc=False):
    """Memory of the sender that the receiver may access: contiguous slots of one KV block each."""

    #: Metadata with which another agent can reach the memory.
    agent_metadata: bytes
    #: Address of slot 0 in the worker's process.
    base_address: int
    num_slots: int
    slot_nbytes: int
    #: DRAM or VRAM.
    mem_type: str
    #: Index of the GPU; 0 for DRAM.
    device_id: int


def explain_invalid_memory(memory: MemoryDescription, layout: KVCacheLayout) -> str:
    """Return why the description of a peer's memory is invalid; empty if it is valid.

    Args:
        memory: the description.
        layout: layout of the peer's blocks. A slot must have the size of a block.
    """
    nbytes = memory.num_slots * memory.slot_nbytes
    if memory.slot_nbytes != layout.block_nbytes:
        return f"slots have {memory.slot_nbytes} bytes, blocks have {layout.block_nbytes}"
    if not 0 < memory.num_slots <= MAX_SLOTS:
        return f"there must be 1 to {MAX_SLOTS} slots, got {memory.num_slots}"
    if memory.base_address < 0 or memory.base_address + nbytes >= _MAX_ADDRESS:
        return f"{nbytes} bytes at address {memory.base_address:#x} exceed the address space"
    if not 0 <= memory.device_id < 2**31:
        return f"the device id must be in [0, 2**31), got {memory.device_id}"
    return ""


class Hello(_Message):
    version: int
    compatibility_hash: str
    #: Instance id of the consumer's engine.
    instance_id: str
    #: Instance id of the engine that the consumer expects at this address.
    peer_instance_id: str
    nonce: bytes


class Describe(_Message):
    proof: bytes
    layout: KVCacheLayout
    #: Memory to which the producer may write (push). None: the consumer reads the blocks.
    memory: MemoryDescription | None


class Subscribe(_Message):
    transfer_id: str
    generation: int
    heads: HeadRange
    #: Index of the sender among the consumer's workers that need heads of the receiver.
    subscriber: int
    #: Number of the consumer's workers that need heads of the receiver. The transfer ends when all
    #: of them have sent RELEASE.
    num_subscribers: int
    #: Index of the first requested block in the sequence.
    first_block_index: int
    #: Slots of the consumer's memory for the blocks from first_block_index on (push). None: the
    #: consumer reads the blocks.
    push_slots: list[int] | None


class Release(_Message):
    transfer_id: str
    generation: int
    subscriber: int
    #: As in SUBSCRIBE. A load without blocks sends RELEASE without SUBSCRIBE.
    num_subscribers: int
    #: Whether all requested blocks arrived and were verified.
    completed: bool


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
    #: How long the producer keeps blocks after the last message of this consumer, in seconds.
    lease_s: float
    #: All workers of the producer's engine, in rank order.
    ranks: list[RankAddress]


class PublishedBlock(msgspec.Struct, array_like=True, gc=False):
    #: Index of the block in the sequence.
    index: int
    #: Slot of the producer's memory that holds the block.
    slot: int
    #: Hash of the tokens of the block and of all blocks before it.
    chain_hash: BlockHash
    #: Checksum of the heads that the consumer requested (`memory.checksum.bind`).
    checksum: int


class Publish(_Message):
    transfer_id: str
    generation: int
    blocks: list[PublishedBlock]
    #: Whether no more blocks follow.
    last: bool
    #: Push: whether the blocks are in the consumer's memory already.
    written: bool


class Pending(_Message):
    """The answer to HEARTBEAT: transfers of which more blocks will be published."""

    transfer_ids: list[str]


class Released(_Message):
    transfer_id: str
    generation: int


class Cancelled(_Message):
    transfer_id: str
    #: Generation of the load that ends, or ALL_GENERATIONS.
    generation: int
    reason: str


class Refused(_Message):
    """The producer's refusal of a handshake or message. The consumer must connect again."""

    reason: str
    #: Whether another instance now has the address of the engine that the consumer expects.
    succeeded: bool = False


ToProducer = Hello | Describe | Subscribe | Release | Heartbeat
ToConsumer = Welcome | Description | Publish | Pending | Released | Cancelled | Refused

_T = TypeVar("_T")


def _decode(decoder: msgspec.msgpack.Decoder[_T], frame: bytes) -> _T:
    try:
        return decoder.decode(frame)
    except (UnicodeDecodeError, RecursionError) as error:  # msgspec does not convert these two
        raise msgspec.DecodeError(str(error)) from error


encode: Callable[[ToProducer | ToConsumer], bytes] = msgspec.msgpack.Encoder().encode

# These functions decode one message. They raise msgspec.DecodeError if the bytes are malformed, or
# contain a message of another kind. The notification of a producer's write is a PUBLISH.
decode_to_producer: Callable[[bytes], ToProducer] = functools.partial(
    _decode, msgspec.msgpack.Decoder(ToProducer)
)
decode_to_consumer: Callable[[bytes], ToConsumer] = functools.partial(
    _decode, msgspec.msgpack.Decoder(ToConsumer)
)
decode_notification: Callable[[bytes], Publish] = functools.partial(
    _decode, msgspec.msgpack.Decoder(Publish)
)
