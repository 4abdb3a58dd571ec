"""Pushed loads, and loads from several workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from baton_kv_transfer.connector import FailureReason, LoadResult
from baton_kv_transfer.memory.layout import HeadRange
from baton_kv_transfer.side_channel import (
    Cancelled,
    Pending,
    Publish,
    Release,
    Released,
    Subscribe,
    encode,
)
from support.kv_transfer.consumer_rig import (
    BLOCK_NBYTES,
    Rig,
    Worker,
    failures,
    tensor_parallel,
)

# Push


def test_pushed_blocks_are_verified_in_place(pushed: Rig, worker: Worker) -> None:
    subscribe = pushed.subscribed("t", worker, [9, 2, 4])
    assert subscribe.push_slots == [9, 2, 4]
    for indices, last in (([0, 1], False), ([2], True)):
        publish = worker.published(subscribe, indices, last=last, written=True)
        assert worker.write(subscribe, publish.blocks, pushed.layout) == "DONE"
        pushed.deliver(worker, publish)
    assert pushed.results == {"t": LoadResult(3)}, (
        "the load waits for a confirmation although all is written"
    )
    assert worker.receive(Release).completed
    assert (pushed.stats.bytes_received, pushed.stats.descriptors_posted) == (3 * BLOCK_NBYTES, 0)


def test_the_notification_of_a_write_completes_its_blocks(pushed: Rig, worker: Worker) -> None:
    subscribe = pushed.subscribed("t", worker, [9, 2])
    for index in (0, 1):
        assert not pushed.results
        publish = worker.published(subscribe, [index], written=True)
        assert worker.write(subscribe, publish.blocks, pushed.layout, publish) == "DONE"
        pushed.advance()
    assert pushed.results == {"t": LoadResult(2)}, (
        "the load waits for more messages although all is written"
    )
    assert worker.receive(Release).completed
    assert (pushed.stats.memory_fences, pushed.stats.descriptors_posted) == (0, 0)


def test_blocks_that_the_last_publish_repeats_are_verified_once(
    pushed: Rig, worker: Worker
) -> None:
    subscribe = pushed.subscribed("t", worker, [9, 2])
    publish = worker.published(subscribe, [0, 1], last=True, written=True)
    first = Publish("t", subscribe.generation, publish.blocks[:1], last=False, written=True)
    worker.write(subscribe, publish.blocks[:1], pushed.layout, first)
    pushed.advance()
    worker.write(subscribe, publish.blocks[1:], pushed.layout)  # its notification is lost
    assert not pushed.results
    pushed.deliver(worker, publish)
    assert pushed.results == {"t": LoadResult(2)}
    assert pushed.stats.bytes_received == 2 * BLOCK_NBYTES


def test_a_result_is_reported_before_the_release_is_sent(
    pushed: Rig, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscribe = pushed.subscribed("t", worker, [9])
    order: list[str] = []
    pushed.on_result = lambda transfer_id, result: order.append("result")
    (peer,) = pushed.consumer.peers()
    monkeypatch.setattr(peer, "send", lambda message: order.append(type(message).__name__))
    publish = worker.published(subscribe, [0], written=True)
    worker.write(subscribe, publish.blocks, pushed.layout, publish)
    pushed.advance()
    assert order == ["result", "Release"]


def test_invalid_and_unrelated_notifications_are_ignored(
    pushed: Rig, worker: Worker, made: Callable[[Any], Any]
) -> None:
    subscribe = pushed.subscribed("t", worker, [9])
    publish = worker.published(subscribe, [0], written=True)
    old = Publish("t", subscribe.generation ^ 1, publish.blocks, last=False, written=True)
    worker.write(subscribe, publish.blocks, pushed.layout, old)
    unrelated = made(Worker("Q"))
    unrelated.agent.send_notif(
        unrelated.agent.add_remote_agent(pushed.agent.get_agent_metadata()), encode(publish)
    )
    for invalid in (b"no message", encode(Released("t", subscribe.generation))):
        worker.agent.send_notif("D/0", invalid)
    pushed.advance()
    assert not pushed.results
    pushed.deliver(worker, publish)
    assert pushed.results == {"t": LoadResult(1)}
    assert not failures(pushed)


def test_a_pushed_block_with_a_wrong_checksum_is_read_once(pushed: Rig, worker: Worker) -> None:
    subscribe = pushed.subscribed("t", worker, [9, 2])
    publish = worker.published(subscribe, [0, 1], last=True, written=True)
    worker.write(subscribe, publish.blocks[:1], pushed.layout)
    pushed.deliver(worker, publish)
    assert pushed.results == {"t": LoadResult(2)}
    assert pushed.stats.checksum_failures == 1
    assert pushed.stats.descriptors_posted == 1


def test_published_blocks_that_were_not_written_are_read(pushed: Rig, worker: Worker) -> None:
    subscribe = pushed.subscribed("t", worker, [9, 2])
    pushed.deliver(worker, worker.published(subscribe, [0, 1], last=True, written=False))
    assert pushed.results == {"t": LoadResult(2)}


def test_a_load_verified_before_the_last_publish_waits_for_the_confirmation(
    pushed: Rig, worker: Worker
) -> None:
    subscribe = pushed.subscribed("t", worker, [9])
    pushed.deliver(worker, worker.published(subscribe, [0], last=False, written=False))
    assert worker.receive(Release).completed
    assert not pushed.results
    pushed.deliver(worker, Released("t", subscribe.generation))
    assert pushed.results == {"t": LoadResult(1)}
    assert pushed.stats.memory_fences == 0


def test_a_cancelled_push_ends_with_the_producers_confirmation(pushed: Rig, worker: Worker) -> None:
    subscribe = pushed.subscribed("t", worker, [9, 2])
    pushed.consumer.cancel("t")
    pushed.advance()
    assert not worker.receive(Release).completed
    pushed.deliver(worker, Released("t", subscribe.generation ^ 1))
    assert not pushed.results, "the confirmation of another load ended it"
    pushed.deliver(worker, Released("t", subscribe.generation))
    assert failures(pushed) == {FailureReason.CANCELLED: 1}
    assert pushed.results["t"].error == "cancelled"
    assert pushed.agent.num_fences == 0


def test_a_push_that_the_producer_cancels_and_confirms_ends(pushed: Rig, worker: Worker) -> None:
    subscribe = pushed.subscribed("t", worker, [9])
    worker.send(Released("t", subscribe.generation))
    pushed.deliver(worker, Cancelled("t", subscribe.generation, "no memory"))
    while not pushed.results:
        pushed.receive()
    assert pushed.results["t"].error == "no memory"
    assert failures(pushed) == {FailureReason.PRODUCER_CANCELLED: 1}


def test_a_publish_after_the_confirmation_is_a_protocol_error(pushed: Rig, worker: Worker) -> None:
    subscribe = pushed.subscribed("t", worker, [9])
    pushed.deliver(worker, Released("t", subscribe.generation))
    pushed.deliver(worker, worker.published(subscribe, [0], last=True, written=True))
    assert pushed.results["t"].num_valid_blocks == 0
    assert failures(pushed) == {FailureReason.PROTOCOL: 1}


def test_blocks_that_are_published_after_the_confirmation_are_read(
    pushed: Rig, worker: Worker
) -> None:
    subscribe = pushed.subscribed("t", worker, [9])
    pushed.deliver(worker, Released("t", subscribe.generation))
    pushed.deliver(worker, worker.published(subscribe, [0], last=False, written=False))
    assert pushed.results == {"t": LoadResult(1)}, "the load waits for a second confirmation"
    assert worker.receive(Release).completed


def test_a_load_that_waits_for_the_confirmation_sleeps_until_the_settle_timeout(
    pushed: Rig, worker: Worker
) -> None:
    pushed.subscribed("t", worker, [9])
    pushed.advance(10.0)
    worker.receive(Release)
    pushed.advance(1.0)
    assert not pushed.results
    deadline = pushed.consumer.next_deadline()
    assert deadline is not None
    assert deadline > pushed.clock.now, "the thread does not sleep"


def test_a_producer_that_does_not_confirm_is_fenced(pushed: Rig, worker: Worker) -> None:
    subscribe = pushed.subscribed("t", worker, [9])
    publish = worker.published(subscribe, [0], last=True, written=True)
    pushed.consumer.cancel("t")
    pushed.advance(4.9)
    assert not pushed.results
    pushed.advance(0.1)
    assert failures(pushed) == {FailureReason.CANCELLED: 1}
    assert pushed.stats.memory_fences == 1
    assert pushed.fenced == [1], "this engine's producer was not notified of the fence"
    before = pushed.blocks.copy()
    assert worker.write(subscribe, publish.blocks, pushed.layout) == "ERR"
    assert (pushed.blocks == before).all()


def test_a_fence_waits_for_loads_of_other_peers_and_ends_them(
    pushed: Rig, worker: Worker, made: Callable[[Any], Any]
) -> None:
    other = made(Worker("Q"))
    pushed.subscribed("t", worker, [9])
    pushed.begin("u", other, [1])
    pushed.handshake(other)
    reading = other.receive(Subscribe)
    pushed.agent.hold = True
    pushed.deliver(other, other.published(reading, [0], last=True, written=False))
    pushed.on_result = lambda transfer_id, result: (
        None if pushed.agent.num_fences else pytest.fail("too early")
    )
    worker.close()
    pushed.receive()
    assert not pushed.results, "the fence did not wait for the other load"
    pushed.advance(5.0)
    assert pushed.results.keys() == {"t", "u"}
    assert failures(pushed) == {FailureReason.PEER_LOST: 2}
    assert not other.receive(Release).completed
    # A new handshake with the other peer uses the memory's new metadata.
    pushed.agent.hold = False
    old = other.described
    subscribe = pushed.subscribed("v", other, [1])
    assert other.described != old
    publish = other.published(subscribe, [0], last=True, written=True)
    assert other.write(subscribe, publish.blocks, pushed.layout) == "DONE"
    pushed.deliver(other, publish)
    assert pushed.results["v"] == LoadResult(1)


def test_a_lost_producer_is_fenced_at_once_without_other_loads(pushed: Rig, worker: Worker) -> None:
    pushed.subscribed("t", worker, [9])
    worker.close()
    pushed.receive()
    assert failures(pushed) == {FailureReason.PEER_LOST: 1}
    assert pushed.stats.memory_fences == 1


# Several workers on either side


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("push", [False, True])
def test_heads_are_loaded_from_all_workers_of_the_producer(
    made: Callable[[Any], Any], size: int, push: bool
) -> None:
    rig, workers = made(Rig(push=push)), made(tensor_parallel(size))
    rig.begin("t", workers[0], [5, 3])
    for worker in workers:
        rig.handshake(worker)
    for worker in workers:
        subscribe = worker.receive(Subscribe)
        assert subscribe.heads == worker.layout.heads
        assert (subscribe.subscriber, subscribe.num_subscribers) == (0, 1)
        assert not rig.results
        publish = worker.published(subscribe, [0, 1], last=True, written=push)
        if push:
            assert worker.write(subscribe, publish.blocks, rig.layout) == "DONE"
        rig.deliver(worker, publish)
        assert worker.receive(Release).completed, "a complete rank transfer was not released"
    assert rig.results == {"t": LoadResult(2)}
    assert (rig.stats.blocks_received, rig.stats.bytes_received) == (2, 2 * BLOCK_NBYTES)


def test_a_worker_loads_its_own_heads_from_a_larger_worker(
    made: Callable[[Any], Any], worker: Worker
) -> None:
    rig = made(Rig(heads=HeadRange(2, 2), engine=[HeadRange(0, 2), HeadRange(2, 2)]))
    subscribe = rig.subscribed("t", worker, [5, 3])
    assert subscribe.heads == HeadRange(2, 2)
    assert (subscribe.subscriber, subscribe.num_subscribers) == (1, 2)
    rig.deliver(worker, worker.published(subscribe, [0, 1], last=True))
    assert rig.results == {"t": LoadResult(2)}
    assert rig.stats.bytes_received == BLOCK_NBYTES


def test_only_workers_with_common_heads_are_used(made: Callable[[Any], Any]) -> None:
    rig = made(Rig(heads=HeadRange(2, 2), engine=[HeadRange(0, 2), HeadRange(2, 2)]))
    workers = made(tensor_parallel(4))
    rig.begin("t", workers[0], [5])
    for worker in (workers[0], workers[2], workers[3]):
        rig.handshake(worker)
    for worker in workers[2:]:
        subscribe = worker.receive(Subscribe)
        assert (subscribe.heads, subscribe.subscriber, subscribe.num_subscribers) == (
            worker.layout.heads,
            0,
            1,
        )
        rig.deliver(worker, worker.published(subscribe, [0], last=True))
    assert rig.results == {"t": LoadResult(1)}
    assert not workers[0].poll()
    assert not workers[1].poll()


def two_rank_transfers(made: Callable[[Any], Any]) -> tuple[Rig, list[Worker], list[Subscribe]]:
    rig, workers = made(Rig()), made(tensor_parallel(2))
    rig.begin("t", workers[0], [5, 3])
    for worker in workers:
        rig.handshake(worker)
    return rig, workers, [worker.receive(Subscribe) for worker in workers]


def test_the_valid_prefix_is_verified_by_every_rank_transfer(
    made: Callable[[Any], Any],
) -> None:
    rig, workers, subscribes = two_rank_transfers(made)
    rig.deliver(workers[0], workers[0].published(subscribes[0], [0, 1], last=True))
    rig.deliver(workers[1], workers[1].published(subscribes[1], [0]))
    rig.deliver(workers[1], Cancelled("t", subscribes[1].generation, "preempted"))
    assert rig.results == {"t": LoadResult(1, "preempted")}
    assert not workers[1].receive(Release).completed


def test_a_lost_rank_transfer_fails_the_load(made: Callable[[Any], Any]) -> None:
    rig, workers, _ = two_rank_transfers(made)
    workers[1].close()
    rig.receive()
    assert failures(rig) == {FailureReason.PEER_LOST: 1}
    assert not workers[0].receive(Release).completed


def test_a_complete_rank_transfer_may_be_lost(made: Callable[[Any], Any]) -> None:
    rig, workers, subscribes = two_rank_transfers(made)
    rig.deliver(workers[0], workers[0].published(subscribes[0], [0, 1], last=True))
    workers[0].receive(Release)
    workers[0].close()
    rig.receive()
    rig.deliver(workers[1], workers[1].published(subscribes[1], [0, 1], last=True))
    assert rig.results == {"t": LoadResult(2)}


def test_progress_of_one_rank_transfer_does_not_extend_the_timeout_of_another(
    made: Callable[[Any], Any],
) -> None:
    rig, workers, _ = two_rank_transfers(made)
    for _ in range(2):
        rig.advance(4.0)
        rig.deliver(workers[0], Pending(["t"]))
    assert not rig.results
    rig.advance(2.0)
    assert failures(rig) == {FailureReason.TIMEOUT: 1}
    assert f":{workers[1].port}" in rig.results["t"].error


def test_a_load_without_blocks_releases_every_worker(made: Callable[[Any], Any]) -> None:
    rig, workers = made(Rig(push=True)), made(tensor_parallel(2))
    rig.begin("t", workers[0], [])
    for worker in workers:
        assert not rig.results
        rig.handshake(worker)
    assert rig.results == {"t": LoadResult(0)}
    for worker in workers:
        release = worker.receive(Release)
        assert (release.completed, release.num_subscribers) == (True, 1)


def test_replicated_heads_are_refused_with_both_numbers(
    made: Callable[[Any], Any], rig: Rig, worker: Worker
) -> None:
    with pytest.raises(ValueError, match=r"5 workers share 4 KV heads"):
        made(Rig(engine=[HeadRange(0, 1)] * 5))
    worker.ranks = worker.ranks * 5
    rig.begin("t", worker, [1])
    rig.handshake(worker)
    assert "5 workers for 4 KV heads" in rig.results["t"].error
    assert failures(rig) == {FailureReason.REFUSED: 1}
