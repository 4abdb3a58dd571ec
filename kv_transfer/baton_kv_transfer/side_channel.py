"""Messages of the side channel between a consumer (DEALER) and a producer (ROUTER); one msgpack frame each.

    consumer                          producer
    HELLO      version, hash, ids  ->
                                   <- WELCOME    or REFUSED naming both values
    DESCRIBE   layout              ->
                                   <- DESCRIPTION layout, base address, agent metadata; or REFUSED
    then, per transfer
    SUBSCRIBE                      ->            held until the producer's scheduler offers the transfer
                                   <- PUBLISH    blocks of a step, with proof
    HEARTBEAT  (extends leases)    ->
                                   <- PENDING    which of them are accepted and still wait, or are computed: no silence
    RELEASE                        ->            the consumer reads no more: all fetched, given up, or a cancel acknowledged
                                   <- CANCELLED  the producer's side ended; RELEASE acknowledges it

Nothing of phase two is said or read before the compatibility hash matched. No message carries a point in time.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from baton_engine.protocol.block_hash import BlockHash
from baton_kv_transfer.connector import KVCacheLayout

VERSION = 1
MAX_MESSAGE_BYTES = 64 * 2**20


class _Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    pass


class Hello(_Message):
    version: int
    compatibility_hash: str
    instance_id: str
    peer_instance_id: str
    """Whom the consumer expects to meet."""


class Describe(_Message):
    layout: KVCacheLayout


class Subscribe(_Message):
    transfer_id: str


class Release(_Message):
    transfer_id: str
    completed: bool
    """All wanted blocks were fetched and proved."""


class Heartbeat(_Message):
    transfer_ids: list[str]


class Welcome(_Message):
    version: int
    compatibility_hash: str
    instance_id: str


class Description(_Message):
    layout: KVCacheLayout
    base_address: int
    agent_metadata: bytes
    lease_s: float
    """How long the producer keeps blocks after the last sign of this consumer."""


class PublishedBlock(msgspec.Struct, array_like=True, gc=False):
    index: int
    """In the sequence."""
    block_id: int
    chain_hash: BlockHash
    checksum: int


class Publish(_Message):
    transfer_id: str
    blocks: list[PublishedBlock]
    last: bool


class Pending(_Message):
    """Answers HEARTBEAT; left out if there is none."""

    transfer_ids: list[str]


class Cancelled(_Message):
    transfer_id: str
    reason: str


class Refused(_Message):
    """Of a handshake: the consumer must not go on."""

    reason: str


ToProducer = Hello | Describe | Subscribe | Release | Heartbeat
ToConsumer = Welcome | Description | Publish | Pending | Cancelled | Refused

_encoder = msgspec.msgpack.Encoder()
_to_producer: msgspec.msgpack.Decoder[ToProducer] = msgspec.msgpack.Decoder(ToProducer)
_to_consumer: msgspec.msgpack.Decoder[ToConsumer] = msgspec.msgpack.Decoder(ToConsumer)
_T = TypeVar("_T")


def encode(message: ToProducer | ToConsumer) -> bytes:
    return _encoder.encode(message)


def decode_to_producer(frame: bytes) -> ToProducer:
    """Raises msgspec.DecodeError on anything that is not a message to a producer."""
    return _decode(_to_producer, frame)


def decode_to_consumer(frame: bytes) -> ToConsumer:
    """Raises msgspec.DecodeError on anything that is not a message to a consumer."""
    return _decode(_to_consumer, frame)


def _decode(decoder: msgspec.msgpack.Decoder[_T], frame: bytes) -> _T:
    try:
        return decoder.decode(frame)
    except (UnicodeDecodeError, RecursionError) as error:  # msgspec lets these two pass as they are
        raise msgspec.DecodeError(str(error)) from error


def layout_mismatch(ours: KVCacheLayout, theirs: KVCacheLayout) -> str:
    """Why blocks of the two layouts cannot be exchanged; empty if they can. The number of blocks may differ."""
    for field in ("name", "dtype", "num_layers", "num_kv_heads", "block_size", "head_dim"):
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            return f"KV layouts differ in {field}: {mine} here, {other} at the peer"
    return ""
