"""A service with an expert-parallel decode group, from `kubectl apply` to `kubectl delete`.

The group grows, shrinks and loses a rank under streams, whose tokens stay correct. A run takes a
minute, so the real control plane is tested by `make elastic` only.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from baton_engine.random_checkpoint import create_checkpoint
from baton_protocol.topology import OperationPhase
from support.elastic.expert_group import SHAPE, VOCAB_SIZE
from support.load import under_load
from support.parity import reference_model
from support.service.expert_service import NAME, SCALED_S, ExpertService, service_of
from support.service.local_cluster import LocalClusterUnderTest, local_cluster
from support.waiting import eventually

STREAMS = 6
#: An idle service has nothing to drain.
GONE_S = 30.0


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "control_plane", ["embedded", pytest.param("real", marks=pytest.mark.chaos)]
)
async def test_a_group_grows_shrinks_and_loses_ranks_under_streams(
    control_plane: str, tmp_path: Path
) -> None:
    checkpoint = create_checkpoint(tmp_path / "moe", "qwen3_moe", **SHAPE)
    model = reference_model(checkpoint)
    with local_cluster(control_plane) as cluster:
        await asyncio.to_thread(cluster.up, service_of(checkpoint))
        service = ExpertService(cluster)
        await asyncio.to_thread(service.wait_at_rest, 0, 1)
        endpoint = cluster.get("llms", NAME)["status"]["endpoint"]
        async with under_load(endpoint, model, width=STREAMS, vocab_size=VOCAB_SIZE):
            await asyncio.to_thread(check_failing_operation, cluster, service, checkpoint)
            await asyncio.to_thread(grow_while_the_coordinator_dies, service)
            await asyncio.to_thread(shrink_while_the_coordinator_dies, service)
            await asyncio.to_thread(kill_a_rank, service)
        await asyncio.to_thread(check_deletion_of_an_idle_service, cluster)


def check_failing_operation(
    cluster: LocalClusterUnderTest, service: ExpertService, checkpoint: Path
) -> None:
    """Let an operation fail: the new pod reads another checkpoint than the ranks.

    The old topology must stay. Afterwards the checkpoint is restored and the pod's process is
    killed, so that it reads the checkpoint again.
    """
    before = service.recorded()
    config = (checkpoint / "config.json").read_bytes()
    (checkpoint / "config.json").write_bytes(config + b"\n")
    service.scale(3)
    failures: list[int] = []

    def failed_twice() -> bool:
        topology, scaling = service.recorded(), cluster.condition(NAME, "Scaling")
        assert topology["generation"] == before["generation"]
        assert topology["ranks"] == before["ranks"]
        if scaling["reason"] == "ScaleFailed":
            assert scaling["status"] == "False"
            assert "another checkpoint" in scaling["message"]
            attempt = topology["operation"]["generation"]
            failures.extend([attempt] if attempt not in failures else [])
        return len(failures) > 1

    eventually(failed_twice, timeout_s=SCALED_S, what="an operation that fails, and fails again")
    assert failures == sorted(failures)
    (checkpoint / "config.json").write_bytes(config)
    service.kill(f"{NAME}-decode-2")


def grow_while_the_coordinator_dies(service: ExpertService) -> None:
    """Kill the coordinator while the operation waits for the new pod."""
    eventually(
        lambda: (
            (operation := service.topology().operation)
            and operation.phase is OperationPhase.WAITING
        ),
        timeout_s=SCALED_S,
        what="an operation that waits for the new pod",
        every_s=0.02,
    )
    service.kill_coordinator()
    service.wait_at_rest(0, 1, 2)


def shrink_while_the_coordinator_dies(service: ExpertService) -> None:
    with service.watching_deletions() as deleted:
        service.scale(2)
        asked = eventually(
            lambda: len((status := service.topology()).desired) == 2 and status,
            timeout_s=30,
            what="the coordinator asked for two ranks",
            every_s=0.02,
        )
        service.kill_coordinator()
        print(
            "phase of the operation when the coordinator died:",
            asked.operation and asked.operation.phase,
        )
        service.wait_at_rest(0, 1)
        eventually(lambda: deleted, timeout_s=30, what="the deletion of the pod that left")
    assert deleted == {f"{NAME}-decode-2": False}, "a pod was deleted while it was a rank"


def kill_a_rank(service: ExpertService) -> None:
    """Kill a rank's process. The kubelet restarts the container, and the new process rejoins."""
    pod, before = f"{NAME}-decode-0", service.recorded()["generation"]
    restarts = service.restarts(pod)
    service.kill(pod)
    left_out = eventually(
        lambda: (generation := service.recorded()["generation"]) > before and generation,
        timeout_s=30,
        what="a generation without the dead rank",
    )
    topology = service.wait_at_rest(0, 1)
    assert topology["generation"] >= left_out
    assert service.restarts(pod) == restarts + 1


def check_deletion_of_an_idle_service(cluster: LocalClusterUnderTest) -> None:
    began = time.monotonic()
    cluster.kubectl("delete", "llms", NAME, "--wait=true")
    kinds = (
        "pods,services,deployments,replicasets,configmaps,secrets,serviceaccounts,roles,"
        "rolebindings,ingresses"
    )
    selector = f"serving.baton.dev/service={NAME}"

    def nothing_left() -> bool:
        found = [
            f"{item['kind']}/{item['metadata']['name']}"
            for item in cluster.get(kinds, "-l", selector)["items"]
        ]
        assert not found, found
        processes = cluster.pod_processes()
        assert not processes, processes
        return True

    eventually(nothing_left, timeout_s=GONE_S, what="all of the deleted service gone", every_s=0.3)
    print(f"gone {time.monotonic() - began:.1f} s after its deletion")
