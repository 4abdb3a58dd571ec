"""The memory limit of a container, from the files of both versions of cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_protocol.process.cgroups import memory_limit


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("own", "above", "limit"),
    [("max", "max", None), ("4096", "max", 4096), ("max", "8192", 8192), ("4096", "1024", 1024)],
)
def test_the_lowest_limit_of_the_group_and_its_parents_applies(
    tmp_path: Path, own: str, above: str, limit: int | None
) -> None:
    group = "sys/fs/cgroup/pods"
    files = {f"{group}/this/memory.max": own, f"{group}/memory.max": above}
    write(tmp_path, {"proc/self/cgroup": "0::/pods/this"} | files)
    assert memory_limit(tmp_path) == limit


def test_the_limit_of_version_1_is_read_at_the_root_of_a_container(tmp_path: Path) -> None:
    """The files of a container's own group are at the root of the mount."""
    file = "sys/fs/cgroup/memory/memory.limit_in_bytes"
    write(tmp_path, {"proc/self/cgroup": "4:memory:/kubepods/pod1/x\n0::/", file: "65536"})
    assert memory_limit(tmp_path) == 65536


def test_without_cgroups_there_is_no_limit(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None
