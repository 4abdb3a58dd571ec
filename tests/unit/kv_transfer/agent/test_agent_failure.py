"""An agent whose transport thread ends by a defect. NIXL has no counterpart."""

from __future__ import annotations

import pytest

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

        side.agent._thread.mailbox.submit(broken)
        eventually(lambda: "a defect" in side.agent.failure, "the failure")
        eventually(lambda: side.agent._thread.mailbox.closed, "the end of the thread")
        assert side.agent.transfer(handle) == "ERR"
        side.agent.release_xfer_handle(handle)
    finally:
        side.agent.close()
        side.owner.stop()
