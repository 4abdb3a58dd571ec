"""Conformance of the agent: the same NIXL semantics on every transport. ucx talks to an owner in another process."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from kv_processes import AgentHere, AgentProcess, wait_for

from baton_kv_transfer.agent import INIT_AGENT, Agent, DlistHandle, XferHandle
from baton_kv_transfer.transports.base import TransportError

NUM_BLOCKS, BLOCK_NBYTES = 32, 65536
BLOCK_WORDS = BLOCK_NBYTES // 8


class Side:
    """An agent with zeroed memory, and an owner whose memory counts up."""

    def __init__(self, agent: Agent, owner: AgentHere | AgentProcess) -> None:
        self.agent = agent
        self.owner = owner
        self.metadata, self.base = owner.hello
        self.words = np.zeros(NUM_BLOCKS * BLOCK_WORDS, dtype=np.int64)
        agent.register_memory([(self.words.ctypes.data, self.words.nbytes, 0, "kv")])
        assert agent.add_remote_agent(self.metadata) == "owner"
        self.local, self.remote = self.dlists()

    def rows(self, base: int) -> list[tuple[int, int, int]]:
        return [(base + i * BLOCK_NBYTES, BLOCK_NBYTES, 0) for i in range(NUM_BLOCKS)]

    def dlists(self) -> tuple[DlistHandle, DlistHandle]:
        local = self.agent.prep_xfer_dlist(INIT_AGENT, self.rows(self.words.ctypes.data))
        return local, self.agent.prep_xfer_dlist("owner", self.rows(self.base))

    def make(self, op: str, ours: list[int], theirs: list[int], notif: bytes = b"") -> XferHandle:
        return self.agent.make_prepped_xfer(op, self.local, ours, self.remote, theirs, notif)

    def run(self, handle: XferHandle) -> str:
        self.agent.transfer(handle)
        wait_for("end of the transfer", lambda: self.agent.check_xfer_state(handle) != "PROC")
        return self.agent.check_xfer_state(handle)

    def block(self, index: int) -> np.ndarray:
        return self.words[index * BLOCK_WORDS : (index + 1) * BLOCK_WORDS]


def counting(index: int) -> np.ndarray:
    return np.arange(index * BLOCK_WORDS, (index + 1) * BLOCK_WORDS)


@pytest.fixture(params=["inproc", "ucx"])
def side(request: pytest.FixtureRequest) -> Iterator[Side]:
    owner = (AgentProcess if request.param == "ucx" else AgentHere)(NUM_BLOCKS, BLOCK_NBYTES)
    agent = Agent("me", request.param)
    yield Side(agent, owner)
    agent.close()
    owner.stop()


def test_read_brings_exactly_the_chosen_blocks(side: Side) -> None:
    assert side.run(side.make("READ", [3, 0, 31], [7, 31, 0])) == "DONE"
    for mine, theirs in ((3, 7), (0, 31), (31, 0)):
        np.testing.assert_array_equal(side.block(mine), counting(theirs))
    assert not side.block(1).any()


@pytest.mark.parametrize("tls", ["tcp", "^cma"])
def test_ucx_works_where_only_some_of_its_transports_do(tls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    owner, agent = AgentProcess(NUM_BLOCKS, BLOCK_NBYTES, {"UCX_TLS": tls}), Agent("me", "ucx")
    side = Side(agent, owner)
    try:
        everything = list(range(NUM_BLOCKS))
        assert side.run(side.make("READ", everything, everything[::-1])) == "DONE"
        np.testing.assert_array_equal(side.block(0), counting(NUM_BLOCKS - 1))
        assert side.run(side.make("WRITE", [4], [5], b"written")) == "DONE"
    finally:
        agent.close()
        owner.stop()


def test_write_is_at_the_owner_when_done(side: Side) -> None:
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


def test_initialize_xfer_keeps_descriptors_as_they_are(side: Side) -> None:
    local = side.agent.get_xfer_descs(side.rows(side.words.ctypes.data)[:2])
    remote = side.agent.get_xfer_descs(side.rows(side.base)[:2])
    handle = side.agent.initialize_xfer("READ", local, remote, "owner")
    assert handle.num_descs == 2
    assert side.run(handle) == "DONE"
    np.testing.assert_array_equal(side.block(1), counting(1))


def test_a_notification_follows_its_transfer(side: Side) -> None:
    side.words[:] = 9
    side.agent.transfer(side.make("WRITE", [0], [0], b"done with 0"))
    notifs = wait_for("the notification", lambda: side.owner.call("new_notifs"))
    assert notifs == {"me": [b"done with 0"]}
    assert (side.owner.call("content")[:BLOCK_WORDS] == 9).all()


def test_notifications_of_their_own_arrive_in_order_and_whole(side: Side) -> None:
    messages = [b"first", b"x" * 20_000, b"third"]
    for message in messages:
        side.agent.send_notif("owner", message)
    received: list[bytes] = []

    def all_there() -> bool:
        received.extend(side.owner.call("new_notifs").get("me", []))
        return len(received) == len(messages)

    wait_for("three notifications", all_there)
    assert received == messages


def test_a_handle_is_posted_again_after_done_and_released_once(side: Side) -> None:
    handle = side.make("READ", [0], [1])
    assert side.run(handle) == "DONE"
    side.words[:] = 0
    assert side.run(handle) == "DONE"
    np.testing.assert_array_equal(side.block(0), counting(1))
    side.agent.release_xfer_handle(handle)
    with pytest.raises(ValueError, match="released"):
        side.agent.transfer(handle)


def test_a_released_list_makes_no_transfers_but_old_ones_stay(side: Side) -> None:
    handle = side.make("READ", [0], [1])
    side.agent.release_dlist_handle(side.remote)
    with pytest.raises(ValueError, match="released"):
        side.make("READ", [0], [1])
    assert side.run(handle) == "DONE"


@pytest.mark.parametrize("offset", [-8, NUM_BLOCKS * BLOCK_NBYTES - 8, 1 << 40])
def test_descriptors_outside_registered_memory_are_refused(side: Side, offset: int) -> None:
    for agent_name, base in ((INIT_AGENT, side.words.ctypes.data), ("owner", side.base)):
        with pytest.raises(ValueError, match="outside the memory"):
            side.agent.prep_xfer_dlist(agent_name, [(base + offset, 16, 0)])


def test_damaged_or_foreign_metadata_is_refused(side: Side) -> None:
    with pytest.raises(ValueError, match="damaged"):
        side.agent.add_remote_agent(side.metadata[:-1])
    with pytest.raises(ValueError, match="damaged"):
        side.agent.add_remote_agent(b"")


def test_a_dead_peer_is_err_and_the_agent_lives_on(side: Side) -> None:
    assert side.run(side.make("READ", [0], [0])) == "DONE"
    side.owner.kill()
    handle = side.make("READ", list(range(NUM_BLOCKS)), list(range(NUM_BLOCKS)))
    assert side.run(handle) == "ERR"
    assert handle.error
    side.agent.remove_remote_agent("owner")
    with pytest.raises(KeyError, match="add_remote_agent"):
        side.agent.prep_xfer_dlist("owner", side.rows(side.base))
    successor = AgentHere if isinstance(side.owner, AgentHere) else AgentProcess
    side.owner = successor(NUM_BLOCKS, BLOCK_NBYTES)
    try:
        side.metadata, side.base = side.owner.hello
        side.agent.add_remote_agent(side.metadata)
        side.local, side.remote = side.dlists()
        assert side.run(side.make("READ", [2], [3])) == "DONE"
        np.testing.assert_array_equal(side.block(2), counting(3))
    finally:
        side.owner.stop()


def test_a_peer_killed_in_the_middle_of_a_long_read() -> None:
    owner = AgentProcess(NUM_BLOCKS, BLOCK_NBYTES)
    agent = Agent("me", "ucx")
    side = Side(agent, owner)
    try:
        order = [i for _ in range(400) for i in range(NUM_BLOCKS)]  # 800 MiB
        handle = side.make("READ", order[::-1], order)
        agent.transfer(handle)
        with pytest.raises(TransportError, match="active"):
            agent.release_xfer_handle(handle)
        wait_for("first bytes", lambda: side.words.any() or agent.check_xfer_state(handle) != "PROC")
        owner.kill()
        wait_for("end of the transfer", lambda: agent.check_xfer_state(handle) != "PROC", timeout_s=10)
        assert agent.check_xfer_state(handle) == "ERR"
    finally:
        agent.close()
        owner.stop()


def test_removing_a_peer_aborts_its_transfers() -> None:
    owner = AgentProcess(NUM_BLOCKS, BLOCK_NBYTES)
    agent = Agent("me", "ucx")
    side = Side(agent, owner)
    try:
        order = [i for _ in range(400) for i in range(NUM_BLOCKS)]
        handle = side.make("READ", order[::-1], order)
        agent.transfer(handle)
        wait_for("first bytes", side.words.any)
        agent.remove_remote_agent("owner")
        wait_for("end of the transfer", lambda: agent.check_xfer_state(handle) != "PROC", timeout_s=10)
        assert "removed" in handle.error
        agent.add_remote_agent(side.metadata)
        side.local, side.remote = side.dlists()
        assert side.run(side.make("READ", [5], [6])) == "DONE"
        np.testing.assert_array_equal(side.block(5), counting(6))
    finally:
        agent.close()
        owner.stop()


def test_an_idle_agent_sleeps() -> None:
    agent = Agent("idle", "ucx")
    try:
        before, until = time.process_time(), time.monotonic() + 1.0
        while time.monotonic() < until:
            time.sleep(0.1)
        assert time.process_time() - before < 0.2
    finally:
        agent.close()
