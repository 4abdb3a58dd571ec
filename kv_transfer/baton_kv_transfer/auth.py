"""The token all engines of a service share, and how a peer proves in the handshake that it knows it.

    proof = HMAC-SHA256(token, role, both nonces, both instance ids)

Each side draws a nonce per handshake, so a proof seen once is of no use later; the role keeps a proof from being sent back to
who made it. Without a token the proofs are made with an empty key: two sides of which only one has a token refuse each other.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from baton_engine.protocol.config import container_path

PRODUCER = "producer"
CONSUMER = "consumer"
NONCE_BYTES = 32


def read_token(token_file: str) -> bytes:
    """The token in `token_file`, without white space around it; b"" if no file is named.

    Raises:
        ValueError: the file cannot be read, or is empty.
    """
    if not token_file:
        return b""
    try:
        token = container_path(token_file).read_bytes().strip()
    except OSError as error:
        raise ValueError(f"kv_transfer.token_file {token_file} cannot be read: {error.strerror}") from None
    if not token:
        raise ValueError(f"kv_transfer.token_file {token_file} is empty: put the service's shared secret there")
    return token


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof(
    token: bytes, role: str, *, consumer_nonce: bytes, producer_nonce: bytes, consumer_id: str, producer_id: str
) -> bytes:
    """What the side in `role` sends to the other: 32 bytes.

    Args:
        role: PRODUCER or CONSUMER, of who proves.
        consumer_nonce, producer_nonce: of HELLO and WELCOME.
        consumer_id, producer_id: instance ids of the two engines.
    """
    digest = hmac.new(token, digestmod=hashlib.sha256)
    for part in (
        b"baton-kv",
        role.encode(),
        consumer_nonce,
        producer_nonce,
        consumer_id.encode(),
        producer_id.encode(),
    ):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def proof_holds(ours: bytes, theirs: bytes) -> bool:
    """Whether the peer's proof is the one computed here; takes the same time wherever they differ."""
    return hmac.compare_digest(ours, theirs)
