"""Random input for the KV side channel and for the servers of the KV transports tcp and shm."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from baton_kv_transfer import side_channel
from baton_kv_transfer.agent.transport_agent import seal
from baton_kv_transfer.side_channel import Describe, Description, Heartbeat, Release, Subscribe
from baton_kv_transfer.transports.shm import shm_server
from baton_kv_transfer.transports.shm.cross_memory import ProcessNonce
from baton_kv_transfer.transports.tcp import tcp_server
from baton_protocol.options.config import KV_PORT
from baton_protocol.service_key import ServiceKey
from support.fuzz.fuzz_target import TIMEOUT_S, FuzzTarget
from support.fuzz.kv_client import (
    DIGEST_BYTES,
    Memory,
    addresses_in,
    answer_welcome,
    handshake,
    load,
    new_hello,
)
from support.fuzz.kv_server import LAYOUT, NUM_BLOCKS
from support.fuzz.mutations import mutate_value
from support.fuzz.raw_client import connect_tcp, connect_unix, send_raw, zmtp
from support.fuzz.transport_cases import TransportCases
from support.fuzz.zmq_client import ZMQFuzzer, encode_msgpack, mutate_frames, mutate_message
from support.pods import Pod, Pods, pods
from support.waiting import eventually

pytestmark = pytest.mark.timeout(TIMEOUT_S)
NUM_BYTES = LAYOUT.num_blocks * LAYOUT.block_nbytes
Start = Callable[[str, str], Pod]


class SideChannelFuzzer(ZMQFuzzer):
    """Sends messages like those of a consumer's worker, with random changes.

    A malformed message ends its session, so a connection sends few cases.
    """

    cases_per_connection = 8

    def __init__(self, target: FuzzTarget, key: ServiceKey | None, transport: str) -> None:
        super().__init__(target, f"tcp://{target.pod.address}:{KV_PORT}", key)
        self._memory = Memory(transport)

    def make(self, rng: random.Random) -> list[bytes]:
        frames = [mutate_message(self._message(rng), rng)]
        return mutate_frames(frames, rng) if rng.random() < 0.1 else frames

    def _message(self, rng: random.Random) -> Any:
        name, generation = f"t{rng.randrange(6)}", rng.randrange(1, 5)
        choice = rng.random()
        if choice < 0.4:
            slots = rng.choice((None, list(range(NUM_BLOCKS)), [0]))
            return Subscribe(name, generation, LAYOUT.heads, 0, 1, rng.choice((0, 2)), slots)
        if choice < 0.65:
            return Release(name, generation, 0, 1, rng.random() < 0.5)
        if choice < 0.8:
            return Heartbeat([name, "t1", "x"])
        if choice < 0.9:
            return new_hello()
        return Describe(rng.randbytes(32), LAYOUT, self._memory.describe())

    def begin_connection(self, peer: zmq.Socket[bytes], rng: random.Random) -> None:
        kind = rng.random()
        if kind < 0.1:
            return
        if kind < 0.6:
            memory = self._memory.describe() if rng.random() < 0.6 else None
            handshake(peer, self._key, memory)
            return
        hello = new_hello()
        peer.send(side_channel.encode(hello))
        welcome = side_channel.decode_to_consumer(peer.recv())
        assert isinstance(welcome, side_channel.Welcome), welcome
        answer = answer_welcome(hello, welcome, self._key, self._memory.describe())
        peer.send(self._damage(answer, rng))

    def _damage(self, message: Describe, rng: random.Random) -> bytes:
        """Return a DESCRIBE with a valid proof and other random content.

        The bytes of addresses are not changed, because the server connects to valid ones.
        """
        assert message.memory is not None
        if rng.random() < 0.5:
            packed = message.memory.agent_metadata[DIGEST_BYTES:]
            metadata = msgspec.msgpack.decode(packed)
            if rng.random() < 0.5:
                addresses = msgspec.msgpack.decode(metadata[3])
                fields = {kind: msgspec.msgpack.decode(each) for kind, each in addresses.items()}
                changed = mutate_value(fields, rng)
                metadata[3] = encode_msgpack(
                    {kind: encode_msgpack(each) for kind, each in changed.items()}
                )
            else:
                metadata = mutate_value(metadata, rng)
            message.memory.agent_metadata = seal(encode_msgpack(metadata))
            return side_channel.encode(message)
        value = msgspec.to_builtins(message, builtin_types=(bytes,))
        value[2:] = mutate_value(value[2:], rng)
        return encode_msgpack(value)

    def check(self, peer: zmq.Socket[bytes]) -> None:
        handshake(peer, self._key)
        self._memory.agent.get_new_notifs()

    def close(self) -> None:
        self._memory.agent.close()


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    with pods(tmp_path_factory.mktemp("kv"), 22) as group:
        yield group


@pytest.fixture(scope="module")
def start(group: Pods) -> Start:
    servers: dict[tuple[str, str], Pod] = {}

    def start(transport: str, key_file: str = "") -> Pod:
        """Return a server with this transport and key. Servers are shared by the tests."""
        if (transport, key_file) not in servers:
            arguments = [transport, *([key_file] if key_file else [])]
            name = f"{transport}-{'keyed' if key_file else 'open'}"
            server = group.script(name, "support.fuzz.kv_server", *arguments)
            servers[transport, key_file] = server
            server.wait_open(KV_PORT)
        return servers[transport, key_file]

    return start


def refused(server: Pod) -> tuple[int, int]:
    """Return the numbers of refused handshakes and descriptors."""
    log = server.log.read_text(errors="replace")
    found = re.findall(r"refused (\d+) handshakes and (\d+) descriptors", log)
    return (int(found[-1][0]), int(found[-1][1])) if found else (0, 0)


@pytest.mark.parametrize("is_keyed", [False, True], ids=["no key", "key"])
def test_side_channel(start: Start, key_file: str, is_keyed: bool) -> None:
    """Clients that may connect: all if the server has no key, else those with the key."""
    server = start("tcp", key_file if is_keyed else "")
    key = ServiceKey.load(key_file) if is_keyed else None
    target = FuzzTarget(server, f"KV side channel, {'keyed' if is_keyed else 'open'}")
    fuzzer = SideChannelFuzzer(target, key, "tcp")
    before = refused(server)[0]
    try:
        with target.checking(lambda: load(server.address, "tcp", key)):
            fuzzer.run()
    finally:
        fuzzer.close()
    assert fuzzer.num_answers
    eventually(lambda: refused(server)[0] > before, "refused messages in the log")


def test_side_channel_strangers(start: Start, key_file: str) -> None:
    """Clients without the key, which fail in ZeroMQ's handshake, are refused and counted."""
    server = start("tcp", key_file)
    key = ServiceKey.load(key_file)
    before = refused(server)[0]
    target = FuzzTarget(server, "KV side channel, strangers")
    with target.checking(lambda: load(server.address, "tcp", key)):
        send_raw(target, partial(connect_tcp, server.address, KV_PORT), zmtp)
    eventually(lambda: refused(server)[0] > before, "refused handshakes in the log")


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_transport(start: Start, transport: str) -> None:
    """Clients with and without the secret of the server's metadata."""
    server = start(transport, "")
    description = describe(server)
    packed = addresses_in(description)[transport]
    source, nonce = np.zeros(NUM_BYTES, dtype=np.uint8), ProcessNonce()
    base = description.memory.base_address
    if transport == "tcp":
        address = msgspec.msgpack.decode(packed, type=tcp_server.Address)
        hello = msgspec.msgpack.encode(tcp_server.TCPHello(address.secret, "peer"))
        cases = TransportCases(hello, base, NUM_BYTES)
        connect = partial(connect_tcp, address.host, address.port)
    else:
        here = msgspec.msgpack.decode(packed, type=shm_server.HostAddress)
        shm_hello = shm_server.SHMHello(here.nonce, "peer", nonce.address, nonce.value)
        cases = TransportCases(
            msgspec.msgpack.encode(shm_hello), base, NUM_BYTES, source.ctypes.data
        )
        connect = partial(connect_unix, here.socket_name)
    before = refused(server)[1]
    target = FuzzTarget(server, f"KV transport {transport}")
    with target.checking(lambda: load(server.address, transport)):
        num_answered = send_raw(target, connect, cases.make)
    assert num_answered
    nonce.clear()
    eventually(lambda: refused(server)[1] > before, "refused descriptors in the log")
    assert "it does not have this agent's metadata" in server.log.read_text(errors="replace")


def describe(server: Pod) -> Description:
    """Return the server's DESCRIPTION."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.connect(f"tcp://{server.address}:{KV_PORT}")
        return handshake(peer, None)
