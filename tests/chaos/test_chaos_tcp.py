"""The transport over TCP when the other host falls silent: what is under way ends in time, and the next use after it is back goes well.

Needs root; elsewhere the tests are skipped.
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
from baton_kv_transfer.agent.create import create_agent
from baton_kv_transfer.transports.tcp.tcp_server import SILENT_S
from support.chaos.namespaces import Namespaces, namespaces
from support.waiting import eventually

pytestmark = pytest.mark.chaos
SMALL, LARGE = 2**16, 2**26
MARGIN_S = 5.0
"""The kernel gives up at its next probe or retransmission."""


class Apart:
    """An agent here, and an owner of memory in a namespace."""

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
        assert self.owner.stdout is not None
        hello = json.loads(self.owner.stdout.readline())
        self._base = hello["address"]
        self._words = np.zeros(LARGE // 8, dtype=np.int64)
        self._agent = create_agent("me", "tcp", net.host)
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
                what="an end of the transfer",
            )
        )

    def is_under_way(self, handle: XferHandle) -> bool:
        return self._agent.check_xfer_state(handle) == "PROC"

    def close(self) -> None:
        self._agent.close()
        self.owner.send_signal(signal.SIGCONT)
        assert self.owner.stdin is not None
        self.owner.stdin.close()
        self.owner.wait(10)


@pytest.fixture
def apart() -> Iterator[Apart]:
    with namespaces(1, {}) as net:
        made = Apart(net)
        yield made
        made.close()


@pytest.mark.parametrize(("op", "num_bytes"), [("READ", SMALL), ("WRITE", SMALL), ("WRITE", LARGE)])
def test_a_host_that_falls_silent_ends_what_is_under_way(
    apart: Apart, op: str, num_bytes: int
) -> None:
    apart.net.cut(0)
    assert apart.outcome(apart.begin(op, num_bytes)) == "ERR"
    apart.net.heal()
    assert apart.outcome(apart.begin(op, num_bytes)) == "DONE"


def test_a_read_whose_owner_had_nothing_to_send_notices_the_silence(apart: Apart) -> None:
    """Only the kernel's own probes can: no byte of ours is on the way."""
    apart.owner.send_signal(signal.SIGSTOP)
    handle = apart.begin("READ", SMALL)
    time.sleep(1.0)  # the request is acknowledged by the frozen process's kernel
    assert apart.is_under_way(handle)
    apart.net.cut(0)
    assert apart.outcome(handle) == "ERR"
    apart.net.heal()
    apart.owner.send_signal(signal.SIGCONT)
    assert apart.outcome(apart.begin("READ", SMALL)) == "DONE"


def test_a_host_that_takes_no_bytes_is_silent_too(apart: Apart) -> None:
    apart.owner.send_signal(signal.SIGSTOP)
    assert apart.outcome(apart.begin("WRITE", LARGE)) == "ERR"
    apart.owner.send_signal(signal.SIGCONT)
    assert apart.outcome(apart.begin("READ", SMALL)) == "DONE"
