"""Authenticates ZMQ clients by their CURVE key, with ZAP (https://rfc.zeromq.org/spec/27).

A ZMQ context has one ZAP handler for all its sockets. The handler's thread ends with the context.
Each server socket names a domain, and each domain admits one client key. With
`ZAP_ENFORCE_DOMAIN`, ZMQ refuses all clients if no handler answers.
"""

from __future__ import annotations

import hmac
import os
import threading
from typing import Any

import zmq

ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


class _Handler:
    """Handler of ZAP, ZeroMQ's authentication protocol, for one context until its termination."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        """Bind the ZAP endpoint of the context, and start the thread that answers.

        Raises:
            zmq.ZMQError: the context already has a handler.
        """
        self._client_keys: dict[bytes, bytes] = {}
        self._context = context
        # A shadow context, because the original may be asyncio's, whose destroy() closes all of its
        # sockets.
        self._socket: zmq.Socket[bytes] = zmq.Context.shadow(context).socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(ENDPOINT)
        except zmq.ZMQError:
            self._socket.close()
            raise
        threading.Thread(target=self._answer_all, name="zap", daemon=True).start()

    def admit(self, domain: bytes, client_key: bytes) -> None:
        self._client_keys[domain] = client_key

    def _answer_all(self) -> None:
        try:
            while True:
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            pass
        finally:
            with _lock:  # before another context can be created at the same address
                _handlers.pop(self._context.underlying, None)
            self._socket.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """Return the reply: status 200 if the client has the key of the ZAP domain, else 400.

        Args:
            request: version, request id, domain, address, routing id, mechanism, credentials.
        """
        domain, mechanism, credentials = request[2], request[5], request[6:]
        expected = self._client_keys.get(domain)
        known = (
            expected is not None
            and mechanism == b"CURVE"
            and len(credentials) == 1
            and hmac.compare_digest(credentials[0], expected)
        )
        status, text = (b"200", b"OK") if known else (b"400", b"unknown client key")
        return [_VERSION, request[1], status, text, b"", b""]


#: Handlers by the context's address, because several Python objects may share one context.
_handlers: dict[int, _Handler] = {}
_lock = threading.Lock()


def require_client_key(socket: zmq.Socket[Any], domain: str, client_key: bytes) -> None:
    """Make a server socket admit only clients with this 32-byte public key.

    Call this function before `bind`.

    Raises:
        zmq.ZMQError: the context already has a ZAP handler that this module did not create.
    """
    context = socket.context
    socket.zap_domain = domain.encode()
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    with _lock:
        handler = _handlers.get(context.underlying)
        if handler is None:
            handler = _handlers[context.underlying] = _Handler(context)
        handler.admit(domain.encode(), client_key)


def _forget_handlers() -> None:
    """Reset the handlers and the lock in a forked child, which lacks the parent's threads."""
    global _handlers, _lock
    _handlers, _lock = {}, threading.Lock()


os.register_at_fork(after_in_child=_forget_handlers)
