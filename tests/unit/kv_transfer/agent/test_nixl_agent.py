"""The nixl transport: details of the library, and transfers with plain NIXL programs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import numpy as np
import pytest

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
from baton_kv_transfer.memory.slot_memory import HostMemory
from baton_kv_transfer.transfer_connector import TransferConnector
from baton_protocol.options.config import KVRole, KVTransferConfig
from support.kv_transfer.kv_processes import HOST, LAYOUT, chain_hash
from support.kv_transfer.plain_nixl import PlainProgram
from support.waiting import eventually


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


def test_nixl_is_imported_on_demand_and_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    create_agent("me", "inproc").close()
    with pytest.raises(ValueError, match=r"pip install 'baton\[nixl\]' \(package nixl-cu12\)"):
        create_agent("me", "nixl")


def test_nixl_does_not_change_this_programs_logging(capfd: pytest.CaptureFixture[str]) -> None:
    before = logging.raiseExceptions
    create_agent("me", "nixl").close()
    assert logging.raiseExceptions == before
    assert capfd.readouterr().out == ""


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
