"""A service whose decode pods are one expert-parallel group, on a local cluster.

For the end-to-end tests of services.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from baton_protocol.topology import COORDINATOR_HTTP_PORT, TopologyStatus
from support.service.local_cluster import LocalClusterUnderTest, manifest
from support.waiting import eventually

NAME = "experts"
#: A new rank imports torch and loads a model while streams run on two cores.
SCALED_S = 90.0


def service_of(checkpoint: Path) -> dict[str, Any]:
    """Return a service with two ranks. Its served name is the model name that `Load` requests."""
    engine = {"device": "cpu", "numThreads": 1, "maxNumBatchedTokens": 256, "kvCacheMemory": "32Mi"}
    service = manifest(NAME, checkpoint, prefill=0, decode=2, engine=engine)
    service["spec"]["model"]["servedName"] = "m"
    service["spec"]["decode"]["parallelism"] = {"expert": True, "redundantExperts": 2}
    return service


class ExpertService:
    """Reads the state of the service, and changes or disturbs the service."""

    def __init__(self, cluster: LocalClusterUnderTest) -> None:
        self._cluster = cluster
        self._coordinator = cluster.get("services", f"{NAME}-coordinator")["spec"]["clusterIP"]

    def scale(self, replicas: int) -> None:
        self._cluster.kubectl("scale", f"llms/{NAME}", f"--replicas={replicas}")

    def kill(self, pod: str) -> None:
        """Kill the pod's process with SIGKILL."""
        self._cluster.process_of(pod).send_signal(signal.SIGKILL)

    def kill_coordinator(self) -> None:
        (pod,) = self._cluster.pods(NAME, "coordinator")
        self.kill(pod["metadata"]["name"])

    def recorded(self) -> dict[str, Any]:
        """Return the topology in the service's status."""
        topology: dict[str, Any] = self._cluster.get("llms", NAME)["status"]["decode"]["topology"]
        return topology

    def topology(self) -> TopologyStatus:
        """Return the coordinator's topology.

        Raises:
            AssertionError: the coordinator does not respond.
        """
        url = f"http://{self._coordinator}:{COORDINATOR_HTTP_PORT}/topology"
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                return msgspec.json.decode(response.read(), type=TopologyStatus)
        except (OSError, msgspec.DecodeError) as error:
            raise AssertionError(f"{url}: {error!r}") from error

    def restarts(self, pod: str) -> int:
        (found,) = [
            each for each in self._cluster.pods(NAME, "decode") if each["metadata"]["name"] == pod
        ]
        return int(found["status"]["containerStatuses"][0]["restartCount"])

    def wait_at_rest(self, *ordinals: int) -> dict[str, Any]:
        """Wait until exactly the pods `ordinals` are serving ranks and no operation runs.

        Returns:
            The topology in the service's status.
        """
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
            reached,
            timeout_s=SCALED_S,
            what=f"a topology of {', '.join(names)} at rest",
            every_s=0.5,
        )
        self._cluster.wait_ready(NAME)
        return topology

    @contextlib.contextmanager
    def watching_deletions(self) -> Iterator[dict[str, bool]]:
        """Record during the block which decode pods terminate.

        Yields:
            name of each terminating pod -> whether the coordinator still listed the pod as a rank.
        """
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
                        topology = eventually(
                            self.topology, timeout_s=30, what="an answer of the coordinator"
                        )
                        ranks = {
                            member.name for member in topology.members if member.rank is not None
                        }
                        deleted[name] = name in ranks

            thread = threading.Thread(target=follow)
            thread.start()
            try:
                yield deleted
            finally:
                process.kill()
                thread.join()
