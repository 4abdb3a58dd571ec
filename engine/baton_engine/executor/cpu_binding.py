"""Assigns the CPU cores of a host to workers, and chooses the CPUs to which workers are bound.

The CPUs that this process may use are divided by physical core and NUMA node, as listed in /sys. If
/sys has no such list, there is one node, and every CPU counts as a core.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from baton_protocol.options.config import EngineConfig
from baton_protocol.process.cgroups import ROOT, cgroups


class Core(NamedTuple):
    """A physical core."""

    #: NUMA node.
    node: int
    #: CPUs (hardware threads) of the core, ascending: one, or two that share arithmetic units.
    cpus: tuple[int, ...]


class WorkerCores(NamedTuple):
    """The CPUs and the number of threads of one worker."""

    cpus: frozenset[int]
    #: One per core, because two threads on one core would wait for each other. Fewer under a CPU
    #: limit.
    num_threads: int


def assign_cores(
    cores: Sequence[Core], num_ranks: int, cpu_limit: float | None = None
) -> list[WorkerCores]:
    """Divide the cores among the ranks. Every rank gets the same number of cores.

    - Fewer cores than ranks: every rank gets all cores.
    - At least as many ranks as NUMA nodes: all cores of a rank are on one node. Some cores may stay
      unused.
    - Fewer ranks than NUMA nodes: each rank gets consecutive cores, in the order of the nodes.

    Args:
        cores: at least one.
        num_ranks: at least 1.
        cpu_limit: CPU time for all ranks together, in CPUs. The limit reduces `num_threads`. None:
            no limit.

    Returns:
        One entry per rank.
    """
    nodes = [list(own) for _, own in groupby(sorted(cores), lambda core: core.node)]
    share = len(cores) // num_ranks
    if num_ranks >= len(nodes):
        while share and sum(len(node) // share for node in nodes) < num_ranks:
            share -= 1
        runs = [
            node[start : start + share] for node in nodes for start in _starts(len(node), share)
        ]
    else:
        in_order = [core for node in nodes for core in node]
        runs = [in_order[start : start + share] for start in _starts(len(in_order), share)]
    most = max(1, share if cpu_limit is None else min(share, math.floor(cpu_limit / num_ranks)))
    if not share:
        runs = [list(cores)] * num_ranks
    return [
        WorkerCores(frozenset(cpu for core in run for cpu in core.cpus), most)
        for run in runs[:num_ranks]
    ]


def assign_usable_cores(num_ranks: int) -> list[WorkerCores]:
    """Divide the CPUs that this process may use. Return one entry per rank."""
    return assign_cores(usable_cores(os.sched_getaffinity(0)), num_ranks, cpu_limit())


def bindings(config: EngineConfig, num_ranks: int, root: Path = ROOT) -> list[frozenset[int]]:
    """Return the CPUs to which each worker process is bound. An empty set means not bound.

    Workers are bound if all of these conditions hold:

    - `config.bind_threads` is set.
    - There is more than one worker.
    - `config.device` is cpu, or is auto on a host without an NVIDIA driver.
    - Each worker has at least one CPU per thread.
    """
    on_cpu = config.device == "cpu" or (
        config.device == "auto" and not (root / "proc/driver/nvidia").exists()
    )
    workers = assign_usable_cores(num_ranks)
    enough = config.num_threads is None or config.num_threads <= len(workers[0].cpus)
    if not (config.bind_threads and on_cpu and enough and num_ranks > 1):
        return [frozenset()] * num_ranks
    return [worker.cpus for worker in workers]


def usable_cores(cpus: set[int], root: Path = ROOT) -> list[Core]:
    """Return the physical cores of `cpus`, as listed in /sys.

    Hardware threads that are not in `cpus` are left out.
    """
    system = root / "sys/devices/system"
    node_of: dict[int, int] = {}
    for folder in sorted(system.glob("node/node[0-9]*")):
        for cpu in _read_cpu_list(folder / "cpulist"):
            node_of[cpu] = int(folder.name.removeprefix("node"))
    cores = set()
    for cpu in cpus:
        siblings = _read_cpu_list(system / f"cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(Core(node_of.get(cpu, 0), tuple(sorted({cpu, *siblings} & cpus))))
    return sorted(cores)


def cpu_limit(root: Path = ROOT) -> float | None:
    """Return the CPU limit of this process's cgroups, in CPUs. None: no limit.

    The result is the lowest limit of the process's own cgroup and its ancestors.
    """
    limits = []
    for folder in cgroups(root, "cpu"):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:  # version 1
                quota, period = (
                    (folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
                )
            if quota != "max" and int(quota) > 0:
                limits.append(int(quota) / int(period))
    return min(limits, default=None)


def _read_cpu_list(path: Path) -> list[int]:
    """Read a file with a list of CPUs in Linux's format, such as "0-3,8,10-11".

    Returns:
        The CPUs, or an empty list if the file cannot be read.
    """
    try:
        parts = [part.split("-") for part in path.read_text().strip().split(",") if part]
        return [cpu for part in parts for cpu in range(int(part[0]), int(part[-1]) + 1)]
    except (OSError, ValueError):
        return []


def _starts(length: int, share: int) -> range:
    """Return the start index of each full group of `share` entries in a list of `length`."""
    return range(0, length - share + 1, share) if share else range(0)
