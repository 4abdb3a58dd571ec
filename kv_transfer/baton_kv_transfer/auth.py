"""Computes and verifies the proof that a peer has the service's token, for the handshake.

    token = ServiceKey.secret("kv"), or empty without a service key
    proof = HMAC-SHA256(token, role, both nonces, both instance ids)

Each side draws a new nonce for each handshake, so a proof is valid only once. The proof includes
the role, so a side cannot send the other side's proof back. A side with a token and a side without
one refuse each other.
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
    """Return the token that all engines of a service share; empty without a service key."""
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
    """Return the proof (32 bytes) that the side with this `role` has the token.

    Args:
        token: the token that all engines of the service share; empty without a service key.
        role: the side that sends the proof, PRODUCER or CONSUMER.
        consumer_nonce: the nonce in HELLO.
        producer_nonce: the nonce in WELCOME.
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
    """Return whether the peer's proof equals the expected proof, in constant time."""
    return hmac.compare_digest(ours, theirs)
