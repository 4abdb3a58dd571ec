"""The listening sockets of UCX workers, and the files that a closed worker leaves open."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton_kv_transfer.agent.agent_factory import create_agent
from baton_kv_transfer.transports.ucx import ucx_worker
from support.kv_transfer.transport_rig import HOST, open_and_close
from support.kv_transfer.ucx_rig import UCXTransportHere


def test_workers_that_start_together_find_their_own_listening_sockets() -> None:
    start = threading.Barrier(2)
    contexts = [ucx_worker.UCXContext(HOST) for _ in range(2)]

    def create(context: ucx_worker.UCXContext) -> ucx_worker.UCXWorker:
        start.wait()
        return context.create_worker()

    with ThreadPoolExecutor(2) as pool:
        for _ in range(10):
            first, second = pool.map(create, contexts)
            first.destroy()
            assert second.is_listening
            second.destroy()
            assert not second.is_listening


def test_a_closed_transport_leaves_no_file_open() -> None:
    num_open = 0
    for attempt in range(4):
        open_and_close(UCXTransportHere)
        # UCX keeps some files open for the process.
        num_open = num_open or len(os.listdir("/proc/self/fd"))
        assert len(os.listdir("/proc/self/fd")) <= num_open, attempt


def test_ucx_listens_only_on_the_hosts_device() -> None:
    assert ucx_worker.find_devices("127.0.0.1").split(",")[0] == "lo"
    with pytest.raises(OSError, match=r"cannot be served at 203\.0\.113\.7"):
        create_agent("me", "ucx", "203.0.113.7")


def test_a_host_may_be_a_secondary_address_of_a_device() -> None:
    script = f"""ip link set lo up && ip addr add 198.18.0.2/32 dev lo && {sys.executable} -c '
from baton_kv_transfer.agent import transport_agent
from baton_kv_transfer.agent.agent import INIT_AGENT
from baton_kv_transfer.agent.agent_factory import create_agent
create_agent("me", "ucx", "198.18.0.2").close()
print("served")'"""
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", script], capture_output=True, text=True, timeout=60
    )
    if "Operation not permitted" in done.stderr:
        pytest.skip("needs the right to make a network namespace")
    assert done.stdout == "served\n", done.stderr
