"""The ZAP handler: one per context, for all its sockets, until the context ends."""

from __future__ import annotations

import multiprocessing
import threading
from typing import Any

import pytest
import zmq
import zmq.asyncio

from baton_protocol import zap
from baton_protocol.service_key import watch_handshakes
from support.protected_sockets import (
    DEADLINE_MS,
    OURS,
    UntrustedClients,
    exchange_messages,
    make_client,
    make_server,
)
from support.waiting import eventually


def test_every_context_has_one_zap_handler_for_its_sockets(context) -> None:
    others = [zmq.Context(), zmq.Context()]
    before = set(threading.enumerate())  # threads of earlier tests may still be running
    servers = [make_server(each, OURS) for each in (context, context, *others)]
    assert len(set(threading.enumerate()) - before) == 3
    for server, address in servers:
        exchange_messages(server, make_client(context, address, OURS.protect_client))
    for other in others:
        other.destroy()
    exchange_messages(servers[0][0], make_client(context, servers[0][1], OURS.protect_client))


def test_contexts_can_be_created_and_ended_many_times() -> None:
    before = set(threading.enumerate())
    for _ in range(50):
        context = zmq.Context()
        context.linger = 0
        server, address = make_server(context, OURS)
        exchange_messages(server, make_client(context, address, OURS.protect_client))
        context.destroy()
        assert context.closed
    eventually(
        lambda: set(threading.enumerate()) <= before,
        timeout_s=DEADLINE_MS / 1000,
        what="the end of all threads",
    )
    assert not [
        address for address in zap._handlers if address != zmq.Context.instance().underlying
    ]


def test_every_client_is_refused_when_the_zap_handler_has_ended(context, monkeypatch) -> None:
    """Without a handler ZeroMQ accepts every client that has the server's public key."""

    class Gone:
        def __init__(self, context: zmq.Context[Any]) -> None: ...

        def admit(self, domain: bytes, client_key: bytes) -> None: ...

    monkeypatch.setattr(zap, "_Handler", Gone)
    monkeypatch.setattr(zap, "_handlers", {})
    server, address = make_server(context, OURS)
    handshakes = watch_handshakes(server)
    make_client(context, address, UntrustedClients.with_the_servers_public_key)
    assert handshakes.poll(DEADLINE_MS), "the untrusted client was not refused"
    assert not server.poll(0)
    handshakes.close()


def child(queue: Any) -> None:
    context = zmq.Context.instance()
    server, address = make_server(context, OURS)
    exchange_messages(server, make_client(context, address, OURS.protect_client))
    queue.put("talked")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_process_protects_its_own_sockets(method) -> None:
    """The process forks while another thread holds the lock that protects a socket."""
    server, address = make_server(zmq.Context.instance(), OURS)
    processes = multiprocessing.get_context(method)
    queue = processes.Queue()
    process = processes.Process(target=child, args=(queue,))
    with zap._lock:
        process.start()
    try:
        assert queue.get(timeout=60) == "talked"
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()
    exchange_messages(server, make_client(zmq.Context.instance(), address, OURS.protect_client))
    server.close()
