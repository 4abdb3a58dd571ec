"""The proof in the handshake that a peer has the token of the service, `ServiceKey.secret("kv")`.

    proof = HMAC-SHA256(token, role, both nonces, both instance ids)

Each side draws a nonce per handshake, so an old proof is useless. The role is part of the proof, so
a side cannot return the proof that it received. Without a token the HMAC's key is empty: a side
with a token and a side without one refuse each other.
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
    """Return the token that all engines of a service share."""
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
    """Return the 32 bytes that show the other side that the side in `role` has the token.

    Args:
        token: see `derive_token`.
        role: PRODUCER or CONSUMER, the side that sends the proof.
        consumer_nonce: from HELLO.
        producer_nonce: from WELCOME.
        consumer_id: instance id of the consumer's engine.
        producer_id: instance id of the producer's engine.
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
    """Compare the peer's proof with the expected one in constant time."""
    return hmac.compare_digest(ours, theirs)
