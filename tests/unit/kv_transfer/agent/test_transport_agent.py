"""Failures of our own agents that NIXL does not have."""

from __future__ import annotations

import msgspec
import pytest

from baton_kv_transfer.agent.transport_agent import TransportAgent
from support.kv_transfer.agent_processes import OwnerProcess, Side
from support.waiting import eventually


@pytest.mark.parametrize("kind", ["ucx", "tcp", "shm"])
def test_after_a_defect_the_agent_reports_failure_and_its_transfers_end(kind: str) -> None:
    side = Side(kind, OwnerProcess(kind))
    try:
        handle = side.make("READ", [0], [1])
        assert side.agent.failure == ""

        def broken() -> None:
            raise RuntimeError("a defect")

        side.agent._thread.commands.submit(broken)
        eventually(lambda: "a defect" in side.agent.failure, "the failure")
        eventually(lambda: side.agent._thread.commands.closed, "the end of the thread")
        assert side.agent.transfer(handle) == "ERR"
        side.agent.release_xfer_handle(handle)
    finally:
        side.agent.close()
        side.owner.stop()


def test_metadata_with_a_malformed_address_adds_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, agent = TransportAgent("owner", "tcp"), TransportAgent("me", "tcp")
    try:
        address = msgspec.msgpack.encode({"tcp": b"no address"})
        monkeypatch.setattr(owner, "_address", lambda: address)
        with pytest.raises(ValueError, match="cannot decode"):
            agent.add_remote_agent(owner.get_agent_metadata())
        with pytest.raises(LookupError, match="owner"):
            agent.prep_xfer_dlist("owner", [(4096, 1, 0)])
    finally:
        agent.close()
        owner.close()
