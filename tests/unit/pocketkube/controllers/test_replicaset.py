"""The ReplicaSet controller creates, deletes and owns pods."""

from datetime import UTC, datetime
from typing import Any

from baton_kube.client import Object
from pocketkube.controllers.deployment import plan_deployment
from pocketkube.controllers.replicaset import plan_replica_set, pod_of
from support.pocketkube.deployments import deployment

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def pod(
    name: str, *, ready: bool = True, node: str = "n", phase: str = "Running", **metadata: Any
) -> Object:
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {
        "metadata": {"name": name, "creationTimestamp": "2026-01-01T00:00:00Z", **metadata},
        "spec": {"nodeName": node},
        "status": {"phase": phase, "conditions": conditions},
    }


def test_a_replica_set_creates_missing_pods_and_deletes_unready_ones_first() -> None:
    replica_set = {
        "metadata": {"name": "web-1", "uid": "r", "generation": 2},
        "spec": {"replicas": 2},
    }
    gone = [pod("f", phase="Failed"), pod("t", deletionTimestamp="2026-01-01T00:00:00Z")]
    assert plan_replica_set(replica_set, [*gone, pod("a")]).create == 1
    plan = plan_replica_set(
        replica_set,
        [
            pod("ready"),
            pod("unready", ready=False),
            pod("pending", ready=False, node=""),
            pod("also"),
        ],
    )
    assert plan.delete == ["pending", "unready"]
    assert plan.status["readyReplicas"] == 2
    assert plan.status["observedGeneration"] == 2


def test_a_pod_of_a_replica_set_is_owned_by_it() -> None:
    owner = deployment()
    created = plan_deployment(owner, [], NOW).create
    created["metadata"]["uid"] = "r1"
    made = pod_of(created)
    assert made["metadata"]["ownerReferences"][0]["uid"] == "r1"
    assert made["metadata"]["labels"].items() >= created["spec"]["selector"]["matchLabels"].items()
