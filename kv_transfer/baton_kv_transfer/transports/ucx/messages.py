"""Messages between the two sides of the `ucx` transport, and the tags of UCX's tag matching.

    READ    reader: READ                         owner: the data    (or REFUSED)
    WRITE   writer: WRITE, the data              owner: DONE        (or REFUSED)
            writer: WRITE that awaits GO         owner: GO          (or REFUSED)
            writer: the data                     owner: DONE

A WRITE message is short if its rows and notification have up to `UCXContext.max_eager_bytes` bytes.
A short message always arrives before data that is sent after it, so the owner posts receives in
time. After a longer WRITE message, the writer waits for GO before it sends the data.

A side sends HELLO before its first request over a new endpoint. HELLO has the secret from the
receiver's metadata, and a random session id. Every later message about the sender's requests
carries this session id, in both directions.
"""

from __future__ import annotations

import msgspec

#: Tag of all messages that this module defines.
CONTROL_TAG = 1
#: Set in the tags of data: DATA_BIT | transfer << PIECE_BITS | piece.
DATA_BIT = 1 << 63
PIECE_BITS = 19
TRANSFER_BITS = 44
MAX_MESSAGE_BYTES = 64 * 2**20


class UCXHello(msgspec.Struct, array_like=True, tag=1):
    secret: bytes  # the secret in the receiver's metadata
    session: int  # session id that the sender draws
    name: str  # name of the sender's agent
    address: bytes  # address of the sender's UCX worker


class Read(msgspec.Struct, array_like=True, tag=2):
    session: int
    transfer: int
    rows: bytes  # iovec of the receiver's memory


class Write(msgspec.Struct, array_like=True, tag=3):
    session: int
    transfer: int
    rows: bytes
    notif: bytes
    awaits_go: bool


class Go(msgspec.Struct, array_like=True, tag=4):
    session: int
    transfer: int


class UCXRefused(msgspec.Struct, array_like=True, tag=5):
    session: int
    transfer: int
    reason: str


class Done(msgspec.Struct, array_like=True, tag=6):
    session: int
    transfer: int


class Notif(msgspec.Struct, array_like=True, tag=7):
    session: int
    message: bytes


Message = UCXHello | Read | Write | Go | UCXRefused | Done | Notif

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode


def data_tag(transfer: int, piece: int) -> int:
    return DATA_BIT | transfer << PIECE_BITS | piece
