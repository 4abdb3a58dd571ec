"""Measure the node and its containers, for `kubectl top`. The format is that of a kubelet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from baton_kube.client import Object
from pocketkube.containers.usage import ResourceUsage, container_usage, machine_usage
from pocketkube.kubelet.pod_worker import PodWorker
from pocketkube.timestamps import timestamp

#: Time over which the CPU usage is measured.
WINDOW_S = 1.0


async def measure(node_name: str, workers: Iterable[PodWorker]) -> Object:
    """Measure CPU use for `WINDOW_S`. Return CPU and memory use of the node and its containers."""
    started = time.monotonic()
    machine, containers = machine_usage(), await asyncio.to_thread(container_usage)
    await asyncio.sleep(WINDOW_S)
    elapsed_s = time.monotonic() - started
    machine_now, now = machine_usage(), await asyncio.to_thread(container_usage)
    pods = []
    for worker in workers:
        measured = [
            {"name": name, **_usage(containers[found], now[found], elapsed_s)}
            for name, state in worker.runtime.main.items()
            if (found := state.container_id) in containers and found in now
        ]
        if measured:
            metadata = worker.pod["metadata"]
            reference = {key: metadata[key] for key in ("name", "namespace", "uid")}
            pods.append({"podRef": reference, "containers": measured})
    node = {"nodeName": node_name, **_usage(machine, machine_now, elapsed_s)}
    return {"node": node, "pods": pods}


def _usage(before: ResourceUsage, after: ResourceUsage, elapsed_s: float) -> Object:
    # max(): `after` lacks the CPU time of processes that have ended, and may be less than `before`.
    nanocores = max(after.cpu_s - before.cpu_s, 0.0) / elapsed_s * 1e9
    now = timestamp()
    return {
        "cpu": {"time": now, "usageNanoCores": round(nanocores)},
        "memory": {"time": now, "workingSetBytes": after.memory_bytes},
    }
