"""The available memory of the machine and of the cgroup."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from baton_engine.worker.memory import host_memory
from baton_engine.worker.memory.host_memory import available_host_memory


def test_available_memory_is_the_least_of_the_machine_and_the_cgroup_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = SimpleNamespace(available=4000 * 1024)
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: machine)
    group = tmp_path / "sys/fs/cgroup"
    for folder in (group, tmp_path / "proc/self"):
        folder.mkdir(parents=True)
    assert available_host_memory(tmp_path) == 4000 * 1024
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (group / "memory.max").write_text("1000000\n")
    (group / "memory.current").write_text("700000\n")
    (group / "memory.stat").write_text("anon 400000\nfile 250000\nshmem 50000\n")
    assert available_host_memory(tmp_path) == 1000000 - 700000 + 200000
    (group / "memory.max").write_text("max\n")
    assert available_host_memory(tmp_path) == 4000 * 1024


@pytest.mark.parametrize("is_visible", [True, False], ids=["own group", "mounted group"])
def test_available_memory_follows_the_limit_of_a_cgroup_of_version_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_visible: bool
) -> None:
    machine = SimpleNamespace(available=4000 * 1024)
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: machine)
    mounted = tmp_path / "sys/fs/cgroup/memory"
    group = mounted / "kubepods/x" if is_visible else mounted
    for folder in (group, tmp_path / "proc/self"):
        folder.mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/kubepods/x\n0::/\n")
    (group / "memory.limit_in_bytes").write_text("1000000\n")
    (group / "memory.usage_in_bytes").write_text("700000\n")
    (group / "memory.stat").write_text("cache 1\nshmem 2\ntotal_cache 250000\ntotal_shmem 50000\n")
    assert available_host_memory(tmp_path) == 1000000 - 700000 + 200000
    (group / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # no limit
    assert available_host_memory(tmp_path) == 4000 * 1024
