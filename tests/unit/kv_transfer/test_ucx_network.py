"""UCX while the network is away: a fence destroys all connections and has to be able to make new ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from agent_processes import emulate_network_access
from kv_processes import wait_for

from baton_kv_transfer.agent import Agent, create_agent
from baton_kv_transfer.transports import ucx_progress
from baton_kv_transfer.transports.libucp import UCXError


class Network:
    """Makes the next workers of an agent fail as they do without a device."""

    def __init__(self, agent: Any) -> None:
        self._context = agent._transport._ucx._context
        self._create = self._context.create_worker
        self._context.create_worker = self._create_worker
        self.failures_left = 0.0

    def _create_worker(self) -> Any:
        if self.failures_left > 0:
            self.failures_left -= 1
            raise UCXError("ucp_worker_create: No such device")
        return self._create()


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """Over UCX: as with a network that accesses memory, without the lane between processes of one host."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    emulate_network_access(monkeypatch.setattr)
    agent = create_agent("alone", "ucx")
    yield agent
    agent.close()


def copy_to_itself(agent: Agent) -> str:
    """The state in which a transfer within the agent's own memory ends."""
    words = np.arange(16, dtype=np.int64)
    registered = agent.register_memory([(words.ctypes.data, words.nbytes, 0, "")])
    source, target = ([(words.ctypes.data + offset, 64, 0)] for offset in (0, 64))
    handle = agent.initialize_xfer("READ", agent.get_xfer_descs(target), agent.get_xfer_descs(source), "alone")
    agent.transfer(handle)
    state: str = wait_for("the end of the transfer", lambda: (s := agent.check_xfer_state(handle)) != "PROC" and s)
    if state == "DONE":
        assert words[8:].tolist() == words[:8].tolist()
        agent.deregister_memory(registered)
    return state


def test_a_fence_waits_until_the_network_is_back(agent: Agent) -> None:
    network = Network(agent)
    network.failures_left = 1
    agent.fence()
    assert network.failures_left == 0
    assert copy_to_itself(agent) == "DONE"


def test_without_a_network_the_fence_says_so_and_the_agent_ends_without_a_crash(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ucx_progress, "NETWORK_TIMEOUT_S", 0.0)
    Network(agent).failures_left = float("inf")
    with pytest.raises(UCXError, match="No such device"):
        agent.fence()
    with pytest.raises(RuntimeError, match=r"closed|network"):
        copy_to_itself(agent)
