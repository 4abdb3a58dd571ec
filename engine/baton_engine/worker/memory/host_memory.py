"""Measures the host memory that this process can still allocate."""

from __future__ import annotations

from pathlib import Path

import psutil

from baton_protocol.process.cgroups import ROOT, cgroups

#: Names in a cgroup of version 2 and 1: the files with the memory limit and with the memory
#: in use, and the fields of memory.stat for the page cache and for shared memory. The page cache
#: includes shared memory.
_VERSION_2 = ("memory.max", "memory.current", "file", "shmem")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem")


def available_host_memory(root: Path = ROOT) -> int:
    """Return the bytes that this process can still allocate without swapping or an OOM kill.

    The result is the minimum of the machine's available memory and the memory that the limits of
    the process's cgroups leave. Page cache counts as available, because the kernel reclaims
    page cache.
    """
    lefts = map(_left_in, cgroups(root, "memory"))
    return min([psutil.virtual_memory().available, *(left for left in lefts if left is not None)])


def _left_in(group: Path) -> int | None:
    is_version_1 = (group / _VERSION_1[0]).exists()
    limit_file, use_file, cache, shared = _VERSION_1 if is_version_1 else _VERSION_2
    try:
        limit = (group / limit_file).read_text().strip()
        if limit == "max":
            return None
        used = int((group / use_file).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    page_cache = int(stat.get(cache, 0)) - int(stat.get(shared, 0))
    return max(0, int(limit) - used + page_cache)
