"""Conformance of the agent (test_agent.py) with peers that leave, die or are cut off by a fence."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from baton_kv_transfer.transports.transfer import TransportError
from support.kv_transfer.agent_processes import (
    ABORTS_ANSWERING_A_LOST_CONNECTION,
    ANSWERED_BY_THE_OWNER,
    BETWEEN_PROCESSES,
    BLOCK_NBYTES,
    CONNECTS_WHEN_ADDED,
    NUM_BLOCKS,
    OURS,
    OwnerProcess,
    Side,
    block_rows,
    counting,
    new_owner,
)
from support.waiting import eventually

between_processes = pytest.mark.parametrize("kind", BETWEEN_PROCESSES, indirect=True)


# Peers


def test_errors_name_unknown_peers(side: Side) -> None:
    descs = side.agent.get_xfer_descs([(side.words.ctypes.data, 8, 0)])
    for call in (
        lambda: side.agent.prep_xfer_dlist("nobody", descs),
        lambda: side.agent.initialize_xfer("READ", descs, descs, "nobody"),
        lambda: side.agent.send_notif("nobody", b"hello"),
    ):
        with pytest.raises(KeyError, match="nobody is not known"):
            call()
    side.agent.remove_remote_agent("nobody")


def test_invalid_metadata_is_refused(side: Side) -> None:
    for position in range(0, len(side.metadata), 11):
        damaged = bytearray(side.metadata)
        damaged[position] ^= 0x40
        with pytest.raises(ValueError, match="damaged"):
            side.agent.add_remote_agent(bytes(damaged))
    for metadata in (b"", b"x" * 100):
        with pytest.raises(ValueError, match="damaged"):
            side.agent.add_remote_agent(metadata)
    assert side.run(side.make("READ", [2], [3])) == "DONE"


def test_adding_the_same_metadata_twice_is_idempotent(side: Side) -> None:
    handle = side.make_everything("READ")
    side.agent.transfer(handle)
    assert side.agent.add_remote_agent(side.metadata) == "owner"
    assert side.end(handle) == "DONE"
    assert side.run(handle) == "DONE"


def test_newer_metadata_replaces_older(side: Side) -> None:
    old = side.make("READ", [0], [1])
    assert side.run(old) == "DONE"
    metadata, spare = side.owner.call("register_spare")
    with pytest.raises(ValueError, match="outside the memory"):
        side.agent.prep_xfer_dlist("owner", [(spare, BLOCK_NBYTES, 0)])
    assert side.agent.add_remote_agent(metadata) == "owner"
    remote = side.agent.prep_xfer_dlist("owner", [(spare, BLOCK_NBYTES, 0)])
    assert side.run(side.agent.make_prepped_xfer("READ", side.local, [9], remote, [0])) == "DONE"
    np.testing.assert_array_equal(side.block(9), counting(0))
    assert side.run(old) == "ERR"
    assert "replaced" in old.error


def test_many_threads_may_add_a_peer_during_transfers(side: Side) -> None:
    handles = [side.make("READ", [i], [i]) for i in range(8)]
    failures: list[Exception] = []

    def add() -> None:
        try:
            for _ in range(20):
                assert side.agent.add_remote_agent(side.metadata) == "owner"
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=add) for _ in range(6)]
    for thread in threads:
        thread.start()
    assert [side.run(handle) for handle in handles] == ["DONE"] * 8
    for thread in threads:
        thread.join()
    assert not failures


def test_several_threads_may_remove_and_add_a_peer(side: Side) -> None:
    failures: list[Exception] = []

    def churn() -> None:
        try:
            for _ in range(5):
                side.agent.remove_remote_agent("owner")
                assert side.agent.add_remote_agent(side.metadata) == "owner"
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    side.agent.add_remote_agent(side.metadata)
    side.local, side.remote = side.dlists()
    assert side.run(side.make("READ", [2], [3])) == "DONE"
    np.testing.assert_array_equal(side.block(2), counting(3))


def test_a_removed_peer_is_unknown_and_its_transfers_are_not_posted(side: Side) -> None:
    handle = side.make("READ", [0], [1])
    assert side.run(handle) == "DONE"
    side.agent.remove_remote_agent("owner")
    with pytest.raises(KeyError, match="add_remote_agent"):
        side.agent.prep_xfer_dlist("owner", block_rows(side.base))
    assert side.run(handle) == "ERR"
    assert "removed" in handle.error
    side.meet(side.owner)
    assert side.run(side.make("READ", [2], [3])) == "DONE"


@between_processes
def test_removing_a_peer_ends_its_transfers(side: Side) -> None:
    assert side.run(side.make("WRITE", [0], [0])) == "DONE"  # connected
    handle = side.make_everything("WRITE", times=8)
    with side.owner.frozen():
        assert side.agent.transfer(handle) == "PROC"
        side.agent.remove_remote_agent("owner")
        assert side.end(handle) == "ERR"
        assert "removed" in handle.error
    side.meet(side.owner)
    assert side.run(side.make("READ", [5], [6])) == "DONE"


@pytest.mark.parametrize("kind", ANSWERED_BY_THE_OWNER, indirect=True)
def test_a_transfer_ended_by_the_removal_of_its_peer_moves_no_more_bytes(
    kind: str, own_side: Side
) -> None:
    side = own_side
    assert side.run(side.make("READ", [0], [1])) == "DONE"  # connected
    handle = side.make_everything("READ", times=8)
    with side.owner.frozen():
        assert side.agent.transfer(handle) == "PROC"
        side.agent.remove_remote_agent("owner")
        assert side.end(handle) == "ERR"
        side.words[:] = 0
    if kind in ABORTS_ANSWERING_A_LOST_CONNECTION:
        process = side.owner.process
        eventually(lambda: not process.is_alive(), "the owner's end")
    else:
        side.meet(side.owner)
        assert side.run(side.make("WRITE", [5], [6], b"the owner answers")) == "DONE"
        assert side.owners_notifs(1) == [b"the owner answers"]
    assert not side.words.any()


def test_adding_a_peer_does_not_connect_and_transfers_with_a_dead_peer_fail(
    kind: str, own_side: Side
) -> None:
    side = own_side
    assert side.run(side.make("READ", [0], [0])) == "DONE"
    side.owner.kill()
    handle = side.make_everything("READ")
    assert side.run(handle) == "ERR"
    assert handle.error
    side.agent.remove_remote_agent("owner")
    if kind in CONNECTS_WHEN_ADDED:
        with pytest.raises(TransportError, match="cannot connect to owner"):
            side.agent.add_remote_agent(side.metadata)
        return
    assert side.agent.add_remote_agent(side.metadata) == "owner"
    side.local, side.remote = side.dlists()
    assert side.run(side.make("READ", [0], [0])) == "ERR"


def test_a_restarted_peer_is_a_new_peer(kind: str, own_side: Side) -> None:
    side = own_side
    old = side.make("READ", [0], [1])
    assert side.run(old) == "DONE"
    side.owner.kill()
    side.meet(new_owner(kind))
    assert side.run(side.make("READ", [2], [3])) == "DONE"
    np.testing.assert_array_equal(side.block(2), counting(3))
    assert side.run(old) == "ERR"
    assert "replaced" in old.error


@between_processes
def test_a_long_transfer_fails_when_its_peer_is_killed(own_side: Side) -> None:
    side = own_side
    assert side.run(side.make("WRITE", [0], [0])) == "DONE"
    handle = side.make_everything("WRITE", times=8)
    with side.owner.frozen():
        assert side.agent.transfer(handle) == "PROC"
        side.owner.kill()
    assert side.end(handle) == "ERR"
    assert handle.error
    side.agent.release_xfer_handle(handle)


@pytest.fixture
def initiator(kind: str, own_side: Side) -> Iterator[OwnerProcess]:
    """A second process that is connected to the owner."""
    process = OwnerProcess(kind, "initiator")
    process.call("add_peer", own_side.metadata)
    process.call("post", "READ", "owner", [0], own_side.base, [1])
    eventually(lambda: process.call("state") == "DONE", "the connection")
    process.call("post", "WRITE", "owner", [0], own_side.base, [1])
    eventually(lambda: process.call("state") == "DONE", "the connection")
    yield process
    process.stop()


@pytest.mark.parametrize("kind", OURS, indirect=True)
@pytest.mark.parametrize("frozen_side", ["owner", "initiator", "nobody"])
def test_an_owner_survives_the_death_of_a_connected_peer(
    own_side: Side, initiator: OwnerProcess, frozen_side: str
) -> None:
    side, order = own_side, list(range(NUM_BLOCKS)) * 40
    assert isinstance(side.owner, OwnerProcess)
    with contextlib.ExitStack() as asleep:
        if frozen_side == "owner":
            asleep.enter_context(side.owner.frozen())
        initiator.call("post", "READ", "owner", order[::-1], side.base, order)
        initiator.call("send_notifs", "owner", 200)
        initiator.call("post", "WRITE", "owner", order[::-1], side.base, order)
        if frozen_side == "initiator":
            asleep.enter_context(initiator.frozen())
            # The owner serves others at the same time.
            assert side.run(side.make("WRITE", [0], [0])) == "DONE"
        initiator.kill()
    assert side.run(side.make("READ", [2], [3])) == "DONE"
    assert side.run(side.make("WRITE", [4], [5], b"still here")) == "DONE"
    assert side.owners_notifs(1) == [b"still here"]
    assert side.owner.process.is_alive()


# Fence and close


def test_a_fence_removes_peers_and_keeps_memory(side: Side) -> None:
    before = side.agent.get_agent_metadata()
    assert side.run(side.make("READ", [0], [1])) == "DONE"
    side.agent.fence()
    with pytest.raises(KeyError, match="owner is not known"):
        side.agent.prep_xfer_dlist("owner", block_rows(side.base))
    assert side.agent.get_agent_metadata() != before
    side.meet(side.owner)
    assert side.run(side.make("READ", [2], [3])) == "DONE"
    np.testing.assert_array_equal(side.block(2), counting(3))
    local = side.agent.prep_xfer_dlist("me", block_rows(side.words.ctypes.data))
    assert side.run(side.agent.make_prepped_xfer("READ", side.local, [7], local, [2])) == "DONE"
    np.testing.assert_array_equal(side.block(7), counting(3))


def test_after_a_fence_only_new_metadata_is_valid(side: Side) -> None:
    side.owner.call("add_peer", side.agent.get_agent_metadata())
    base = side.words.ctypes.data
    side.owner.call("post", "WRITE", "me", [1], base, [1])
    eventually(lambda: side.owner.call("state") == "DONE", "the first write")
    side.agent.fence()
    side.words[:] = 0
    side.owner.call("post", "WRITE", "me", [2], base, [2])
    eventually(lambda: side.owner.call("state") != "PROC", "the end of the second")
    assert side.owner.call("state") == "ERR"
    assert not side.words.any()
    side.owner.call("add_peer", side.agent.get_agent_metadata())
    side.owner.call("post", "WRITE", "me", [3], base, [3])
    eventually(lambda: side.owner.call("state") == "DONE", "the third write")
    np.testing.assert_array_equal(side.block(3), counting(3))


def test_a_fence_stops_a_peers_writes(side: Side) -> None:
    side.owner.call("add_peer", side.agent.get_agent_metadata())
    everything = list(range(NUM_BLOCKS)) * 100
    side.owner.call("post", "WRITE", "me", everything[::-1], side.words.ctypes.data, everything)
    eventually(side.words.any, "first bytes")
    side.agent.fence()
    side.words[:] = 0
    eventually(lambda: side.owner.call("state") != "PROC", "the end of the write")
    assert not side.words.any()


@between_processes
def test_a_fence_ends_transfers_in_flight(side: Side) -> None:
    assert side.run(side.make("WRITE", [0], [0])) == "DONE"
    handle = side.make_everything("WRITE", times=8)
    with side.owner.frozen():
        assert side.agent.transfer(handle) == "PROC"
        side.agent.fence()
        assert side.agent.check_xfer_state(handle) == "ERR"
        assert handle.error
    side.agent.release_xfer_handle(handle)


@between_processes
def test_close_ends_transfers_in_flight_and_may_be_repeated(side: Side) -> None:
    assert side.run(side.make("WRITE", [0], [0])) == "DONE"
    handle = side.make_everything("WRITE", times=8)
    with side.owner.frozen():
        assert side.agent.transfer(handle) == "PROC"
        side.agent.close()
        assert side.agent.check_xfer_state(handle) == "ERR"
    side.agent.close()


def test_methods_of_a_closed_agent_raise(side: Side) -> None:
    handle = side.make("READ", [0], [1])
    threads = [threading.Thread(target=side.agent.close) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    side.agent.remove_remote_agent("owner")
    with pytest.raises(TransportError, match="closed"):
        side.agent.transfer(handle)
    with pytest.raises(TransportError, match="closed"):
        side.agent.fence()


@pytest.mark.parametrize("kind", BETWEEN_PROCESSES, indirect=True)
def test_an_idle_agent_with_a_peer_uses_no_cpu(side: Side) -> None:
    assert side.run(side.make("READ", [0], [1])) == "DONE"
    before = time.process_time()
    threading.Event().wait(0.4)
    assert time.process_time() - before < 0.1
