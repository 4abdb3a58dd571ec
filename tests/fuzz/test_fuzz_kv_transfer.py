"""Random input for the KV side channel and for the servers of the KV transports tcp and shm."""

from __future__ import annotations

import itertools
import random
import re
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from baton_kv_transfer import auth, side_channel
from baton_kv_transfer.agent.transport_agent import AgentMetadata, TransportAgent, seal
from baton_kv_transfer.connector import ConnectorMetadata, LoadRequest
from baton_kv_transfer.memory.slot_memory import HostMemory
from baton_kv_transfer.side_channel import (
    Describe,
    Description,
    Heartbeat,
    Hello,
    MemoryDescription,
    Release,
    Subscribe,
    Welcome,
)
from baton_kv_transfer.transfer_connector import TransferConnector
from baton_kv_transfer.transports.iovec import pack_run
from baton_kv_transfer.transports.shm import shm_server
from baton_kv_transfer.transports.shm.cross_memory import ProcessNonce
from baton_kv_transfer.transports.shm.shm_server import encode_write
from baton_kv_transfer.transports.sockets.framed_socket import DATA, MAX_PAYLOAD_BYTES
from baton_kv_transfer.transports.sockets.peer_link import (
    ANSWER,
    HELLO,
    NOTIF,
    READ,
    WRITE,
    encode_request,
)
from baton_kv_transfer.transports.tcp import tcp_server
from baton_protocol.options.config import KV_PORT, KVRole, KVTransferConfig
from baton_protocol.service_key import ServiceKey
from support.fuzz.fuzz_target import TIMEOUT_S, FuzzTarget
from support.fuzz.kv_server import (
    CHAIN_HASHES,
    COMPATIBILITY_HASH,
    FUZZER,
    HONEST,
    LAYOUT,
    NUM_BLOCKS,
    SERVER,
)
from support.fuzz.mutations import mutate_bytes, mutate_value
from support.fuzz.raw_client import connect_tcp, connect_unix, send_raw, zmtp
from support.fuzz.zmq_client import ZMQFuzzer, encode_msgpack, mutate_frames, mutate_message
from support.pods import Pod, Pods, pods
from support.waiting import eventually

HEADER = struct.Struct("<IIQ")
KINDS = (DATA, HELLO, READ, WRITE, NOTIF, ANSWER, 99, 2**32 - 1)
#: Lengths of runs that are longer than any memory, empty or negative.
ODD_LENGTHS = (0, -1, -(2**62), 2**23 - 2**44, 2**44, 2**62, 2**63 - 1)
#: WRITEs of up to this size are followed by their data.
SMALL_BYTES = 2**16


class TransportCases:
    """Makes the bytes of connections to one server.

    Args:
        hello: payload of a valid HELLO.
        address: address of the server's registered memory.
        num_bytes: size of this memory.
        source: address of as many bytes of this process, from which the transport shm copies. None:
            the transport tcp.
    """

    def __init__(
        self, hello: bytes, address: int, num_bytes: int, source: int | None = None
    ) -> None:
        self._hello = hello
        self._address = address
        self._num_bytes = num_bytes
        self._source = source

    def make(self, rng: random.Random) -> bytes:
        if rng.random() < 0.03:
            return rng.randbytes(rng.choice((1, 15, 16, 17, 5000)))
        hello = self._hello if rng.random() < 0.85 else mutate_bytes(self._hello, rng)
        data = _frame(HELLO, 0, hello, rng)
        for number in range(rng.choice((0, 1, 1, 2, 6, 30))):
            data += self._message(number if rng.random() < 0.9 else rng.getrandbits(64), rng)
        kind = rng.random()
        if kind < 0.2:
            return mutate_bytes(data, rng)
        return data[: rng.randrange(len(data))] if kind < 0.35 else data

    def _message(self, number: int, rng: random.Random) -> bytes:
        kind = rng.random()
        if kind < 0.15:
            notif = rng.randbytes(rng.choice((0, 1, 50, 5000)))
            return _frame(NOTIF, number, notif, rng)
        if kind < 0.25:
            payload = rng.randbytes(rng.choice((0, 1, 50, 5000)))
            return _frame(rng.choice(KINDS), number, payload, rng)
        runs = self._runs(self._address, rng)
        if kind < 0.5 and self._source is None:
            return _frame(READ, number, self._request(runs, rng), rng)
        return self._write(number, runs, rng)

    def _write(self, number: int, runs: list[tuple[int, int]], rng: random.Random) -> bytes:
        data = _frame(WRITE, number, self._request(runs, rng), rng)
        num_bytes = sum(length for _, length in runs)
        if self._source is None and 0 < num_bytes <= SMALL_BYTES and rng.random() < 0.8:
            data += _frame(DATA, number, rng.randbytes(num_bytes), rng)
        return data

    def _request(self, runs: list[tuple[int, int]], rng: random.Random) -> bytes:
        notif = rng.randbytes(rng.choice((0, 0, 20)))
        target = b"".join(pack_run(*run) for run in runs)
        if self._source is None:
            request = encode_request(notif, target)
        else:
            shift = self._source - self._address if rng.random() < 0.9 else 0
            source = b"".join(pack_run(_clip(address + shift), length) for address, length in runs)
            request = encode_write(notif, source, target)
        return mutate_bytes(request, rng) if rng.random() < 0.15 else request

    def _runs(self, address: int, rng: random.Random) -> list[tuple[int, int]]:
        """Return (address, length) of each run. Three of five requests have valid runs only."""
        is_valid = rng.random() < 0.6
        runs = []
        for _ in range(rng.choice((1, 1, 2, 17, 300))):
            offset = rng.randrange(self._num_bytes)
            length = rng.randrange(1, min(512, self._num_bytes - offset) + 1)
            kind = 0.0 if is_valid else rng.random()
            if kind > 0.9:
                offset = rng.choice((-1, self._num_bytes, -address, 2**62))
            elif kind > 0.8:
                length = rng.choice(ODD_LENGTHS)
            runs.append((_clip(address + offset), length))
        return runs


def _frame(kind: int, number: int, payload: bytes, rng: random.Random) -> bytes:
    """Return a frame. One in thirty announces another length."""
    length = len(payload)
    if rng.random() < 0.03:
        odd = (0, length + 1, max(0, length - 1), 2**20, MAX_PAYLOAD_BYTES, 2**32 - 1)
        length = rng.choice(odd)
    return HEADER.pack(length, kind, number) + payload


def _clip(address: int) -> int:
    return max(-(2**63), min(address, 2**63 - 1))


#: Time in which an honest load must succeed, on a busy machine.
LOAD_TIMEOUT_S = 120.0
DIGEST_BYTES = 8
_AGENT_NUMBERS = itertools.count()


class Memory:
    """KV memory of this process, registered with an agent."""

    def __init__(self, transport: str) -> None:
        self.words = np.zeros(LAYOUT.num_blocks * LAYOUT.block_nbytes // 8, dtype=np.uint64)
        self.agent = TransportAgent(f"{FUZZER}/{next(_AGENT_NUMBERS)}", transport)
        self.agent.register_memory([(self.words.ctypes.data, self.words.nbytes, 0, "kv")])

    def describe(self) -> MemoryDescription:
        return MemoryDescription(
            self.agent.get_agent_metadata(),
            self.words.ctypes.data,
            LAYOUT.num_blocks,
            LAYOUT.block_nbytes,
            "DRAM",
            0,
        )


def new_hello() -> Hello:
    return Hello(side_channel.VERSION, COMPATIBILITY_HASH, FUZZER, SERVER, auth.new_nonce())


def answer_welcome(
    hello: Hello, welcome: Welcome, key: ServiceKey | None, memory: MemoryDescription | None
) -> Describe:
    """Return the answer to WELCOME."""
    proof = auth.compute_proof(
        auth.derive_token(key),
        auth.CONSUMER,
        consumer_nonce=hello.nonce,
        producer_nonce=welcome.nonce,
        consumer_id=hello.instance_id,
        producer_id=welcome.instance_id,
    )
    return Describe(proof, LAYOUT, memory)


def handshake(
    peer: zmq.Socket[bytes], key: ServiceKey | None, memory: MemoryDescription | None = None
) -> Description:
    """Open a session on a new connection."""
    hello = new_hello()
    peer.send(side_channel.encode(hello))
    welcome = side_channel.decode_to_consumer(peer.recv())
    assert isinstance(welcome, Welcome), welcome
    peer.send(side_channel.encode(answer_welcome(hello, welcome, key, memory)))
    description = side_channel.decode_to_consumer(peer.recv())
    assert isinstance(description, Description), description
    return description


def addresses_in(description: Description) -> dict[str, bytes]:
    """Return the addresses of the producer's transports, by transport."""
    packed = description.memory.agent_metadata[DIGEST_BYTES:]
    metadata = msgspec.msgpack.decode(packed, type=AgentMetadata)
    return msgspec.msgpack.decode(metadata.address, type=dict[str, bytes])


def load(host: str, transport: str, key: ServiceKey | None = None) -> None:
    """Load the blocks of the transfer "h" as an honest consumer.

    Raises:
        AssertionError: a block did not arrive intact.
    """
    connector = TransferConnector(
        KVTransferConfig(role=KVRole.CONSUMER, transport=transport),
        instance_id=HONEST,
        compatibility_hash=COMPATIBILITY_HASH,
        host="127.0.0.1",
        service_key=key,
    )
    try:
        words = np.zeros(LAYOUT.num_blocks * LAYOUT.block_nbytes // 8, dtype=np.uint64)
        connector.register_kv_cache(HostMemory(words.ctypes.data, LAYOUT))

        def is_loaded() -> bool:
            block_ids = list(range(NUM_BLOCKS))
            request = LoadRequest("h", host, KV_PORT, SERVER, 0, block_ids, CHAIN_HASHES)
            connector.start(ConnectorMetadata(loads=[request]))
            results = eventually(
                lambda: connector.get_finished().load_results,
                "the result of a load",
                LOAD_TIMEOUT_S,
            )
            assert results["h"].num_valid_blocks == NUM_BLOCKS, results
            return True

        # The transfer is offered again soon after its end.
        eventually(is_loaded, "an intact load", LOAD_TIMEOUT_S)
    finally:
        connector.shutdown()


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
