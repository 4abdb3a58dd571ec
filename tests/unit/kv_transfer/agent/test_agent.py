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

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from baton_kv_transfer.agent.agent import INIT_AGENT, Agent
from baton_kv_transfer.agent.create import create_agent
from baton_kv_transfer.transports.transfer import TransportError
from support.kv_transfer.agent_processes import (
    BLOCK_NBYTES,
    BLOCK_WORDS,
    NUM_BLOCKS,
    Owner,
    OwnerHere,
    OwnerProcess,
    Side,
    block_rows,
    counting,
)
from support.waiting import eventually

OURS = ("ucx", "tcp", "shm", "auto")
KINDS = ("inproc", *OURS, "nixl")
BETWEEN_PROCESSES = (*OURS, "nixl")
#: NIXL is one-sided: the network card, or UCX, writes wherever the writer's key allows.
CHECKS_WRITES_AT_THE_TARGET = ("inproc", *OURS)
#: Reads stall while the owner is frozen. With shm the reader copies without the owner.
ANSWERED_BY_THE_OWNER = ("ucx", "tcp", "nixl")
#: A defect of UCX 1.21: the owner aborts when it answers a read whose connection was lost.
ABORTS_ANSWERING_A_LOST_CONNECTION = ("nixl",)
#: Contrary to its documentation, NIXL connects when it loads metadata, and refuses dead peers.
CONNECTS_WHEN_ADDED = ("nixl",)


@pytest.fixture(scope="module")
def owners() -> Iterator[Callable[[str], Owner]]:
    """Return a function that returns the owner of this kind. Living owners are reused."""
    kept: dict[str, Owner] = {}

    def get(kind: str) -> Owner:
        owner = kept.get(kind)
        if owner is None or (isinstance(owner, OwnerProcess) and not owner.process.is_alive()):
            owner = kept[kind] = new_owner(kind)
        owner.call("refill")
        owner.call("new_notifs")
        return owner

    yield get
    for owner in kept.values():
        owner.stop()


def new_owner(kind: str) -> Owner:
    return OwnerHere() if kind == "inproc" else OwnerProcess(kind)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "nixl":
        monkeypatch.setattr("baton_kv_transfer.agent.nixl_agent.REMOVE_GRACE_S", 0.2)
    return request.param


@pytest.fixture
def side(kind: str, owners: Callable[[str], Owner]) -> Iterator[Side]:
    side = Side(kind, owners(kind))
    yield side
    side.agent.close()


@pytest.fixture
def own_side(kind: str) -> Iterator[Side]:
    """A side with its own owner, which may be killed."""
    side = Side(kind, new_owner(kind))
    yield side
    side.agent.close()
    side.owner.stop()


between_processes = pytest.mark.parametrize("kind", BETWEEN_PROCESSES, indirect=True)


# -- moving bytes


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


# -- notifications


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


# -- handles


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


# -- memory


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


# -- peers


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


# -- fence and close


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


def test_an_unknown_transport_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="no transport 'pigeon'; there are auto, nixl, inproc, "):
        create_agent("me", "pigeon")


def test_every_transport_provides_an_agent(side: Side) -> None:
    assert isinstance(side.agent, Agent)
    assert side.agent.num_refused == 0
