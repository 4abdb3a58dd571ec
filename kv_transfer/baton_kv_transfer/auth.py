"""How a peer proves in the handshake that it knows the token all engines of a service share: its `ServiceKey.secret("kv")`.

    proof = HMAC-SHA256(token, role, both nonces, both instance ids)

Each side draws a nonce per handshake, so a proof seen once is of no use later; the role keeps a proof from being sent back to
who made it. Without a token the proofs are made with an empty key: two sides of which only one has a token refuse each other.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from baton_protocol.service_key import ServiceKey

PRODUCER = "producer"
CONSUMER = "consumer"
NONCE_BYTES = 32


def derive_token(service_key: ServiceKey | None) -> bytes:
    return service_key.secret("kv") if service_key is not None else b""


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def compute_proof(
    token: bytes,
    role: str,
    *,
    consumer_nonce: bytes,
    producer_nonce: bytes,
    consumer_id: str,
    producer_id: str,
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


def verify_proof(ours: bytes, theirs: bytes) -> bool:
    """Whether the peer's proof is the one computed here; takes the same time wherever they differ."""
    return hmac.compare_digest(ours, theirs)
