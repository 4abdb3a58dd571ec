"""How a store and its client show each other that they have the same secret, before any command. Nothing says the secret itself.

    client                                          store
    Hello(nonce)                    ->
                                    <-              Challenge(nonce, HMAC(secret, "store" + both nonces))
    Proof(HMAC(secret, "client" + both nonces))  ->
                                    <-              Answer

Whoever is not convinced closes the connection. What follows is neither encrypted nor signed: this keeps out who has no key, not
who sits on the wire between two that have it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket

import msgspec

from baton_engine.distributed.store.wire import Answer, exchange, frame
from baton_protocol.service_key import ServiceKey

NONCE_BYTES = 32
MAX_PROOF_MESSAGE_BYTES = 256


def store_secret(key: ServiceKey | None) -> bytes:
    """Of the stores of a service; empty without a key."""
    return b"" if key is None else key.secret("store")


class Hello(msgspec.Struct, tag=True):
    nonce: bytes


class Challenge(msgspec.Struct, tag=True):
    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, tag=True):
    proof: bytes


class Admission:
    """A store's side of one client."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonces: tuple[bytes, bytes] | None = None
        self.is_complete = False
        """The client has proved that it has the secret."""

    def answer(self, payload: bytes) -> Challenge | Answer:
        """Raises ValueError: this is no client that has the secret."""
        try:
            message = _strangers.decode(payload)
        except (ValueError, RecursionError):
            raise ValueError("it does not say that it has the service's key") from None
        if (
            isinstance(message, Hello)
            and self._nonces is None
            and len(message.nonce) == NONCE_BYTES
        ):
            self._nonces = message.nonce, secrets.token_bytes(NONCE_BYTES)
            return Challenge(self._nonces[1], _proof(self._secret, b"store", *self._nonces))
        if isinstance(message, Proof) and self._nonces is not None:
            self.is_complete = hmac.compare_digest(
                message.proof, _proof(self._secret, b"client", *self._nonces)
            )
        if not self.is_complete:
            raise ValueError("it does not prove that it has the service's key")
        return Answer()


def introduce(connection: socket.socket, secret: bytes, deadline: float) -> None:
    """A client's side.

    Raises:
        OSError, ValueError: the other side does not have the secret, or does not believe that this one has it.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    challenge = exchange(connection, frame(Hello(nonce)), Challenge, deadline)
    if not hmac.compare_digest(challenge.proof, _proof(secret, b"store", nonce, challenge.nonce)):
        raise ConnectionError("it does not prove that it has the service's key")
    exchange(
        connection,
        frame(Proof(_proof(secret, b"client", nonce, challenge.nonce))),
        Answer,
        deadline,
    )


_strangers = msgspec.msgpack.Decoder(Hello | Proof)


def _proof(secret: bytes, side: bytes, client_nonce: bytes, store_nonce: bytes) -> bytes:
    return hmac.digest(secret, side + b"\0" + client_nonce + store_nonce, hashlib.sha256)
