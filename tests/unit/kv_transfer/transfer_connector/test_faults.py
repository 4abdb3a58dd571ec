"""A fault of a peer or the connector itself fails a load with a reason and by a deadline."""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from baton_kv_transfer.connector import BlockSave, ConnectorMetadata, LoadRequest, LoadResult
from baton_kv_transfer.memory.slot_memory import HostMemory
from baton_kv_transfer.transfer_connector import TransferConnector
from baton_protocol.options.config import KVRole, KVTransferConfig
from support.kv_transfer.kv_processes import HOST, LAYOUT, chain_hash
from support.waiting import eventually


class Side:
    """A connector in this process, over the inproc transport."""

    def __init__(self, instance_id: str, role: KVRole, **options: float) -> None:
        config = KVTransferConfig(role=role, transport="inproc", port=0, **options)
        self.memory = np.zeros((LAYOUT.num_blocks, LAYOUT.block_nbytes), dtype=np.uint8)
        self.connector = TransferConnector(
            config, instance_id=instance_id, compatibility_hash="c", host=HOST
        )
        self.connector.register_kv_cache(HostMemory(self.memory.ctypes.data, LAYOUT))
        self.results: dict[str, LoadResult] = {}

    def offer(self, transfer_id: str) -> None:
        self.connector.start(ConnectorMetadata(offers={transfer_id: "D"}))

    def save(self, transfer_id: str) -> None:
        blocks = BlockSave(
            transfer_id, 0, [3], [chain_hash(transfer_id, 0)], LAYOUT.block_size, last=True
        )
        self.connector.save(ConnectorMetadata(saves=[blocks]))

    def load(self, transfer_id: str, port: int, host: str = HOST) -> None:
        self.connector.start(ConnectorMetadata(loads=[one_block(transfer_id, port, host)]))

    def result(self, transfer_id: str) -> LoadResult:
        def arrived() -> LoadResult | None:
            self.results |= self.connector.get_finished().load_results
            return self.results.get(transfer_id)

        return eventually(arrived, f"result of {transfer_id}")


def one_block(transfer_id: str, port: int, host: str = HOST) -> LoadRequest:
    return LoadRequest(transfer_id, host, port, "P", 0, [9], [chain_hash(transfer_id, 0)])


@pytest.fixture
def side() -> Iterator[Callable[..., Side]]:
    with contextlib.ExitStack() as stack:

        def start(instance_id: str, role: KVRole, **options: float) -> Side:
            started = Side(instance_id, role, **options)
            stack.callback(started.connector.shutdown)
            return started

        yield start


@pytest.mark.parametrize("host", ["no address", "%%%"])
def test_an_invalid_host_fails_only_its_load(side: Callable[..., Side], host: str) -> None:
    producer, consumer = side("P", KVRole.PRODUCER), side("D", KVRole.CONSUMER)
    consumer.load("t", 5558, host=host)
    assert "connect" in consumer.result("t").error
    producer.offer("next")
    consumer.load("next", producer.connector.port)
    producer.save("next")
    assert consumer.result("next") == LoadResult(1)


def test_with_both_roles_a_load_that_stays_pending_fails_by_a_deadline(
    side: Callable[..., Side],
) -> None:
    """Two such engines could wait for each other's memory without end."""
    producer, consumer = side("P", KVRole.PRODUCER), side("D", KVRole.BOTH, load_timeout_s=0.2)
    producer.offer("t")
    consumer.load("t", producer.connector.port)
    assert "no progress" in consumer.result("t").error


def test_a_fence_of_the_consumer_side_fails_the_producer_sides_sessions(
    side: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides have one agent, from which the fence removes all peers."""
    both, failed = side("B", KVRole.BOTH), threading.Event()
    monkeypatch.setattr(both.connector._producer, "fail_push_sessions", failed.set)
    monkeypatch.setattr(both.connector._consumer, "run_round", lambda now: iter(()))
    monkeypatch.setattr(both.connector._consumer, "_has_fenced", True)
    both.offer("t")
    assert failed.wait(timeout=60)


def test_a_defect_fails_every_load_and_is_in_the_stats(
    side: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = side("D", KVRole.CONSUMER)
    assert consumer.connector.stats().failure == ""

    def broken(load: LoadRequest) -> None:
        raise RuntimeError("a defect")

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
