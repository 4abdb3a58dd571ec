"""Faults of peers, clients and the connector itself fail one load and no others."""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from baton_kv_transfer import auth, side_channel
from baton_kv_transfer.agent.create import create_agent
from baton_kv_transfer.connector import BlockSave, ConnectorMetadata, LoadRequest, LoadResult
from baton_kv_transfer.consumer import load_manager
from baton_kv_transfer.memory.kv_memory import HostKVMemory
from baton_kv_transfer.memory.layout import KVCacheLayout, RankAddress
from baton_kv_transfer.transfer_connector import TransferConnector
from baton_protocol.config import KVRole, KVTransferConfig
from support.kv_transfer.kv_processes import HOST, LAYOUT, chain_hash
from support.waiting import eventually


class Side:
    """A connector over inproc, in this process."""

    def __init__(self, instance_id: str, role: KVRole, **options: float) -> None:
        config = KVTransferConfig(role=role, transport="inproc", port=0, **options)
        self.instance_id = instance_id
        self.memory = np.zeros((LAYOUT.num_blocks, LAYOUT.block_nbytes), dtype=np.uint8)
        self.connector = TransferConnector(
            config, instance_id=instance_id, compatibility_hash="c", host=HOST
        )
        self.connector.register_kv_cache(HostKVMemory(self.memory.ctypes.data, LAYOUT))
        self.results: dict[str, LoadResult] = {}

    def offer(self, transfer_id: str, consumer: str = "D") -> None:
        self.connector.start(ConnectorMetadata(offers={transfer_id: consumer}))

    def save(self, transfer_id: str) -> None:
        blocks = BlockSave(
            transfer_id, 0, [3], [chain_hash(transfer_id, 0)], LAYOUT.block_size, last=True
        )
        self.connector.save(ConnectorMetadata(saves=[blocks]))

    def load(self, transfer_id: str, port: int, peer: str = "P", host: str = HOST) -> None:
        self.connector.start(ConnectorMetadata(loads=[one_block(transfer_id, port, peer, host)]))

    def result(self, transfer_id: str) -> LoadResult:
        def arrived() -> LoadResult | None:
            self.results |= self.connector.get_finished().load_results
            return self.results.get(transfer_id)

        return eventually(arrived, f"result of {transfer_id}")


def one_block(transfer_id: str, port: int, peer: str = "P", host: str = HOST) -> LoadRequest:
    return LoadRequest(transfer_id, host, port, peer, 0, [9], [chain_hash(transfer_id, 0)])


@pytest.fixture
def side() -> Iterator[Callable[..., Side]]:
    with contextlib.ExitStack() as stack:

        def start(instance_id: str, role: KVRole, **options: float) -> Side:
            started = Side(instance_id, role, **options)
            stack.callback(started.connector.shutdown)
            return started

        yield start


def hand_over(producer: Side, consumer: Side, transfer_id: str) -> None:
    """Check that both sides still work."""
    producer.offer(transfer_id)
    consumer.load(transfer_id, producer.connector.port)
    producer.save(transfer_id)
    assert consumer.result(transfer_id) == LoadResult(1)


@pytest.mark.parametrize("host", ["no address", "%%%"])
def test_an_invalid_host_fails_only_its_load(side: Callable[..., Side], host: str) -> None:
    producer, consumer = side("P", KVRole.PRODUCER), side("D", KVRole.CONSUMER)
    consumer.load("t", 5558, host=host)
    assert "connect" in consumer.result("t").error
    hand_over(producer, consumer, "next")


def test_waiting_for_a_busy_producer_is_not_a_timeout(side: Callable[..., Side]) -> None:
    producer, consumer = side("P", KVRole.PRODUCER), side("D", KVRole.CONSUMER, load_timeout_s=1.0)
    producer.offer("queued")
    consumer.load("queued", producer.connector.port)
    for number in range(3):  # each of these takes a load timeout
        consumer.load(f"unknown-{number}", producer.connector.port)
        assert "no progress" in consumer.result(f"unknown-{number}").error
    assert "queued" not in consumer.results
    producer.save("queued")
    assert consumer.result("queued") == LoadResult(1)


def test_the_lease_begins_with_the_first_saved_blocks(side: Callable[..., Side]) -> None:
    producer, consumer = side("P", KVRole.PRODUCER, lease_s=1.5), side("D", KVRole.CONSUMER)
    producer.offer("queued")
    producer.offer("unfetched")
    producer.save("unfetched")
    sent: set[str] = set()
    eventually(
        lambda: sent.update(producer.connector.get_finished().finished_sending) or sent,
        "end of a lease",
    )
    assert sent == {"unfetched"}
    consumer.load("queued", producer.connector.port)
    producer.save("queued")
    assert consumer.result("queued") == LoadResult(1)


@pytest.mark.parametrize(("role", "max_pending_s"), [(KVRole.CONSUMER, 0.5), (KVRole.BOTH, 600.0)])
def test_a_load_that_is_only_pending_ends_at_a_deadline(
    side: Callable[..., Side], monkeypatch: pytest.MonkeyPatch, role: KVRole, max_pending_s: float
) -> None:
    """With both roles the load timeout applies, because engines could wait for each other."""
    monkeypatch.setattr(load_manager, "MAX_PENDING_S", max_pending_s)
    producer, consumer = side("P", KVRole.PRODUCER), side("D", role, load_timeout_s=0.2)
    producer.offer("t")
    consumer.load("t", producer.connector.port)
    assert "no progress" in consumer.result("t").error


class InvalidProducer:
    """Completes the handshake and sends the given description of its memory."""

    def __init__(self, **description: Any) -> None:
        self.description = description
        self.memory = np.zeros(LAYOUT.num_blocks * LAYOUT.block_nbytes, dtype=np.uint8)
        self.agent = create_agent("L/0", "inproc")
        self.agent.register_memory([(self.memory.ctypes.data, self.memory.nbytes, 0, "kv")])
        self.router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self.router.linger = 0
        self.port = self.router.bind_to_random_port(f"tcp://{HOST}")
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while self.router.poll(10_000):
            identity, frame = self.router.recv_multipart()
            match side_channel.decode_to_producer(frame):
                case side_channel.Hello(nonce=theirs, instance_id=consumer):
                    ours = auth.new_nonce()
                    ids = {"consumer_id": consumer, "producer_id": "L"}
                    proof = auth.compute_proof(
                        b"", auth.PRODUCER, consumer_nonce=theirs, producer_nonce=ours, **ids
                    )
                    answer: Any = side_channel.Welcome(side_channel.VERSION, "c", "L", ours, proof)
                case side_channel.Describe():
                    answer = self._describe(**self.description)
                case _:
                    return
            self.router.send_multipart([identity, side_channel.encode(answer)])
            if isinstance(answer, side_channel.Description):
                return

    def _describe(
        self,
        layout: KVCacheLayout = LAYOUT,
        base_address: int | None = None,
        agent_metadata: bytes | None = None,
        lease_s: float = 1.0,
        num_slots: int = LAYOUT.num_blocks,
        slot_nbytes: int = LAYOUT.block_nbytes,
    ) -> side_channel.Description:
        metadata = self.agent.get_agent_metadata() if agent_metadata is None else agent_metadata
        base_address = self.memory.ctypes.data if base_address is None else base_address
        memory = side_channel.MemoryDescription(
            metadata, base_address, num_slots, slot_nbytes, "DRAM", 0
        )
        return side_channel.Description(
            layout, memory, lease_s, [RankAddress(HOST, self.port, layout.heads)]
        )

    def close(self) -> None:
        self.thread.join(15)
        self.router.close()
        self.agent.close()


@pytest.mark.parametrize(
    "lie",
    [
        {"num_slots": 2**60},
        {"num_slots": -1},
        {"slot_nbytes": 8},
        {"base_address": 2**64 - 1},
        {"agent_metadata": b"garbage"},
        {"lease_s": 0.0},
        {"lease_s": float("nan")},
    ],
    ids=lambda lie: f"{next(iter(lie))}",
)
def test_an_invalid_description_fails_only_the_loads_of_its_producer(
    side: Callable[..., Side], lie: dict[str, Any]
) -> None:
    producer, consumer = side("P", KVRole.PRODUCER), side("D", KVRole.CONSUMER)
    liar = InvalidProducer(**lie)
    try:
        consumer.load("t", liar.port, peer="L")
        assert "invalid DESCRIPTION" in consumer.result("t").error
    finally:
        liar.close()
    hand_over(producer, consumer, "next")


def test_after_a_defect_every_load_fails_and_the_engine_reports_it(
    side: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = side("D", KVRole.CONSUMER)
    assert consumer.connector.stats().failure == ""

    def broken(load: LoadRequest) -> None:
        raise RuntimeError("a defect")

    assert consumer.connector._consumer is not None
    monkeypatch.setattr(consumer.connector._consumer, "begin", broken)
    consumer.connector.start(ConnectorMetadata(loads=[one_block("a", 1), one_block("b", 1)]))
    assert "a defect" in consumer.result("a").error
    assert "a defect" in consumer.result("b").error
    consumer.load("later", 1)
    assert "a defect" in consumer.result("later").error
    assert "a defect" in consumer.connector.stats().failure
    # An unread event would keep the thread busy.
    eventually(
        lambda: not select.select([consumer.connector._wake_fd], [], [], 0)[0],
        "sleep",
        timeout_s=60,
    )
