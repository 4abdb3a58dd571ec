"""The service key on ZeroMQ sockets: only clients with the key are accepted."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from baton_protocol.service_key import (
    HANDSHAKE_FAILED,
    SIGNATURE_LIFETIME_S,
    AdminRequest,
    ServiceKey,
    ServiceKeyError,
    count_refused,
    watch_handshakes,
    why_handshake_failed,
)
from support.protected_sockets import (
    DEADLINE_MS,
    OURS,
    THEIRS,
    UntrustedClients,
    exchange_messages,
    make_client,
    make_server,
)

WAYS = [name for name in vars(UntrustedClients) if name.startswith("with")]


def test_a_client_with_the_key_exchanges_messages(context) -> None:
    server, address = make_server(context, OURS)
    exchange_messages(
        server, make_client(context, address, ServiceKey(b"the key of one service").protect_client)
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_client_without_the_key_is_refused_and_both_sides_report_it(context, way) -> None:
    server: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    OURS.protect_server(server)
    handshakes = watch_handshakes(server)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    client: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    client.setsockopt(zmq.RECONNECT_IVL, -1)
    getattr(UntrustedClients, way)(client)
    monitor = client.get_monitor_socket(HANDSHAKE_FAILED)
    client.connect(f"tcp://127.0.0.1:{port}")
    assert handshakes.poll(DEADLINE_MS), "the server reported no failed handshake"
    assert monitor.poll(DEADLINE_MS), "the client reported no failed handshake"
    assert count_refused(handshakes) == 1
    assert count_refused(handshakes) == 0
    ours = None if way == "without_key" else THEIRS
    why = why_handshake_failed(recv_monitor_message(monitor), ours)
    assert "service key" in why or "service_key_file" in why, why
    assert not server.poll(0)


@pytest.mark.parametrize("way", WAYS)
def test_untrusted_clients_do_not_affect_clients_with_the_key(context, way) -> None:
    server, address = make_server(context, OURS)
    for _ in range(20):
        make_client(context, address, getattr(UntrustedClients, way))
    trusted = [make_client(context, address, OURS.protect_client) for _ in range(3)]
    for _ in trusted:
        assert server.poll(DEADLINE_MS), "no message of a client with the key arrived"
        identity, message = server.recv_multipart()
        server.send_multipart([identity, message])
    for client in trusted:
        assert client.poll(DEADLINE_MS), "a client with the key got no response"
    assert not server.poll(0), "a message of an untrusted client arrived"


def test_a_client_with_a_key_refuses_a_server_without_one(context) -> None:
    server, address = make_server(context, None)
    handshakes = watch_handshakes(server)
    client: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    client.setsockopt(zmq.RECONNECT_IVL, -1)
    OURS.protect_client(client)
    monitor = client.get_monitor_socket(HANDSHAKE_FAILED)
    client.connect(address)
    assert monitor.poll(DEADLINE_MS)
    assert "has none" in why_handshake_failed(recv_monitor_message(monitor), OURS)
    assert not server.poll(0)
    handshakes.close()


def test_servers_with_different_keys_in_one_context_accept_their_own_clients(context) -> None:
    """Each client has the other server's public key, so only the ZAP domain separates them."""
    servers = {key: make_server(context, key) for key in (OURS, THEIRS)}
    for key, other in ((OURS, THEIRS), (THEIRS, OURS)):

        def protect(
            client: zmq.Socket[Any], key: ServiceKey = key, other: ServiceKey = other
        ) -> None:
            key.protect_client(client)
            client.curve_serverkey = other._curve_keys("server")[0]

        server, address = servers[other]
        handshakes = watch_handshakes(server)
        untrusted = make_client(context, address, protect)
        assert handshakes.poll(DEADLINE_MS), "the client with the other key was not refused"
        assert not server.poll(0)
        untrusted.close()
        handshakes.close()
        exchange_messages(
            servers[key][0], make_client(context, servers[key][1], key.protect_client)
        )


async def test_an_asyncio_server_is_protected() -> None:
    context = zmq.asyncio.Context()
    context.linger = 0
    server = context.socket(zmq.ROUTER)
    OURS.protect_server(server)
    address = f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}"
    untrusted, trusted = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    UntrustedClients.with_the_servers_public_key(untrusted)
    OURS.protect_client(trusted)
    for client, text in ((untrusted, b"untrusted"), (trusted, b"trusted")):
        client.connect(address)
        await client.send(text)
    async with asyncio.timeout(DEADLINE_MS / 1000):
        assert (await server.recv_multipart())[1] == b"trusted"
    assert not await server.poll(0)
    for socket in (server, untrusted, trusted):
        socket.close()  # in their event loop: not thread-safe
    await asyncio.to_thread(context.term)


def test_a_process_with_protected_sockets_ends_when_its_main_thread_does(tmp_path) -> None:
    script = """
        import zmq, sys
        from baton_protocol.service_key import ServiceKey
        server = zmq.Context.instance().socket(zmq.ROUTER)
        ServiceKey(b"0123456789abcdef").protect_server(server)
        server.bind_to_random_port("tcp://127.0.0.1")
        print("bound", flush=True)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "bound\n", "")


# The key and what is derived from it


def test_secrets_differ_by_key_and_purpose_and_are_deterministic() -> None:
    secrets = {
        (name, purpose): key.secret(purpose)
        for name, key in (("a", OURS), ("b", THEIRS))
        for purpose in "xy"
    }
    assert len(set(secrets.values())) == 4
    assert all(len(secret) == 32 for secret in secrets.values())
    assert ServiceKey(b"0" * 32).secret("kv").hex().startswith("34e2dd6d140834728ba75520")


def test_a_key_file_is_read_below_the_pod_root_and_stripped(tmp_path, monkeypatch) -> None:
    mounted = tmp_path / "etc/baton/service-key/key"
    mounted.parent.mkdir(parents=True)
    mounted.write_text("  the key of one service\n")
    monkeypatch.setenv("POCKETKUBE_POD_ROOT", str(tmp_path))
    key = ServiceKey.load("/etc/baton/service-key/key")
    assert key.secret("kv") == OURS.secret("kv")
    assert ServiceKey.load("") is None


@pytest.mark.parametrize(
    "content", [None, b"", b" \n", b"fifteen bytes..", b"     12 bytes        "]
)
def test_a_file_without_a_key_is_refused_with_its_path(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ServiceKeyError, match=f"service_key_file {path}"):
        ServiceKey.load(str(path))


@pytest.mark.parametrize("file", ["/", "/nowhere/key", "a\0b"])
def test_a_path_that_is_no_file_is_refused(file) -> None:
    with pytest.raises(ServiceKeyError, match="cannot be read"):
        ServiceKey.load(file)


def test_only_the_bearer_is_admitted() -> None:
    good = OURS.bearer
    assert OURS.admits(good)
    refused = [
        None,
        "",
        "Bearer",
        "Bearer ",
        good[:-1],
        good + "0",
        good[7:],
        THEIRS.bearer,
        "Bearer \ud800",
        "ü",
    ]
    assert not any(OURS.admits(each) for each in refused)


def test_a_signature_is_valid_for_one_request_to_one_receiver_for_minutes() -> None:
    request = AdminRequest("POST", "/sleep?level=1", "10.0.0.1", b"body")
    now = time.time()
    signed = OURS.sign(request)
    assert OURS.admits(signed, request)
    assert OURS.admits(OURS.sign(request, now=now - SIGNATURE_LIFETIME_S / 2), request)
    for other in (
        request._replace(method="PUT"),
        request._replace(target="/sleep?level=2"),
        request._replace(pod_ip="10.0.0.2"),
        request._replace(pod_ip=""),
        request._replace(body=b""),
    ):
        assert not OURS.admits(signed, other), other
    assert not OURS.admits(signed), "a signature is no bearer token"
    scheme, _, rest = signed.partition(" ")
    at, _, digest = rest.partition(":")
    for forged in (
        THEIRS.sign(request),
        OURS.sign(request, now=now - 2 * SIGNATURE_LIFETIME_S),
        OURS.sign(request, now=now + 2 * SIGNATURE_LIFETIME_S),
        f"{scheme} {int(at) + 1}:{digest}",
        f"{scheme} {at}:{digest[:-1]}",
        f"{scheme} :{digest}",
        f"{scheme} {'9' * 5000}:{digest}",
        f"{scheme} ²:{digest}",
        f"{scheme} \ud800",
        scheme,
    ):
        assert not OURS.admits(forged, request), forged[:80]


def test_the_key_is_not_in_the_repr() -> None:
    assert "key of" not in f"{OURS} {OURS!r} {[OURS]}"
    assert OURS.secret("http").hex() not in repr(OURS)
