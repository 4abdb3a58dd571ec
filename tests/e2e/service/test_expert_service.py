"""A service whose decode pods are one expert-parallel group, from `kubectl apply` to `kubectl delete`: it grows, shrinks and loses
a rank while streams run, and no stream notices.

A minute for each control plane, so the real one's turn comes with `make elastic`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_engine.checkpoint import create_checkpoint
from baton_engine.protocol.topology import COORDINATOR_HTTP_PORT, OperationPhase, TopologyStatus
from support.expert_group import SHAPE, VOCAB_SIZE
from support.local_cluster import LocalClusterUnderTest, local_cluster, manifest
from support.parity import reference_model
from support.under_load import under_load
from support.waiting import eventually

NAME = "experts"
STREAMS = 6
SCALED_S = 90.0
"""A rank's process that starts imports torch and loads, beside the streams and other tests on two cores."""
GONE_S = 30.0
"""An idle service has nothing to drain."""


class ExpertService:
    """What a user sees of the service, and does to it."""

    def __init__(self, cluster: LocalClusterUnderTest) -> None:
        self._cluster = cluster
        self._coordinator = cluster.get("services", f"{NAME}-coordinator")["spec"]["clusterIP"]

    def scale(self, replicas: int) -> None:
        self._cluster.kubectl("scale", f"llms/{NAME}", f"--replicas={replicas}")

    def kill(self, pod: str) -> None:
        """Its process, with -9."""
        self._cluster.process_of(pod).send_signal(signal.SIGKILL)

    def kill_coordinator(self) -> None:
        (pod,) = self._cluster.pods(NAME, "coordinator")
        self.kill(pod["metadata"]["name"])

    def recorded(self) -> dict[str, Any]:
        """The topology as the service's status says."""
        topology: dict[str, Any] = self._cluster.get("llms", NAME)["status"]["decode"]["topology"]
        return topology

    def topology(self) -> TopologyStatus:
        """As the coordinator says. Raises AssertionError: it does not answer."""
        url = f"http://{self._coordinator}:{COORDINATOR_HTTP_PORT}/topology"
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                return msgspec.json.decode(response.read(), type=TopologyStatus)
        except (OSError, msgspec.DecodeError) as error:
            raise AssertionError(f"{url}: {error!r}") from error

    def restarts(self, pod: str) -> int:
        (found,) = [each for each in self._cluster.pods(NAME, "decode") if each["metadata"]["name"] == pod]
        return int(found["status"]["containerStatuses"][0]["restartCount"])

    def wait_at_rest(self, *ordinals: int) -> dict[str, Any]:
        """Until exactly these pods exist and are ranks that serve, and no operation runs. The topology as the status says."""
        names = [f"{NAME}-decode-{ordinal}" for ordinal in ordinals]

        def reached() -> dict[str, Any]:
            topology = self.recorded()
            assert sorted(rank["name"] for rank in topology["ranks"]) == names, topology
            assert {rank["phase"] for rank in topology["ranks"]} == {"serving"}, topology
            scaling = self._cluster.condition(NAME, "Scaling")
            assert (scaling["status"], scaling["reason"]) == ("False", "AtRest"), scaling
            pods = sorted(pod["metadata"]["name"] for pod in self._cluster.pods(NAME, "decode"))
            assert pods == names, pods
            return topology

        topology = eventually(
            reached, timeout_s=SCALED_S, what=f"a topology of {', '.join(names)} at rest", every_s=0.5
        )
        self._cluster.wait_ready(NAME)
        return topology

    @contextlib.contextmanager
    def watching_deletions(self) -> Iterator[dict[str, bool]]:
        """Collects each decode pod that is being deleted: whether the coordinator, asked at once, still counts it as a rank."""
        deleted: dict[str, bool] = {}
        columns = "custom-columns=:.metadata.name,:.metadata.deletionTimestamp"
        labels = f"serving.baton.dev/service={NAME},serving.baton.dev/role=decode"
        kubeconfig = self._cluster.home / "control-plane" / "kubeconfig"
        command = [
            "kubectl",
            "--kubeconfig",
            str(kubeconfig),
            "get",
            "pods",
            "-w",
            "-l",
            labels,
            "--no-headers",
            "-o",
            columns,
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:

            def follow() -> None:
                assert process.stdout is not None
                for line in process.stdout:
                    name, deletion = line.split()
                    if deletion != "<none>" and name not in deleted:
                        topology = eventually(self.topology, timeout_s=30, what="an answer of the coordinator")
                        ranks = {member.name for member in topology.members if member.rank is not None}
                        deleted[name] = name in ranks

            thread = threading.Thread(target=follow)
            thread.start()
            try:
                yield deleted
            finally:
                process.kill()
                thread.join()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("control_plane", ["embedded", pytest.param("real", marks=pytest.mark.chaos)])
async def test_a_group_grows_shrinks_and_loses_ranks_under_streams(control_plane: str, tmp_path: Path) -> None:
    checkpoint = create_checkpoint(tmp_path / "moe", "qwen3_moe", **SHAPE)
    model = reference_model(checkpoint)
    with local_cluster(control_plane) as cluster:
        await asyncio.to_thread(cluster.up, service_of(checkpoint))
        service = ExpertService(cluster)
        await asyncio.to_thread(service.wait_at_rest, 0, 1)
        endpoint = cluster.get("llms", NAME)["status"]["endpoint"]
        async with under_load(endpoint, model, width=STREAMS, vocab_size=VOCAB_SIZE):
            await asyncio.to_thread(a_failing_operation_leaves_the_old_topology, cluster, service, checkpoint)
            await asyncio.to_thread(it_grows_though_the_coordinator_dies, service)
            await asyncio.to_thread(it_shrinks_though_the_coordinator_dies, service)
            await asyncio.to_thread(a_killed_rank_comes_back, service)
        await asyncio.to_thread(deleted_idle_nothing_is_left, cluster)


def service_of(checkpoint: Path) -> dict[str, Any]:
    """Two ranks. The served name is what `Load` asks for."""
    engine = {"device": "cpu", "numThreads": 1, "maxNumBatchedTokens": 256, "kvCacheMemory": "32Mi"}
    service = manifest(NAME, checkpoint, prefill=0, decode=2, engine=engine)
    service["spec"]["model"]["servedName"] = "m"
    service["spec"]["decode"]["parallelism"] = {"expert": True, "redundantExperts": 2}
    return service


def a_failing_operation_leaves_the_old_topology(
    cluster: LocalClusterUnderTest, service: ExpertService, checkpoint: Path
) -> None:
    """Somebody changed the checkpoint: a new pod has another one than the ranks, so it cannot be one of them.

    Then the checkpoint is put right, and the pod's process killed, so that it reads it.
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


def it_grows_though_the_coordinator_dies(service: ExpertService) -> None:
    """While the operation waits for the new pod."""
    eventually(
        lambda: (operation := service.topology().operation) and operation.phase is OperationPhase.WAITING,
        timeout_s=SCALED_S,
        what="an operation that waits for the new pod",
        every_s=0.02,
    )
    service.kill_coordinator()
    service.wait_at_rest(0, 1, 2)


def it_shrinks_though_the_coordinator_dies(service: ExpertService) -> None:
    with service.watching_deletions() as deleted:
        service.scale(2)
        asked = eventually(
            lambda: len((status := service.topology()).desired) == 2 and status,
            timeout_s=30,
            what="the coordinator asked for two ranks",
            every_s=0.02,
        )
        service.kill_coordinator()
        print(f"the coordinator died when the operation was {asked.operation and asked.operation.phase}")
        service.wait_at_rest(0, 1)
        eventually(lambda: deleted, timeout_s=30, what="the deletion of the pod that left")
    assert deleted == {f"{NAME}-decode-2": False}, "a pod was deleted while it was a rank"


def a_killed_rank_comes_back(service: ExpertService) -> None:
    """Its pod's container is restarted, and is another process of the same rank."""
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


def deleted_idle_nothing_is_left(cluster: LocalClusterUnderTest) -> None:
    began = time.monotonic()
    cluster.kubectl("delete", "llms", NAME, "--wait=true")
    kinds = "pods,services,deployments,replicasets,configmaps,secrets,serviceaccounts,roles,rolebindings,ingresses"
    selector = f"serving.baton.dev/service={NAME}"

    def nothing_left() -> bool:
        found = [f"{item['kind']}/{item['metadata']['name']}" for item in cluster.get(kinds, "-l", selector)["items"]]
        assert not found, found
        processes = cluster.pod_processes()
        assert not processes, processes
        return True

    eventually(nothing_left, timeout_s=GONE_S, what="all of the deleted service gone", every_s=0.3)
    print(f"gone {time.monotonic() - began:.1f} s after its deletion")
