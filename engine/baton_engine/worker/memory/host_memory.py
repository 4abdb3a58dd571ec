"""Measures the host memory that this process can still allocate."""

from __future__ import annotations

from pathlib import Path

import psutil

from baton_engine.executor.placement import ROOT, control_groups


def available_host_memory(root: Path = ROOT) -> int:
    """Return the bytes that this process can still allocate without swapping or an OOM kill.

    The result is the minimum of the machine's available memory and the memory that the limits of
    the process's control groups (version 2) leave. Page cache counts as available, because the
    kernel reclaims page cache.
    """
    lefts = map(_left_in, control_groups(root, "memory"))
    return min([psutil.virtual_memory().available, *(left for left in lefts if left is not None)])


def _left_in(group: Path) -> int | None:
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    page_cache = int(stat.get("file", 0)) - int(stat.get("shmem", 0))
    return max(0, int(limit) - used + page_cache)
