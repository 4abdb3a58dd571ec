"""The nixl transport: details of the library, and transfers with plain NIXL programs."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import zmq

from baton_kv_transfer import auth, side_channel
from baton_kv_transfer.agent.agent import INIT_AGENT
from baton_kv_transfer.agent.agent_factory import create_agent
from baton_kv_transfer.agent.nixl_agent import NixlAgent
from baton_kv_transfer.connector import (
    BlockSave,
    ConnectorMetadata,
    ConnectorOutput,
    KVConnectorWorker,
    LoadRequest,
)
from baton_kv_transfer.memory import checksum
from baton_kv_transfer.memory.layout import RankAddress
from baton_kv_transfer.memory.slot_memory import HostMemory
from baton_kv_transfer.side_channel import MemoryDescription, PublishedBlock
from baton_kv_transfer.transfer_connector import TransferConnector
from baton_protocol.options.config import KVRole, KVTransferConfig
from support.kv_transfer.kv_processes import HOST, LAYOUT, _Process, _serve, chain_hash
from support.waiting import eventually

NAME = "plain"
RECEIVE_TIMEOUT_MS = 15_000


class PlainMethods:
    def __init__(self) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self.words = np.zeros((LAYOUT.num_blocks, LAYOUT.block_nbytes // 8), dtype=np.uint64)
        self.agent = nixl_agent(f"{NAME}/0", nixl_agent_config(backends=["UCX"]))
        self.agent.register_memory([(self.words.ctypes.data, self.words.nbytes, 0, "")], "DRAM")
        self.router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self.router.setsockopt(zmq.RCVTIMEO, RECEIVE_TIMEOUT_MS)
        self.port = self.router.bind_to_random_port(f"tcp://{HOST}")

    def fill(self, block_id: int, value: int) -> None:
        self.words[block_id] = np.arange(self.words.shape[1], dtype=np.uint64) * np.uint64(value)

    def produce(self, transfer_id: str, block_ids: list[int]) -> bool:
        """Serve one consumer until it releases the transfer. Return whether it has all blocks."""
        consumer_id, consumer_nonce, nonce = "", b"", auth.new_nonce()
        theirs: MemoryDescription | None = None
        while True:
            identity, frame = self.router.recv_multipart()
            answer: side_channel.ToConsumer
            match side_channel.decode_to_producer(frame):
                case side_channel.Hello() as hello:
                    consumer_id, consumer_nonce = hello.instance_id, hello.nonce
                    proof = self._proof(auth.PRODUCER, consumer_nonce, nonce, consumer_id, NAME)
                    answer = side_channel.Welcome(
                        hello.version, hello.compatibility_hash, NAME, nonce, proof
                    )
                case side_channel.Describe() as describe:
                    assert describe.proof == self._proof(
                        auth.CONSUMER, consumer_nonce, nonce, consumer_id, NAME
                    )
                    theirs = describe.memory
                    ranks = [RankAddress(HOST, self.port, LAYOUT.heads)]
                    answer = side_channel.Description(LAYOUT, self._memory(), 15.0, ranks)
                case side_channel.Subscribe() as request:
                    blocks = [
                        PublishedBlock(
                            i,
                            block_id,
                            chain_hash(transfer_id, i),
                            self._checksum(request, i, block_id),
                        )
                        for i, block_id in enumerate(block_ids)
                    ]
                    push = request.push_slots is not None
                    if push:
                        self._move("WRITE", theirs, request.push_slots, block_ids)
                    answer = side_channel.Publish(
                        transfer_id, request.generation, blocks, last=True, written=push
                    )
                case side_channel.Release() as release:
                    if theirs is not None:
                        released = side_channel.Released(transfer_id, release.generation)
                        self.router.send_multipart([identity, side_channel.encode(released)])
                    return release.completed
                case _:
                    continue
            self.router.send_multipart([identity, side_channel.encode(answer)])

    def consume(
        self, port: int, producer_id: str, transfer_id: str, block_ids: list[int], push: bool
    ) -> None:
        """Load the blocks of a transfer into `block_ids`: by reads or, with `push`, by writes."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVTIMEO, RECEIVE_TIMEOUT_MS)
        socket.connect(f"tcp://{HOST}:{port}")
        nonce = auth.new_nonce()

        def ask(message: side_channel.ToProducer) -> Any:
            socket.send(side_channel.encode(message))
            return side_channel.decode_to_consumer(socket.recv())

        welcome = ask(side_channel.Hello(side_channel.VERSION, "same", NAME, producer_id, nonce))
        proofs = [
            self._proof(role, nonce, welcome.nonce, NAME, producer_id)
            for role in (auth.PRODUCER, auth.CONSUMER)
        ]
        assert welcome.proof == proofs[0]
        theirs = ask(
            side_channel.Describe(proofs[1], LAYOUT, self._memory() if push else None)
        ).memory
        request = side_channel.Subscribe(
            transfer_id, 77, LAYOUT.heads, 0, 1, 0, block_ids if push else None
        )
        publish = ask(request)
        assert publish.last
        assert publish.written is push
        if not push:
            self._move("READ", theirs, [block.slot for block in publish.blocks], block_ids)
        for block, block_id in zip(publish.blocks, block_ids, strict=True):
            assert block.checksum == self._checksum(request, block.index, block_id)
        socket.send(
            side_channel.encode(side_channel.Release(transfer_id, 77, 0, 1, completed=True))
        )
        socket.close(linger=1000)

    def holds(self, block_id: int, value: int) -> bool:
        return bool(
            (
                self.words[block_id]
                == np.arange(self.words.shape[1], dtype=np.uint64) * np.uint64(value)
            ).all()
        )

    def stop(self) -> None:
        self.router.close()

    def _memory(self) -> MemoryDescription:
        address, metadata = self.words.ctypes.data, self.agent.get_agent_metadata()
        return MemoryDescription(
            metadata, address, LAYOUT.num_blocks, LAYOUT.block_nbytes, "DRAM", 0
        )

    def _move(
        self,
        op: str,
        theirs: MemoryDescription | None,
        slots: list[int] | None,
        block_ids: list[int],
    ) -> None:
        assert slots is not None
        peer = self.agent.add_remote_agent(theirs.agent_metadata).decode()
        nbytes = LAYOUT.block_nbytes
        local = [(self.words.ctypes.data + block_id * nbytes, nbytes, 0) for block_id in block_ids]
        remote = [(theirs.base_address + slot * nbytes, nbytes, 0) for slot in slots]
        rows = list(range(len(local)))
        handle = self.agent.make_prepped_xfer(
            op,
            self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, "DRAM"),
            rows,
            self.agent.prep_xfer_dlist(peer, remote, "DRAM"),
            rows,
        )
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        assert state == "DONE"
        self.agent.release_xfer_handle(handle)
        # NIXL refuses a new agent of the same name while it has this one.
        self.agent.remove_remote_agent(peer)

    def _checksum(self, request: side_channel.Subscribe, index: int, block_id: int) -> int:
        address = self.words.ctypes.data + block_id * LAYOUT.block_nbytes
        (total,) = checksum.sum_runs(np.array([address]), LAYOUT.block_nbytes).tolist()
        tokens = chain_hash(request.transfer_id, index)
        return checksum.bind(
            total,
            transfer_id=request.transfer_id,
            generation=request.generation,
            chain_hash=tokens,
            heads=request.heads,
        )

    @staticmethod
    def _proof(
        role: str, consumer_nonce: bytes, producer_nonce: bytes, consumer_id: str, producer_id: str
    ) -> bytes:
        return auth.compute_proof(
            b"",
            role,
            consumer_nonce=consumer_nonce,
            producer_nonce=producer_nonce,
            consumer_id=consumer_id,
            producer_id=producer_id,
        )


def _run(pipe: Connection) -> None:
    methods = PlainMethods()
    _serve(pipe, methods, methods.port)


class PlainProgram(_Process):
    def __init__(self) -> None:
        super().__init__(_run)
        self.port: int = self.hello


@pytest.fixture(scope="module")
def plain() -> Iterator[PlainProgram]:
    program = PlainProgram()
    yield program
    program.stop()


class Connector:
    """Our connector in this process, with the transport nixl."""

    def __init__(self, role: KVRole, mode: str = "pull") -> None:
        self.words = np.zeros((LAYOUT.num_blocks, LAYOUT.block_nbytes // 8), dtype=np.uint64)
        self.worker: KVConnectorWorker = TransferConnector(
            KVTransferConfig(role=role, port=0, transport="nixl", mode=mode),
            instance_id="ours",
            compatibility_hash="same",
            host=HOST,
        )
        self.worker.register_kv_cache(HostMemory(self.words.ctypes.data, LAYOUT))

    def expect(self, what: str) -> ConnectorOutput:
        return eventually(self.worker.get_finished, what)


def content(value: int) -> np.ndarray:
    return np.arange(LAYOUT.block_nbytes // 8, dtype=np.uint64) * np.uint64(value)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_our_consumer_loads_blocks_from_a_plain_nixl_program(
    plain: PlainProgram, mode: str
) -> None:
    ours = Connector(KVRole.CONSUMER, mode)
    try:
        for i, block_id in enumerate([9, 4, 5]):
            plain.call("fill", block_id, i + 1)
        hashes = [chain_hash("t", i) for i in range(3)]
        load = LoadRequest("t", HOST, plain.port, "plain", 0, [30, 11, 12], hashes)
        ours.worker.start(ConnectorMetadata(loads=[load]))
        assert plain.call("produce", "t", [9, 4, 5])
        result = ours.expect("result of the load").load_results["t"]
        assert (result.num_valid_blocks, result.error) == (3, "")
        for i, block_id in enumerate([30, 11, 12]):
            np.testing.assert_array_equal(ours.words[block_id], content(i + 1))
        # 4, 5 -> 11, 12 are adjacent on both sides
        assert ours.worker.stats().descriptors_posted == (2 if mode == "pull" else 0)
    finally:
        ours.worker.shutdown()


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_plain_nixl_program_loads_blocks_from_our_producer(
    plain: PlainProgram, mode: str
) -> None:
    ours = Connector(KVRole.PRODUCER)
    try:
        for i, block_id in enumerate([3, 7]):
            ours.words[block_id] = content(i + 5)
        ours.worker.start(ConnectorMetadata(offers={"u": "plain"}))
        save = BlockSave(
            "u", 0, [3, 7], [chain_hash("u", i) for i in range(2)], 2 * LAYOUT.block_size, last=True
        )
        ours.worker.save(ConnectorMetadata(saves=[save]))
        plain.call("consume", ours.worker.port, "ours", "u", [20, 1], mode == "push")
        assert plain.call("holds", 20, 5)
        assert plain.call("holds", 1, 6)
        assert ours.expect("the release").finished_sending == {"u"}
    finally:
        ours.worker.shutdown()


def test_the_count_of_descriptors_equals_that_of_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = create_agent("me", "nixl")
    try:
        assert isinstance(agent, NixlAgent)
        words = np.zeros(4096, dtype=np.int64)
        agent.register_memory([(words.ctypes.data, words.nbytes, 0, "")])
        rows = [(words.ctypes.data + i * 512, 512, 0) for i in range(64)]
        local, remote = agent.prep_xfer_dlist(INIT_AGENT, rows), agent.prep_xfer_dlist("me", rows)
        random = np.random.default_rng(3)
        # The library reports transfers only with telemetry, which is off by default.
        config = agent._api.nixl_agent_config
        monkeypatch.setattr(
            agent._api,
            "nixl_agent_config",
            lambda **options: config(**options, capture_telemetry=True),
        )
        agent.fence()
        for _ in range(10):
            ours = np.repeat(random.permutation(30)[:8], 2) + np.tile([0, 1], 8)
            theirs = np.repeat(random.permutation(30)[:8], 2) + np.tile([32, 33], 8)
            theirs[-1] += random.integers(2)
            handle = agent.make_prepped_xfer("READ", local, ours, remote, theirs)
            agent.transfer(handle)
            eventually(
                lambda handle=handle: agent.check_xfer_state(handle) == "DONE", "the transfer"
            )
            assert handle.num_descs == agent._nixl.get_xfer_telemetry(handle.native.value).descCount
    finally:
        agent.close()


def test_other_peers_stay_when_one_cannot_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = [create_agent(name, "nixl") for name in ("me", "stuck", "well")]
    me, stuck, well = agents
    try:
        memory = [np.arange(8192, dtype=np.int64) * (i + 1) for i in range(3)]
        for agent, words in zip(agents, memory, strict=True):
            agent.register_memory([(words.ctypes.data, words.nbytes, 0, "")])
        rows = [[(words.ctypes.data, words.nbytes, 0)] for words in memory]
        for peer in (stuck, well):
            me.add_remote_agent(peer.get_agent_metadata())
        local = me.prep_xfer_dlist(INIT_AGENT, rows[0])
        lists = {name: me.prep_xfer_dlist(name, rows[i]) for i, name in ((1, "stuck"), (2, "well"))}
        good = me.make_prepped_xfer("READ", local, [0], lists["well"], [0])
        bad = me.make_prepped_xfer("READ", local, [0], lists["stuck"], [0])
        assert isinstance(stuck, NixlAgent)
        monkeypatch.setattr("baton_kv_transfer.agent.nixl_agent.REMOVE_GRACE_S", 0.1)
        with stuck._lock:  # it does not respond
            assert me.transfer(bad) == "PROC"
            me.remove_remote_agent("stuck")
            eventually(lambda: me.check_xfer_state(bad) != "PROC", "the end")
            assert me.check_xfer_state(bad) == "ERR"
            assert bad.error == "agent stuck was removed"
            np.testing.assert_array_equal(memory[0], np.arange(8192))
            me.transfer(good)
            eventually(lambda: me.check_xfer_state(good) == "DONE", "the end")
            np.testing.assert_array_equal(memory[0], memory[2])
    finally:
        for agent in agents:
            agent.close()
