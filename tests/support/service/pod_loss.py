"""Remove pods of a service, and measure how fast they are replaced.

For the end-to-end tests of pod loss and of rolling updates.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton_operator.observe.observation import is_ready
from support.service.local_cluster import LocalClusterUnderTest
from support.waiting import eventually

#: A pod drains, and another one imports torch and loads a model, under load on two cores.
REPLACED_S = 120.0


@dataclass
class Loss:
    """How fast one pod was replaced. All times are in seconds since its removal."""

    pod: str
    #: Time until the pod does not exist.
    gone_s: float | None = None
    #: Time until another pod exists.
    made_s: float | None = None
    #: Time until as many pods as before are ready.
    short_s: float | None = None

    def __str__(self) -> str:
        return (
            f"{self.pod}: gone after {self.gone_s:.1f} s, replaced after {self.made_s:.1f} s, "
            f"ready after {self.short_s:.1f} s"
        )


def uids(cluster: LocalClusterUnderTest, service: str, role: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in cluster.pods(service, role)}


def delete_pod(cluster: LocalClusterUnderTest, service: str, role: str, *flags: str) -> Loss:
    """Delete one pod of the role with `kubectl delete` and `flags`. Wait as `lose_pod()` does."""
    return lose_pod(
        cluster,
        service,
        role,
        lambda pod: cluster.kubectl("delete", "pod", pod, "--wait=false", *flags),
    )


def lose_pod(
    cluster: LocalClusterUnderTest, service: str, role: str, take: Callable[[str], object]
) -> Loss:
    """Remove one pod of the role by `take`, and wait until its replacement is ready.

    Check that no other pod is removed.
    """
    before = cluster.pods(service, role)
    known = {pod["metadata"]["uid"] for pod in before}
    victim = before[0]["metadata"]
    loss = Loss(victim["name"])
    began = time.monotonic()
    take(victim["name"])

    def is_complete() -> bool:
        pods: list[dict[str, Any]] = cluster.pods(service, role)
        passed = time.monotonic() - began
        now = {pod["metadata"]["uid"] for pod in pods}
        assert known - now <= {victim["uid"]}, f"other pods were removed: {known - now}"
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

    eventually(
        is_complete, timeout_s=REPLACED_S, what=f"another pod instead of {loss.pod}", every_s=0.3
    )
    return loss
