"""Copies from the memory of another process, and the errors of withdrawn memory."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from baton_kv_transfer.transports.iovec import pack, pack_run
from baton_kv_transfer.transports.shm import cross_memory
from baton_kv_transfer.transports.shm.cross_memory import BatchedCopy, PeerProcess, ProcessNonce
from baton_kv_transfer.transports.transfer import CopyError
from support.kv_transfer.transport_rig import rows


def here(nonce: ProcessNonce) -> PeerProcess:
    return PeerProcess(os.getpid(), nonce.address, nonce.value)


def test_long_and_many_runs_are_copied_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_memory, "MAX_COPY_BYTES", 1000 * 8)
    source, target, nonce = np.arange(100_000), np.zeros(100_000, dtype=np.int64), ProcessNonce()
    runs = [
        (0, 2500),
        (2500, 1),
        (5000, 1000),
        (7000, 40_001),
        *[(50_000 + 2 * i, 1) for i in range(2000)],
    ]
    copy = BatchedCopy(here(nonce), pack(rows(target, *runs)), pack(rows(source, *runs)))
    num_steps = 0
    while not copy.is_done:
        copy.step()
        num_steps += 1
    expected = np.zeros_like(target)
    for first, count in runs:
        expected[first : first + count] = source[first : first + count]
    np.testing.assert_array_equal(target, expected)
    assert copy.nbytes == sum(count for _, count in runs) * 8
    assert num_steps >= 46


def test_withdrawn_and_invalid_memory_is_an_error() -> None:
    source, target, nonce = np.arange(8), np.zeros(8, dtype=np.int64), ProcessNonce()
    process = here(nonce)
    nowhere = pack_run(8, 64)
    with pytest.raises(CopyError, match="does not have all of that memory"):
        BatchedCopy(process, pack(rows(target, (0, 8))), nowhere).step()
    nonce.clear()
    with pytest.raises(CopyError, match="withdrew"):
        BatchedCopy(process, pack(rows(target, (0, 8))), pack(rows(source, (0, 8)))).step()
    process.close()
    with pytest.raises(CopyError, match="not read any more"):
        BatchedCopy(process, pack(rows(target, (0, 8))), pack(rows(source, (0, 8)))).step()


def test_a_dead_process_or_another_one_with_its_pid_is_detected() -> None:
    nonce = ProcessNonce()
    with pytest.raises(CopyError, match="another process"):
        PeerProcess(os.getpid(), nonce.address, b"x" * 16)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with pytest.raises(CopyError):  # another process reuses the pid
        PeerProcess(child.pid, nonce.address, nonce.value)
    child.communicate()
    with pytest.raises(ProcessLookupError):
        PeerProcess(child.pid, nonce.address, nonce.value)
