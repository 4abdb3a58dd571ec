"""The key that all processes of one service share, and the secrets derived from this key.

The operator generates a key of 32 random bytes per service, and mounts the key into the service's
pods. No process sends the key itself. Processes use derived secrets:

    ZMQ sockets        CURVE, with one derived key pair for servers and one for clients
    HTTP admin         on every request that changes something, `Authorization: Bearer <derived>`,
                       or a signature, which is valid only for this request and this receiver
    KV handshake,      HMAC proofs over nonces, with a secret derived for this purpose
    rendezvous store

A secret is HMAC-SHA256(key, "baton/" + purpose), so one secret reveals no other secret. A server
without a key accepts every client without a key. A connection fails if only one side has
a key.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from baton_protocol.options.config import container_path
from baton_protocol.zap import require_client_key

MIN_KEY_BYTES = 16
#: Events of a ZMQ socket monitor after a failed handshake, for example because the keys differ.
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


#: Largest difference in seconds between the time in a signature and the receiver's clock.
SIGNATURE_LIFETIME_S = 300.0
_SIGNED = "Baton-Signature"


class AdminRequest(NamedTuple):
    """The parts of an HTTP admin request that the request's signature covers."""

    method: str
    target: str  #: Path and query.
    #: Address of the pod that must carry out the request. Empty for a coordinator, whose clients
    #: know only the address of its Service.
    pod_ip: str = ""
    body: bytes = b""


class ServiceKeyError(ValueError):
    """The key cannot be loaded. The text names the file."""


class ServiceKey:
    """The key that all processes of one service share."""

    def __init__(self, key: bytes) -> None:
        """Create a key from its bytes.

        Raises:
            ValueError: the key is too short.
        """
        if len(key) < MIN_KEY_BYTES:
            raise ValueError(
                f"a service key has at least {MIN_KEY_BYTES} bytes, this one {len(key)}"
            )
        self._key = key

    @classmethod
    def load(cls, file: str) -> ServiceKey | None:
        """Load the key from a file. White space around the key is removed.

        Args:
            file: path inside the pod; empty: no key.

        Returns:
            The key, or None if `file` is empty.

        Raises:
            ServiceKeyError: the file cannot be read, the key is too short, or pyzmq lacks CURVE.
        """
        if not file:
            return None
        if not zmq.has("curve"):
            raise ServiceKeyError(
                "service_key_file: this pyzmq was built without CURVE; PyPI's wheels have it"
            )
        try:
            key = container_path(file).read_bytes().strip()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ServiceKeyError(f"service_key_file {file} cannot be read: {reason}") from None
        try:
            return cls(key)
        except ValueError as error:
            raise ServiceKeyError(f"service_key_file {file}: {error}") from None

    def __repr__(self) -> str:
        return "ServiceKey(...)"  # never in a log

    def secret(self, purpose: str) -> bytes:
        """Return the 32-byte secret derived from this key for one purpose, such as `http`."""
        return hmac.digest(self._key, b"baton/" + purpose.encode(), hashlib.sha256)

    @property
    def bearer(self) -> str:
        """Value of the Authorization header that a person can use for every HTTP admin request."""
        return f"Bearer {self.secret('http').hex()}"

    def sign(self, request: AdminRequest, *, now: float | None = None) -> str:
        """Return the value of the Authorization header for one HTTP admin request.

        The signature reveals no secret. So no harm is done if the receiver's address now belongs to
        another pod.

        Args:
            now: time of the signature. None: the current time.
        """
        return self._signature(request, str(int(time.time() if now is None else now)))

    def admits(self, authorization: str | None, request: AdminRequest | None = None) -> bool:
        """Return whether the sender of this Authorization header has the key.

        Args:
            request: the request that has the header. None: only `bearer` is accepted.
        """
        if authorization is None:
            return False
        given = authorization.encode(errors="replace")
        scheme, _, rest = authorization.partition(" ")
        if request is None or scheme != _SIGNED:
            return hmac.compare_digest(given, self.bearer.encode())
        at = rest.partition(":")[0]
        if not (at.isascii() and at.isdecimal() and len(at) <= 12):
            return False
        return hmac.compare_digest(given, self._signature(request, at).encode()) and (
            abs(time.time() - int(at)) <= SIGNATURE_LIFETIME_S
        )

    def _signature(self, request: AdminRequest, at: str) -> str:
        head = "\n".join((at, request.method, request.target, request.pod_ip, ""))
        digest = hmac.digest(
            self.secret("http-signature"),
            head.encode(errors="surrogateescape") + request.body,
            hashlib.sha256,
        )
        return f"{_SIGNED} {at}:{digest.hex()}"

    def protect_server(self, socket: zmq.Socket[Any]) -> None:
        """Encrypt a server's socket and admit only clients with the key. Call before `bind`."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._curve_keys("server")
        # One domain per key, because a process may have several keys.
        domain = f"baton-{self.secret('zap').hex()[:16]}"
        require_client_key(socket, domain, z85.decode(self._curve_keys("client")[0]))

    def protect_client(self, socket: zmq.Socket[Any]) -> None:
        """Encrypt a client's socket and accept only servers with the key. Call before `connect`."""
        socket.curve_serverkey = self._curve_keys("server")[0]
        socket.curve_publickey, socket.curve_secretkey = self._curve_keys("client")

    def _curve_keys(self, side: str) -> tuple[bytes, bytes]:
        """Return the CurveZMQ key pair (public, private) of `side`, "server" or "client", in Z85.

        The private key is a `secret`. Any 32 bytes are a valid private key of Curve25519.
        """
        private = z85.encode(self.secret(f"curve/{side}"))
        return zmq.curve_public(private), private


def why_handshake_failed(event: Mapping[str, Any], ours: ServiceKey | None) -> str:
    """Return why a client's handshake failed, as a text to append to the server's name.

    Args:
        event: parsed monitor event of a type in HANDSHAKE_FAILED.
        ours: the client's key, or None.
    """
    kind, mismatch = event["event"], event["value"] == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
    # The server closed the connection without a reason.
    if kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        why = (
            "requires a service key (none is set here)"
            if ours is None
            else "does not accept our service key, or has none"
        )
        return f"closed the connection in the handshake: it {why}, or has just ended"
    if kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and not mismatch:
        return f"uses another protocol (error {event['value']:#x})"
    if ours is None:
        return "requires a service key, and none is set here: see service_key_file"
    return (
        "does not accept our service key, or has none: "
        "service_key_file must contain the same key in all pods of the service"
    )


def watch_handshakes(socket: zmq.Socket[Any]) -> zmq.Socket[bytes]:
    """Return a socket that receives one message per refused client, for `count_refused`.

    The queue of the socket has no limit, because a full queue would block ZeroMQ's I/O thread.
    """
    address = f"inproc://handshakes-{socket.fileno()}"
    socket.monitor(address, HANDSHAKE_FAILED)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR, socket_class=zmq.Socket)
    monitor.rcvhwm = 0
    monitor.linger = 0
    monitor.connect(address)
    return monitor


def count_refused(handshakes: zmq.Socket[bytes]) -> int:
    """Return the number of clients refused since the last call with this monitor socket."""
    count = 0
    try:
        while True:
            handshakes.recv_multipart(zmq.NOBLOCK)
            count += 1
    except zmq.Again:
        return count
