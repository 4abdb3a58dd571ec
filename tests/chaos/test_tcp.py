"""The TCP transport ends transfers to a silent host, and works again after the host is back.

The tests need root, and are skipped without it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from baton_kv_transfer.agent.agent import XferHandle
from baton_kv_transfer.agent.agent_factory import create_agent
from baton_kv_transfer.transports.tcp.tcp_server import SILENT_S
from support.chaos.namespaces import Namespaces, namespaces
from support.waiting import eventually, suspend

pytestmark = pytest.mark.chaos
SMALL, LARGE = 2**16, 2**26
MARGIN_S = 5.0  # the kernel gives up at its next probe or retransmission


class Peers:
    """An agent in this process, and a memory owner in another network namespace."""

    def __init__(self, net: Namespaces) -> None:
        self.net = net
        network = net.networks[0]
        self.owner = subprocess.Popen(
            [
                *network.command,
                sys.executable,
                "-m",
                "support.kv_transfer.memory_owner",
                "tcp",
                network.address,
                str(LARGE),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
            },
        )
        hello = json.loads(self.owner.stdout.readline())
        self._base = hello["address"]
        self._words = np.zeros(LARGE // 8, dtype=np.int64)
        self._agent = create_agent("local", "tcp", net.host)
        self._agent.register_memory([(self._words.ctypes.data, LARGE, 0, "")])
        self._agent.add_remote_agent(bytes.fromhex(hello["metadata"]))
        assert self.outcome(self.begin("READ", SMALL)) == "DONE"

    def begin(self, op: str, num_bytes: int) -> XferHandle:
        local = self._agent.get_xfer_descs([(self._words.ctypes.data, num_bytes, 0)])
        remote = self._agent.get_xfer_descs([(self._base, num_bytes, 0)])
        handle = self._agent.initialize_xfer(op, local, remote, "owner")
        self._agent.transfer(handle)
        return handle

    def outcome(self, handle: XferHandle) -> str:
        return str(
            eventually(
                lambda: (
                    state if (state := self._agent.check_xfer_state(handle)) != "PROC" else None
                ),
                timeout_s=SILENT_S + MARGIN_S,
                what="the end of the transfer",
            )
        )

    def is_in_progress(self, handle: XferHandle) -> bool:
        return self._agent.check_xfer_state(handle) == "PROC"

    def close(self) -> None:
        self._agent.close()
        self.owner.send_signal(signal.SIGCONT)
        self.owner.stdin.close()
        self.owner.wait(10)


@pytest.fixture
def peers() -> Iterator[Peers]:
    with namespaces(1, {}) as net:
        made = Peers(net)
        yield made
        made.close()


@pytest.mark.parametrize(("op", "num_bytes"), [("READ", SMALL), ("WRITE", SMALL), ("WRITE", LARGE)])
def test_transfers_to_a_silent_host_fail(peers: Peers, op: str, num_bytes: int) -> None:
    peers.net.cut(0)
    assert peers.outcome(peers.begin(op, num_bytes)) == "ERR"
    peers.net.heal()
    assert peers.outcome(peers.begin(op, num_bytes)) == "DONE"


def test_a_read_from_a_frozen_owner_fails_when_its_host_is_silent(peers: Peers) -> None:
    """No data is in flight, so only the kernel's keepalive probes detect it."""
    suspend(peers.owner.pid)
    handle = peers.begin("READ", SMALL)
    time.sleep(1.0)  # the kernel of the frozen process acknowledges the request
    assert peers.is_in_progress(handle)
    peers.net.cut(0)
    assert peers.outcome(handle) == "ERR"
    peers.net.heal()
    peers.owner.send_signal(signal.SIGCONT)
    assert peers.outcome(peers.begin("READ", SMALL)) == "DONE"


def test_a_write_to_a_host_that_reads_no_bytes_fails(peers: Peers) -> None:
    suspend(peers.owner.pid)
    assert peers.outcome(peers.begin("WRITE", LARGE)) == "ERR"
    peers.owner.send_signal(signal.SIGCONT)
    assert peers.outcome(peers.begin("READ", SMALL)) == "DONE"
