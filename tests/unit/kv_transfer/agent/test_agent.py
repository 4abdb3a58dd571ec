"""Conformance of the agent: NIXL's documented semantics, the same on every transport.

inproc     both sides in this process. A transfer ends within the call that posts it.
ucx        two processes, over UCX (tcp, loopback)
tcp        two processes, over our own sockets
shm        two processes of one host that copy each other's memory
auto       the fastest of these: here shm
nixl       NIXL. Our agent corrects where version 1.5.1 differs from its documentation: transfers
           that were released or whose peer was removed still move bytes, metadata of restarted
           peers is refused, and damaged metadata is accepted.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from baton_kv_transfer.agent.agent import INIT_AGENT
from baton_kv_transfer.transports.transfer import TransportError
from support.kv_transfer.agent_processes import (
    BETWEEN_PROCESSES,
    BLOCK_NBYTES,
    BLOCK_WORDS,
    CHECKS_WRITES_AT_THE_TARGET,
    NUM_BLOCKS,
    Side,
    block_rows,
    counting,
)
from support.waiting import eventually

between_processes = pytest.mark.parametrize("kind", BETWEEN_PROCESSES, indirect=True)


# Moving bytes


def test_read_copies_exactly_the_chosen_blocks(side: Side) -> None:
    assert side.run(side.make("READ", [3, 0, 31], [7, 31, 0])) == "DONE"
    for mine, theirs in ((3, 7), (0, 31), (31, 0)):
        np.testing.assert_array_equal(side.block(mine), counting(theirs))
    assert not side.block(1).any()


def test_a_write_is_visible_at_the_owner_when_done(side: Side) -> None:
    side.words[:] = 5
    assert side.run(side.make("WRITE", [1], [2])) == "DONE"
    content = side.owner.call("content")
    assert (content[2 * BLOCK_WORDS : 3 * BLOCK_WORDS] == 5).all()
    np.testing.assert_array_equal(content[BLOCK_WORDS : 2 * BLOCK_WORDS], counting(1))


def test_runs_adjacent_on_both_sides_become_one_descriptor(side: Side) -> None:
    merged = side.make("READ", [4, 5, 6, 9, 10], [14, 15, 16, 17, 19])
    assert merged.num_descs == 3
    assert side.run(merged) == "DONE"
    for mine, theirs in ((4, 14), (5, 15), (6, 16), (9, 17), (10, 19)):
        np.testing.assert_array_equal(side.block(mine), counting(theirs))


def test_initialize_xfer_does_not_merge_descriptors(side: Side) -> None:
    local = side.agent.get_xfer_descs(block_rows(side.words.ctypes.data)[:2])
    remote = side.agent.get_xfer_descs(block_rows(side.base)[:2])
    handle = side.agent.initialize_xfer("READ", local, remote, "owner")
    assert handle.num_descs == 2
    assert side.run(handle) == "DONE"
    np.testing.assert_array_equal(side.block(1), counting(1))


def test_descriptors_may_have_any_size_and_may_overlap_at_the_source(side: Side) -> None:
    random, theirs = np.random.default_rng(7), np.arange(NUM_BLOCKS * BLOCK_WORDS).view(np.uint8)
    lengths = [1, 1, 7, 4095, 4097, 100_003, *random.integers(1, 300, 4000).tolist()]
    starts = random.integers(0, theirs.size - max(lengths), len(lengths)).tolist()
    ends = np.cumsum([length + 3 for length in lengths]).tolist()  # a gap of 3 bytes after each one
    base = side.words.ctypes.data
    local = [
        (base + end - length - 3, length, 0) for length, end in zip(lengths, ends, strict=True)
    ]
    remote = [(side.base + start, length, 0) for length, start in zip(lengths, starts, strict=True)]
    ours = side.agent.prep_xfer_dlist(INIT_AGENT, local)
    handle = side.agent.make_prepped_xfer(
        "READ",
        ours,
        range(len(local)),
        side.agent.prep_xfer_dlist("owner", remote),
        range(len(local)),
    )
    assert handle.num_descs == len(lengths)
    assert side.run(handle) == "DONE"
    expected = np.zeros_like(side.words).view(np.uint8)
    for length, start, end in zip(lengths, starts, ends, strict=True):
        expected[end - length - 3 : end - 3] = theirs[start : start + length]
    np.testing.assert_array_equal(side.words.view(np.uint8), expected)


def test_a_write_of_single_bytes_keeps_the_bytes_between_them(side: Side) -> None:
    side.words.view(np.uint8)[:] = 0xAB
    local = side.agent.get_xfer_descs([(side.words.ctypes.data + i, 1, 0) for i in range(3)])
    remote = side.agent.get_xfer_descs([(side.base + 8 * i + 5, 1, 0) for i in range(3)])
    assert side.run(side.agent.initialize_xfer("WRITE", local, remote, "owner")) == "DONE"
    expected = counting(0)
    expected.view(np.uint8)[5:24:8] = 0xAB
    np.testing.assert_array_equal(side.owner.call("content")[:BLOCK_WORDS], expected)


def test_all_requests_of_one_peer_complete_in_any_order(side: Side) -> None:
    handles = [side.make("READ", [i], [NUM_BLOCKS - 1 - i]) for i in range(NUM_BLOCKS)]
    for handle in handles:
        side.agent.transfer(handle)
    assert [side.end(handle) for handle in reversed(handles)] == ["DONE"] * NUM_BLOCKS
    for i in range(NUM_BLOCKS):
        np.testing.assert_array_equal(side.block(i), counting(NUM_BLOCKS - 1 - i))


def test_an_agent_is_its_own_peer(side: Side) -> None:
    side.block(2)[:] = 8
    remote = side.agent.prep_xfer_dlist("me", block_rows(side.words.ctypes.data))
    handle = side.agent.make_prepped_xfer("READ", side.local, [5, 6], remote, [2, 3], b"to myself")
    assert side.run(handle) == "DONE"
    assert (side.block(5) == 8).all()
    assert not side.block(6).any()
    assert eventually(side.agent.get_new_notifs, "the notification") == {"me": [b"to myself"]}
    with pytest.raises(ValueError, match="own name"):
        side.agent.add_remote_agent(side.agent.get_agent_metadata())


def test_own_descriptors_stay_valid_when_more_memory_is_registered(side: Side) -> None:
    remote = side.agent.prep_xfer_dlist("me", block_rows(side.words.ctypes.data))
    more = np.zeros(64, dtype=np.int64)
    registered = side.agent.register_memory([(more.ctypes.data, more.nbytes, 0, "")])
    handle = side.agent.make_prepped_xfer("READ", side.local, [5], remote, [2])
    assert side.run(handle) == "DONE"
    added = side.agent.prep_xfer_dlist("me", [(more.ctypes.data, more.nbytes, 0)])
    mine = side.agent.prep_xfer_dlist("", [(side.words.ctypes.data, more.nbytes, 0)])
    assert side.run(side.agent.make_prepped_xfer("WRITE", mine, [0], added, [0])) == "DONE"
    assert (more == side.words.reshape(-1)[:64]).all()
    side.agent.deregister_memory(registered)


# Notifications


def test_a_notification_arrives_after_all_descriptors_of_its_transfer(side: Side) -> None:
    handle = side.make_everything("WRITE")
    for value in (1, 2, 3):
        side.words[:] = value
        side.agent.transfer(handle, b"all are %d" % value)
        assert side.owner.call("on_notif", b"all are %d" % value) == (value, value)
        assert side.end(handle) == "DONE"


def test_a_read_notifies_the_owner_each_time_it_is_posted(side: Side) -> None:
    handle = side.make("READ", [0], [1], b"as made")
    assert side.run(handle) == "DONE"
    side.agent.transfer(handle, b"as posted")
    assert side.end(handle) == "DONE"
    assert side.run(handle) == "DONE"
    assert side.owners_notifs(3) == [b"as made", b"as posted", b"as made"]
    silent = side.make("READ", [0], [1])
    side.agent.transfer(silent, b"only now")
    assert side.end(silent) == "DONE"
    assert side.run(silent) == "DONE"
    side.agent.send_notif("owner", b"last")
    assert side.owners_notifs(2) == [b"only now", b"last"]


def test_notifications_without_transfers_arrive_complete_and_in_order(side: Side) -> None:
    messages = [b"first", b"x" * 20_000, b"third"]
    for message in messages:
        side.agent.send_notif("owner", message)
    assert side.owners_notifs(3) == messages


def test_wakeup_is_called_for_notifications_and_ended_transfers(side: Side) -> None:
    woken = threading.Event()
    side.agent.set_wakeup(woken.set)
    handle = side.make_everything("READ")
    side.agent.transfer(handle)
    assert woken.wait(10)
    eventually(lambda: side.agent.check_xfer_state(handle) == "DONE", "end of the transfer")
    woken.clear()
    remote = side.agent.prep_xfer_dlist("me", block_rows(side.words.ctypes.data))
    side.agent.send_notif("me", b"hello")
    assert woken.wait(10)
    side.agent.release_dlist_handle(remote)


# Handles


def test_a_handle_can_be_posted_again_after_done_and_released_once(side: Side) -> None:
    handle = side.make("READ", [0], [1])
    with pytest.raises(ValueError, match="not posted"):
        side.agent.check_xfer_state(handle)
    assert side.run(handle) == "DONE"
    side.words[:] = 0
    assert side.run(handle) == "DONE"
    np.testing.assert_array_equal(side.block(0), counting(1))
    side.agent.release_xfer_handle(handle)
    with pytest.raises(ValueError, match="released"):
        side.agent.transfer(handle)


def test_a_released_list_is_refused_but_its_earlier_transfers_stay(side: Side) -> None:
    handle = side.make("READ", [0], [1])
    side.agent.release_dlist_handle(side.remote)
    with pytest.raises(ValueError, match="released"):
        side.make("READ", [0], [1])
    assert side.run(handle) == "DONE"


@between_processes
def test_an_active_handle_cannot_be_posted_or_released(
    side: Side,
) -> None:
    assert side.run(side.make("WRITE", [0], [0])) == "DONE"  # connected
    handle = side.make_everything("WRITE", times=8)
    with side.owner.frozen():
        assert side.agent.transfer(handle) == "PROC"
        began = time.monotonic()
        with pytest.raises(ValueError, match="still active"):
            side.agent.transfer(handle)
        with pytest.raises(TransportError, match="active"):
            side.agent.release_xfer_handle(handle)
        assert time.monotonic() - began < 10
    assert side.end(handle) == "DONE"
    assert side.run(handle) == "DONE"


@pytest.mark.parametrize("indices", [[NUM_BLOCKS], [-1], [0, 1]])
def test_invalid_rows_and_lists_of_different_lengths_are_refused(
    side: Side, indices: list[int]
) -> None:
    with pytest.raises(ValueError, match=r"indices|same number"):
        side.make("READ", indices, [0])
    with pytest.raises(ValueError, match=r"indices|same number"):
        side.make("READ", [0], indices)
    with pytest.raises(ValueError, match="same number"):
        side.make("READ", [], [])


def test_lists_of_wrong_sides_or_lengths_are_refused(side: Side) -> None:
    with pytest.raises(ValueError, match="prepared for"):
        side.agent.make_prepped_xfer("READ", side.remote, [0], side.local, [0])
    with pytest.raises(ValueError, match="READ or WRITE"):
        side.make("COPY", [0], [0])
    local = side.agent.get_xfer_descs([(side.words.ctypes.data, 16, 0)])
    remote = side.agent.get_xfer_descs([(side.base, 8, 0)])
    with pytest.raises(ValueError, match="equal lengths"):
        side.agent.initialize_xfer("READ", local, remote, "owner")


# Memory


@pytest.mark.parametrize("offset", [-8, NUM_BLOCKS * BLOCK_NBYTES - 8, 1 << 40])
def test_descriptors_outside_registered_memory_are_refused(side: Side, offset: int) -> None:
    inside = {INIT_AGENT: side.words.ctypes.data, "owner": side.base, "me": side.words.ctypes.data}
    for agent_name, base in inside.items():
        with pytest.raises(ValueError, match="outside the memory"):
            side.agent.prep_xfer_dlist(agent_name, [(base, 8, 0), (base + offset, 16, 0)])
    local, remote = (
        side.agent.get_xfer_descs([(base + offset, 16, 0)])
        for base in (side.words.ctypes.data, side.base)
    )
    with pytest.raises(ValueError, match="outside the memory"):
        side.agent.initialize_xfer(
            "READ", local, side.agent.get_xfer_descs([(side.base, 16, 0)]), "owner"
        )
    with pytest.raises(ValueError, match="outside the memory"):
        side.agent.initialize_xfer(
            "READ", side.agent.get_xfer_descs([(side.words.ctypes.data, 16, 0)]), remote, "owner"
        )


def test_a_descriptor_whose_end_overflows_is_refused(side: Side) -> None:
    with pytest.raises(ValueError, match="outside the memory"):
        side.agent.prep_xfer_dlist("owner", [(side.base + 8, 2**63 - 1, 0)])


@pytest.mark.parametrize("rows", [[], [(1, 2)], [(4096, 0, 0)], [(4096, -1, 0)]])
def test_malformed_descriptor_lists_are_refused(side: Side, rows: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"\[n, 3\]|at least 1 byte"):
        side.agent.prep_xfer_dlist(INIT_AGENT, rows)


def test_a_host_address_is_refused_as_gpu_memory(side: Side) -> None:
    with pytest.raises(ValueError, match="DRAM or VRAM"):
        side.agent.register_memory([(side.words.ctypes.data, 64, 0, "")], "FILE")
    with pytest.raises(ValueError, match="DRAM or VRAM"):
        side.agent.get_xfer_descs([(side.words.ctypes.data, 64, 0)], "FILE")
    with pytest.raises(ValueError, match="VRAM"):
        side.agent.register_memory([(side.words.ctypes.data, 64, 0, "")], "VRAM")
    with pytest.raises(ValueError, match="outside the memory"):
        side.agent.prep_xfer_dlist(INIT_AGENT, block_rows(side.words.ctypes.data), "VRAM")


def test_an_empty_region_is_refused(side: Side) -> None:
    with pytest.raises(ValueError, match="memory"):
        side.agent.register_memory([(side.words.ctypes.data, 0, 0, "")])
    assert side.run(side.make("READ", [0], [1])) == "DONE"


@pytest.mark.parametrize("kind", CHECKS_WRITES_AT_THE_TARGET, indirect=True)
def test_writes_to_deregistered_memory_are_refused_and_counted(own_side: Side) -> None:
    side = own_side
    assert side.run(side.make("WRITE", [0], [0])) == "DONE"
    before = side.owner.call("content").copy()
    side.owner.call("deregister")
    side.words[:] = 9
    handle = side.make("WRITE", [3, 5], [3, 6])
    assert side.run(handle) == "ERR"
    assert handle.error
    assert side.owner.call("num_refused") == 2
    np.testing.assert_array_equal(side.owner.call("content"), before)


@pytest.mark.parametrize("kind", ["ucx", "tcp"], indirect=True)
def test_deregistered_memory_cannot_be_read(own_side: Side) -> None:
    side = own_side
    side.owner.call("deregister")
    handle = side.make("READ", [3, 5], [3, 6])
    assert side.run(handle) == "ERR"
    assert "2 of 2 descriptors" in handle.error
    assert side.owner.call("num_refused") == 2
    assert not side.words.any()
