"""Pods of a service that somebody else deletes: who is gone, who came instead, and for how long the service was short of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton_operator.observe.observation import is_ready
from support.service.local_cluster import LocalClusterUnderTest
from support.waiting import eventually

REPLACED_S = 120.0
"""A pod drains, another one imports torch and loads, beside a load on two cores."""


@dataclass
class Loss:
    """What became of one pod, in seconds after its deletion."""

    pod: str
    gone_s: float | None = None
    """The API server has forgotten it."""
    made_s: float | None = None
    """Another pod exists."""
    short_s: float | None = None
    """As many pods as before are ready."""

    def __str__(self) -> str:
        return f"{self.pod}: gone after {self.gone_s:.1f} s, replaced after {self.made_s:.1f} s, short for {self.short_s:.1f} s"


def uids(cluster: LocalClusterUnderTest, service: str, role: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in cluster.pods(service, role)}


def delete_pod(cluster: LocalClusterUnderTest, service: str, role: str, *flags: str) -> Loss:
    """Deletes one pod of the role and waits for another; no other pod may go. `flags`: of `kubectl delete`."""
    return lose_pod(
        cluster,
        service,
        role,
        lambda pod: cluster.kubectl("delete", "pod", pod, "--wait=false", *flags),
    )


def lose_pod(
    cluster: LocalClusterUnderTest, service: str, role: str, take: Callable[[str], object]
) -> Loss:
    """Has `take` remove one pod of the role, by name, and waits until another serves instead; no other pod may go."""
    before = cluster.pods(service, role)
    known = {pod["metadata"]["uid"] for pod in before}
    victim = before[0]["metadata"]
    loss = Loss(victim["name"])
    began = time.monotonic()
    take(victim["name"])

    def whole() -> bool:
        pods: list[dict[str, Any]] = cluster.pods(service, role)
        passed = time.monotonic() - began
        now = {pod["metadata"]["uid"] for pod in pods}
        assert known - now <= {victim["uid"]}, (
            f"pods that nobody deleted are gone, too: {known - now}"
        )
        if loss.gone_s is None and victim["uid"] not in now:
            loss.gone_s = passed
        if loss.made_s is None and now - known:
            loss.made_s = passed
        ready = [pod["metadata"]["name"] for pod in pods if is_ready(pod)]
        if loss.short_s is None and now - known and len(ready) >= len(before):
            loss.short_s = passed
        assert len(ready) == len(pods) == len(before), (
            f"ready are {ready} of {[p['metadata']['name'] for p in pods]}"
        )
        return victim["uid"] not in now

    eventually(whole, timeout_s=REPLACED_S, what=f"another pod instead of {loss.pod}", every_s=0.3)
    return loss
