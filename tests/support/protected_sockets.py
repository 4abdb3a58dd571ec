"""Sockets with a service key, and clients without it.

For the tests of the service key and of the ZAP handler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio

from baton_protocol.service_key import ServiceKey

DEADLINE_MS = 30_000
OURS, THEIRS = ServiceKey(b"the key of one service"), ServiceKey(b"the key of another one")


class UntrustedClients:
    """Configure a client's socket without the right key, in several ways."""

    @staticmethod
    def without_key(client: zmq.Socket[Any]) -> None:
        pass

    @staticmethod
    def with_another_key(client: zmq.Socket[Any]) -> None:
        THEIRS.protect_client(client)

    @staticmethod
    def with_the_servers_public_key(client: zmq.Socket[Any]) -> None:
        OURS.protect_client(client)  # only for the server's public key
        client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()

    @staticmethod
    def with_plain_passwords(client: zmq.Socket[Any]) -> None:
        client.plain_username, client.plain_password = b"baton", b"the key of one service"


def make_server(context: zmq.Context[Any], key: ServiceKey | None) -> tuple[zmq.Socket[bytes], str]:
    server: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    if key is not None:
        key.protect_server(server)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    return server, f"tcp://127.0.0.1:{port}"


def make_client(
    context: zmq.Context[Any], address: str, protect: Callable[[zmq.Socket[Any]], None]
) -> zmq.Socket[bytes]:
    """Return a client that connects and sends `hello`."""
    client: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    client.setsockopt(zmq.RECONNECT_IVL, -1)
    protect(client)
    client.connect(address)
    with contextlib.suppress(zmq.Again):  # already refused
        client.send(b"hello", zmq.NOBLOCK)
    return client


def exchange_messages(server: zmq.Socket[bytes], client: zmq.Socket[bytes]) -> None:
    """Receive the client's `hello` and send a response to it."""
    assert server.poll(DEADLINE_MS), "nothing came from the client"
    identity, message = server.recv_multipart()
    assert message == b"hello"
    server.send_multipart([identity, b"welcome"])
    assert client.poll(DEADLINE_MS), "nothing came from the server"
    assert client.recv() == b"welcome"
