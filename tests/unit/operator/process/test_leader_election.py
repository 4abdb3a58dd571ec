"""Two operator processes with leader election on an embedded control plane."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton_kube.client import KubeError, connect
from baton_operator.kube.objects import Kube
from pocketkube.control_plane.embedded import EmbeddedControlPlane
from pocketkube.ports import free_ports
from support.operator.api_proxy import ApiProxy, api_proxy
from support.operator.operator_process import start_operator
from support.waiting import eventually

LEASE_S = 12.0
#: The Lease's duration, a retry, and a start on a busy machine.
TAKEOVER_S = 2 * LEASE_S + 30.0
NAMESPACE = "default"


@dataclass
class Operator:
    """One process behind its own proxy."""

    process: subprocess.Popen[bytes]
    proxy: ApiProxy
    port: int
    log: Path

    def leads(self) -> bool:
        return self.metric("baton_operator_leader") == 1.0

    def metric(self, name: str) -> float | None:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/metrics", timeout=2
            ) as response:
                lines = response.read().decode().splitlines()
        except OSError:
            return None
        return next((float(line.split()[-1]) for line in lines if line.split()[0] == name), None)

    def writes_since(self, moment: float) -> list[str]:
        return [write for write in self.proxy.writes_since(moment) if "/leases" not in write]


@contextlib.contextmanager
def operator(plane: EmbeddedControlPlane, folder: Path, name: str) -> Iterator[Operator]:
    [port] = free_ports(1)
    log = folder / f"{name}.log"
    with api_proxy(plane.kubeconfig, folder / name) as proxy:
        process = start_operator(
            proxy.kubeconfig,
            log,
            *("--leader-elect", "--lease-namespace", NAMESPACE, "--lease-duration", str(LEASE_S)),
            *("--log-format", "json", "--http-port", str(port)),
            POD_NAME=name,
        )
        try:
            yield Operator(process, proxy, port, log)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.terminate()  # so that it releases the Lease, and the next test need not wait
            try:
                process.wait(30)
            finally:
                process.kill()
                process.wait()


@dataclass
class Pair:
    plane: EmbeddedControlPlane
    leader: Operator
    standby: Operator

    def create(self, name: str) -> None:
        spec = {"model": {"uri": "file:///models/x"}, "decode": {"replicas": 1}}
        metadata = {"name": name, "namespace": NAMESPACE}
        body = {
            "apiVersion": "serving.baton.dev/v1alpha1",
            "kind": "LLMService",
            "metadata": metadata,
            "spec": spec,
        }

        async def post() -> None:
            async with connect(self.plane.kubeconfig) as connection:
                kube = Kube(connection)
                await kube.create(body)

        asyncio.run(post())

    def pods(self, service: str) -> list[str]:
        async def read() -> list[str]:
            async with connect(self.plane.kubeconfig) as connection:
                kube = Kube(connection)
                with contextlib.suppress(KubeError):
                    found = await kube.list_all(
                        "Pod", NAMESPACE, {"serving.baton.dev/service": service}
                    )
                    return [pod["metadata"]["name"] for pod in found]
                return []

        return asyncio.run(read())

    def wait_for_pod(self, service: str) -> None:
        eventually(
            lambda: f"{service}-decode-0" in self.pods(service),
            timeout_s=120,
            what=f"a pod of {service}; leader: {self.leader.log.read_text()[-1500:]}",
        )


@pytest.fixture
def pair(plane: EmbeddedControlPlane, tmp_path: Path) -> Iterator[Pair]:
    with operator(plane, tmp_path, "one") as one, operator(plane, tmp_path, "two") as two:
        eventually(lambda: one.leads() or two.leads(), timeout_s=120, what="a leader")
        leader, standby = (one, two) if one.leads() else (two, one)
        yield Pair(plane, leader, standby)


def test_only_the_leader_works_and_the_other_only_reads_the_lease(pair: Pair) -> None:
    pair.create("steady")
    pair.wait_for_pod("steady")
    assert not pair.standby.leads()
    assert pair.standby.writes_since(0.0) == []
    assert {path.partition("?")[0].rpartition("/")[2] for _, path in pair.standby.proxy.reads} <= {
        "baton-operator"
    }

    def creations() -> list[str]:
        return [text for text in pair.leader.log.read_text().splitlines() if "Created" in text]

    line = json.loads(eventually(creations, "the log line of a created object")[0])
    assert (line["namespace"], line["service"], line["level"]) == (NAMESPACE, "steady", "info")


def test_the_other_takes_over_from_a_killed_leader_within_the_lease_duration(pair: Pair) -> None:
    pair.leader.process.kill()
    killed = time.monotonic()
    eventually(pair.standby.leads, timeout_s=TAKEOVER_S, what="the other to take over")
    assert time.monotonic() - killed >= LEASE_S / 3, (
        "it took over while the leader could have been running"
    )
    pair.create("after-kill")
    pair.wait_for_pod("after-kill")


def test_a_leader_that_is_shut_down_hands_over_at_once(pair: Pair) -> None:
    pair.leader.process.terminate()
    assert pair.leader.process.wait(60) == 0, pair.leader.log.read_text()[-2000:]
    ended = time.monotonic()
    eventually(
        pair.standby.leads, timeout_s=TAKEOVER_S, what="the other to take over", every_s=0.05
    )
    first = next(at for at, _, path in pair.standby.proxy.writes if "/leases" in path)
    assert first - ended < LEASE_S / 2, "it waited although the Lease was released"
    assert "Traceback" not in pair.leader.log.read_text(), pair.leader.log.read_text()[-3000:]


def test_a_leader_that_was_stopped_writes_nothing_when_it_resumes(pair: Pair) -> None:
    pair.leader.process.send_signal(signal.SIGSTOP)
    eventually(pair.standby.leads, timeout_s=TAKEOVER_S, what="the other to take over")
    for number in range(5):  # work that the stopped process finds when it resumes
        pair.create(f"after-stop-{number}")
    pair.wait_for_pod("after-stop-4")
    resumed = time.monotonic()
    pair.leader.process.send_signal(signal.SIGCONT)
    assert pair.leader.process.wait(60) == 1, pair.leader.log.read_text()[-2000:]
    assert pair.leader.writes_since(resumed) == []
    last = json.loads(pair.leader.log.read_text().splitlines()[-1])
    assert last["message"].startswith("the operator exits with code 1: "), last
    assert pair.standby.leads()


def test_an_operator_without_an_api_server_waits_and_is_healthy(tmp_path: Path) -> None:
    [dead, port] = free_ports(2)
    cluster = {
        "clusters": [{"name": "x", "cluster": {"server": f"http://127.0.0.1:{dead}"}}],
        "current-context": "x",
    }
    contexts = [{"name": "x", "context": {"cluster": "x", "user": "x"}}]
    kubeconfig, log = tmp_path / "kubeconfig", tmp_path / "log"
    kubeconfig.write_text(
        json.dumps({**cluster, "contexts": contexts, "users": [{"name": "x", "user": {}}]})
    )
    process = start_operator(kubeconfig, log, "--http-port", str(port))
    try:
        eventually(
            lambda: "does not answer" in log.read_text(),
            timeout_s=120,
            what="it to say what it waits for",
        )
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            assert answer.status == 200, "a restart by the kubelet would not help"
        process.terminate()
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
