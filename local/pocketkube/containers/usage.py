"""Read the CPU time and the memory of containers and of this machine from /proc."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from pocketkube.containers.process import container_processes

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class ResourceUsage:
    """CPU time since the start of the processes or the machine, and memory that is in use now."""

    cpu_s: float = 0.0
    memory_bytes: int = 0

    def __add__(self, other: ResourceUsage) -> ResourceUsage:
        return ResourceUsage(self.cpu_s + other.cpu_s, self.memory_bytes + other.memory_bytes)


def container_usage() -> dict[str, ResourceUsage]:
    """Return the usage of each container, by the container id that the pod's status shows.

    The usage is the sum over the container's running processes. Memory is resident memory, and a
    page that several processes share counts for each of them.
    """
    found: dict[str, ResourceUsage] = {}
    for pid, container_id, _ in container_processes():
        with contextlib.suppress(OSError):  # the process has ended
            # The command's name may contain any byte. Field 3 follows the last parenthesis.
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            utime, stime, resident = (int(fields[number - 3]) for number in (14, 15, 24))
            usage = ResourceUsage((utime + stime) / _TICKS_PER_S, resident * _PAGE_BYTES)
            found[container_id] = found.get(container_id, ResourceUsage()) + usage
    return found


def machine_usage() -> ResourceUsage:
    """Return the CPU time of all CPUs since the boot, and the memory in use (total - available)."""
    cpu = Path("/proc/stat").read_text().partition("\n")[0].split()
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(text) for text in cpu[1:9])
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    memory = {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines}
    return ResourceUsage(
        (user + nice + system + irq + softirq + steal) / _TICKS_PER_S,
        memory["MemTotal"] - memory["MemAvailable"],
    )
