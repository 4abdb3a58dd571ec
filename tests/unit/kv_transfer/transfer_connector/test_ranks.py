"""Transfers between engines with several workers, each of which has some heads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from baton_kv_transfer.connector import BlockSave, ConnectorMetadata, LoadRequest, LoadResult
from baton_kv_transfer.memory.layout import HeadRange, KVCacheLayout, RankAddress
from baton_kv_transfer.memory.slot_memory import HostMemory
from baton_kv_transfer.transfer_connector import TransferConnector
from baton_protocol.options.config import KVRole, KVTransferConfig
from support.kv_transfer.kv_processes import HOST, chain_hash
from support.waiting import eventually

NUM_HEADS = 4
NUM_BLOCKS = 8


class Engine:
    """An engine with a connector per worker, in this process, over inproc."""

    def __init__(self, instance_id: str, role: KVRole, num_workers: int, **options: str) -> None:
        config = KVTransferConfig(role=role, transport="inproc", port=0, **options)
        self.connectors = [
            TransferConnector(
                config, instance_id=instance_id, compatibility_hash="c", host=HOST, rank=rank
            )
            for rank in range(num_workers)
        ]
        per_worker = NUM_HEADS // num_workers
        parts = [HeadRange(rank * per_worker, per_worker) for rank in range(num_workers)]
        ranks = [
            RankAddress(HOST, c.port, heads)
            for c, heads in zip(self.connectors, parts, strict=True)
        ]
        self.memory = []
        for connector, heads in zip(self.connectors, parts, strict=True):
            layout = KVCacheLayout(
                num_blocks=NUM_BLOCKS,
                num_kv_heads=heads.count,
                num_layers=2,
                block_size=4,
                head_dim=8,
                dtype="float32",
                first_kv_head=heads.first,
                total_kv_heads=NUM_HEADS,
            )
            memory = np.zeros((NUM_BLOCKS, heads.count, layout.head_nbytes), dtype=np.uint8)
            self.memory.append(memory)
            connector.register_kv_cache(HostMemory(memory.ctypes.data, layout), ranks)
        self.sent: list[set[str]] = [set() for _ in self.connectors]
        self.results: list[dict[str, LoadResult]] = [{} for _ in self.connectors]

    def poll(self) -> None:
        for connector, sent, results in zip(self.connectors, self.sent, self.results, strict=True):
            output = connector.get_finished()
            sent |= output.finished_sending
            results |= output.load_results

    def all_sent(self, transfer_id: str) -> bool:
        self.poll()
        return all(transfer_id in sent for sent in self.sent)

    def all_results(self, transfer_id: str) -> list[LoadResult]:
        self.poll()
        found = [results[transfer_id] for results in self.results if transfer_id in results]
        return found if len(found) == len(self.results) else []

    def start(self, metadata: ConnectorMetadata) -> None:
        for connector in self.connectors:
            connector.start(metadata)

    def save(self, save: BlockSave) -> None:
        for connector in self.connectors:
            connector.save(ConnectorMetadata(saves=[save]))

    def heads(self) -> np.ndarray:
        """Return the blocks of all workers: [num_blocks, num_heads, bytes]."""
        return np.concatenate(self.memory, axis=1)

    def close(self) -> None:
        for connector in self.connectors:
            connector.shutdown()


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    with contextlib.ExitStack() as stack:

        def start(instance_id: str, role: KVRole, num_workers: int, **options: str) -> Engine:
            made = Engine(instance_id, role, num_workers, **options)
            stack.callback(made.close)
            return made

        yield start


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize(("ours", "theirs"), [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2)])
def test_every_head_arrives_for_any_numbers_of_workers(
    engine: Callable[..., Engine], ours: int, theirs: int, mode: str
) -> None:
    producer, consumer = (
        engine("P", KVRole.PRODUCER, ours),
        engine("D", KVRole.CONSUMER, theirs, mode=mode),
    )
    rng = np.random.default_rng(ours * 10 + theirs)
    for memory in producer.memory:
        memory[:] = rng.integers(0, 255, memory.shape, dtype=np.uint8)
    hashes = [chain_hash("t", index) for index in range(4)]
    producer.start(ConnectorMetadata(offers={"t": "D"}))
    port = producer.connectors[0].port
    # Block 0 is in the consumer's prefix cache.
    consumer.start(
        ConnectorMetadata(loads=[LoadRequest("t", HOST, port, "P", 1, [7, 6, 0], hashes[1:])])
    )
    producer.save(BlockSave("t", 0, [2, 3], hashes[:2], 8, last=False))
    producer.save(BlockSave("t", 2, [4, 1], hashes[2:], 14, last=True))
    results = eventually(lambda: consumer.all_results("t"), "results of all workers")
    assert results == [LoadResult(3)] * theirs
    assert (consumer.heads()[[7, 6, 0]] == producer.heads()[[3, 4, 1]]).all()
    assert not consumer.heads()[1:6].any()
    eventually(lambda: producer.all_sent("t"), "end at all workers")
    assert [connector.stats().descriptors_refused for connector in producer.connectors] == [
        0
    ] * ours


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_load_without_blocks_releases_all_workers_of_the_producer(
    engine: Callable[..., Engine], mode: str
) -> None:
    producer, consumer = engine("P", KVRole.PRODUCER, 2), engine("D", KVRole.CONSUMER, 1, mode=mode)
    producer.start(ConnectorMetadata(offers={"t": "D"}))
    consumer.start(
        ConnectorMetadata(
            loads=[LoadRequest("t", HOST, producer.connectors[0].port, "P", 0, [], [])]
        )
    )
    assert eventually(lambda: consumer.all_results("t"), "result") == [LoadResult(0)]
    eventually(lambda: producer.all_sent("t"), "end at all workers")
