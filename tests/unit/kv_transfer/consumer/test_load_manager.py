"""Loads that wait for memory: the producer keeps their blocks until they begin."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from baton_kv_transfer.connector import LoadWait
from baton_kv_transfer.producer import transfer_manager
from baton_kv_transfer.side_channel import Heartbeat, Subscribe
from support.kv_transfer.consumer_rig import HOST, Rig, Worker, tensor_parallel
from support.kv_transfer.producer_rig import LEASE_S, Consumer, Producer


@pytest.fixture
def rig() -> Iterator[Rig]:
    with contextlib.closing(Rig()) as rig:
        yield rig


@pytest.fixture
def producer() -> Iterator[Producer]:
    with contextlib.closing(Producer()) as producer:
        yield producer


def test_heartbeats_name_a_waiting_load_until_it_begins(rig: Rig) -> None:
    with contextlib.ExitStack() as stack:
        workers = tensor_parallel(2)
        for worker in workers:
            stack.callback(worker.close)
        rig.consumer.add_wait("t", LoadWait(HOST, workers[0].port, "P"))
        for worker in workers:
            rig.handshake(worker)
        for _ in range(2):
            deadline = rig.consumer.next_deadline()
            assert deadline is not None
            rig.advance(max(0.0, deadline - rig.clock.now) + 5.0)
            for worker in workers:
                assert worker.receive(Heartbeat).transfer_ids == ["t"]
        rig.begin("t", workers[0], [1])
        for worker in workers:
            assert worker.receive(Subscribe).transfer_id == "t"


def test_a_waiting_load_is_dropped_with_its_producer(rig: Rig) -> None:
    with contextlib.closing(Worker()) as worker:
        rig.consumer.add_wait("t", LoadWait(HOST, worker.port, "P"))
        rig.advance()
        rig.advance(60.0)  # no response
    assert rig.consumer.peers() == []
    assert rig.consumer.next_deadline() is None


def test_blocks_of_a_waiting_load_are_held_for_its_consumer_up_to_a_limit(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_manager, "MAX_WAIT_S", 4 * LEASE_S)
    with (
        contextlib.closing(Consumer(producer)) as waiting,
        contextlib.closing(Consumer(producer, instance_id="E")) as stranger,
    ):
        for transfer_id in ("t", "u"):
            producer.offer(transfer_id, "D" if transfer_id == "t" else "F")
            producer.save([3 if transfer_id == "t" else 4], last=True, transfer_id=transfer_id)
        for _ in range(3):
            producer.advance(LEASE_S - 1)
            waiting.heartbeat()
            stranger.heartbeat("u")
        assert producer.finished == ["u"]
        producer.advance(LEASE_S - 1)
        waiting.heartbeat()
        assert producer.finished == ["u"]
        producer.advance(LEASE_S - 1)
        assert producer.finished == ["u", "t"]
