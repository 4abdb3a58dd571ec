"""The cgroups (control groups) of this process, by which Kubernetes limits a container."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")


def cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroups and of their parent groups.

    Args:
        root: folder that contains the file systems `proc` and `sys`.
        controller: name of the cgroup controller, `cpu` or `memory`.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for mount in (
            (f"sys/fs/cgroup/{controller}", "sys/fs/cgroup/cpu,cpuacct")
            if controllers
            else ("sys/fs/cgroup",)
        ):
            own = root / mount / path.lstrip("/")
            yield from (own, *own.parents[: len(Path(path).parts) - 1])


def memory_limit(root: Path = ROOT) -> int | None:
    """Return the memory limit of this process in bytes. None: no limit.

    The result is the lowest limit of the process's own cgroup and all parent groups.
    """
    limits = []
    for group in cgroups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # versions 2 and 1
            with suppress(OSError, ValueError):  # "max" is not a number
                limits.append(int((group / name).read_text()))
    return min(limits, default=None)
