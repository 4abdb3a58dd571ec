"""The handshake: a store and its client prove to each other that they have the same secret.

    client                                       store
    Hello(nonce)                             ->
                                             <-  Challenge(nonce, HMAC(secret, "store" + nonces))
    Proof(HMAC(secret, "client" + nonces))   ->
                                             <-  StoreReply

The secret itself is not sent. A side that receives a wrong proof closes the connection. Later
messages are neither encrypted nor signed. The handshake refuses clients without the secret, but
does not protect against an attacker on the network path.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket

import msgspec

from baton_engine.distributed.store.wire import StoreReply, exchange, frame
from baton_protocol.service_key import ServiceKey

NONCE_BYTES = 32
MAX_PROOF_MESSAGE_BYTES = 256


def store_secret(key: ServiceKey | None) -> bytes:
    """Return the secret of rendezvous stores, derived from the service key. Empty without a key."""
    return b"" if key is None else key.secret("store")


class StoreHello(msgspec.Struct, tag="Hello"):
    nonce: bytes


class Challenge(msgspec.Struct, tag=True):
    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, tag=True):
    proof: bytes


class Authentication:
    """The store's side of the handshake with one client."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonces: tuple[bytes, bytes] | None = None
        #: Whether the client has shown that it has the secret.
        self.is_complete = False

    def answer(self, payload: bytes) -> Challenge | StoreReply:
        """Return the answer to a message of the handshake.

        Raises:
            ValueError: the client does not have the secret.
        """
        try:
            message = _decoder.decode(payload)
        except (ValueError, RecursionError):
            raise ValueError(
                "its first message is not a handshake with the service's key"
            ) from None
        if (
            isinstance(message, StoreHello)
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
            raise ValueError("it has another service's key")
        return StoreReply()


def authenticate(connection: socket.socket, secret: bytes, deadline: float) -> None:
    """Perform the client's side of the handshake.

    Raises:
        OSError: the store does not have the secret, or refused this client's proof.
        ValueError: the store's answer is not a Challenge.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    challenge = exchange(connection, frame(StoreHello(nonce)), Challenge, deadline)
    if not hmac.compare_digest(challenge.proof, _proof(secret, b"store", nonce, challenge.nonce)):
        raise ConnectionError("the rendezvous store has another service's key")
    exchange(
        connection,
        frame(Proof(_proof(secret, b"client", nonce, challenge.nonce))),
        StoreReply,
        deadline,
    )


_decoder = msgspec.msgpack.Decoder(StoreHello | Proof)


def _proof(secret: bytes, side: bytes, client_nonce: bytes, store_nonce: bytes) -> bytes:
    return hmac.digest(secret, side + b"\0" + client_nonce + store_nonce, hashlib.sha256)
