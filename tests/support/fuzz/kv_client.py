"""Clients of `kv_server`: an honest consumer, and the handshake of the side channel."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import zmq

from baton_kv_transfer import auth, side_channel
from baton_kv_transfer.agent.transport_agent import AgentMetadata, TransportAgent
from baton_kv_transfer.connector import ConnectorMetadata, LoadRequest
from baton_kv_transfer.memory.slot_memory import HostMemory
from baton_kv_transfer.side_channel import Describe, Description, Hello, MemoryDescription, Welcome
from baton_kv_transfer.transfer_connector import TransferConnector
from baton_protocol.options.config import KV_PORT, KVRole, KVTransferConfig
from baton_protocol.service_key import ServiceKey
from support.fuzz.kv_server import (
    CHAIN_HASHES,
    COMPATIBILITY_HASH,
    FUZZER,
    HONEST,
    LAYOUT,
    NUM_BLOCKS,
    SERVER,
)
from support.waiting import eventually

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
