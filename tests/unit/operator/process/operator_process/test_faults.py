"""Faults between the operator and the API server: the resulting objects are the same.

In no case does kopf itself write to the API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from baton_kube.client import connect
from baton_operator import names
from baton_operator.kube.objects import Kube
from pocketkube.control_plane.embedded import EmbeddedControlPlane
from support.operator.api_proxy import ApiProxy, Fault, api_proxy
from support.operator.operator_process import Cluster, start_operator
from support.waiting import until

NAMESPACE = "default"
OWNED = (
    *(
        "Pod",
        "ConfigMap",
        "Service",
        "ServiceAccount",
        "Deployment",
        "NetworkPolicy",
        "Role",
        "RoleBinding",
    ),
    *("Ingress", "PodDisruptionBudget"),
)


@dataclass
class Operator:
    """A process behind a proxy that injects faults into its watches."""

    proxy: ApiProxy
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = start_operator(self.proxy.kubeconfig, self.log, "--http-port", "0")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def fail(self, fault: Fault, wanted: Callable[[str], bool], times: int = sys.maxsize) -> None:
        """Fail the next `times` requests of kopf whose path and query are `wanted`."""
        left = times

        def decide(request: web.Request) -> Fault | None:
            nonlocal left
            if (
                not left
                or "kopf" not in request.headers.get("User-Agent", "")
                or not wanted(str(request.rel_url))
            ):
                return None
            left -= 1
            return fault

        self.proxy.fault = decide


@pytest.fixture
def operator(plane: EmbeddedControlPlane, tmp_path: Path) -> Iterator[Operator]:
    with api_proxy(plane.kubeconfig, tmp_path / "proxy") as proxy:
        found = Operator(proxy, tmp_path / "operator.log")
        try:
            yield found
        finally:
            found.kill()


@contextlib.asynccontextmanager
async def served(plane: EmbeddedControlPlane, name: str) -> Any:
    """Create a service with two decode pods. The test acts as the kubelet."""
    async with connect(plane.kubeconfig) as client:
        cluster = Cluster(Kube(client), name)
        await cluster.create(decode={"replicas": 2})
        try:
            yield cluster
        finally:
            service = await cluster.service()
            await cluster.kube.delete("LLMService", NAMESPACE, name, service["metadata"]["uid"])


async def run_pods(cluster: Cluster) -> None:
    for pod in sorted(await cluster.names("decode-0", "decode-1")):
        await cluster.run(pod.removeprefix(f"{cluster.name}-"))
    await cluster.condition("DecodeReady", "True")


async def objects(cluster: Cluster) -> list[tuple[str, str]]:
    """Return (kind, name) of all objects of the service, without hashes and its name."""
    mine = {names.LABEL_SERVICE: cluster.name}
    found = [obj for kind in OWNED for obj in await cluster.kube.list_all(kind, NAMESPACE, mine)]
    named = [(obj["kind"], obj["metadata"]["name"].replace(cluster.name, "x")) for obj in found]
    return sorted((kind, re.sub("[0-9a-f]{10}$", "HASH", name)) for kind, name in named)


async def delete_and_wait_for_replacement(cluster: Cluster, pod: str) -> None:
    """Delete a pod and wait for its replacement, which must not need a resync."""
    before = (await cluster.pods())[f"{cluster.name}-{pod}"]["metadata"]
    await cluster.kube.client.delete(cluster.kube.path("Pod", NAMESPACE, before["name"]), grace_s=0)

    async def is_back() -> bool:
        now = (await cluster.pods()).get(before["name"])
        return now is not None and now["metadata"]["uid"] != before["uid"]

    await until(is_back, f"{before['name']} to be replaced")
    await cluster.run(pod)
    await cluster.condition("DecodeReady", "True")


@pytest.fixture(scope="module")
def expected(
    plane: EmbeddedControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[str, str]]:
    """Return the objects that an operator without faults creates."""
    folder = tmp_path_factory.mktemp("faultless")

    async def make() -> list[tuple[str, str]]:
        async with served(plane, "faultless") as cluster:
            await run_pods(cluster)
            return await objects(cluster)

    with api_proxy(plane.kubeconfig, folder) as proxy:
        faultless = Operator(proxy, folder / "operator.log")
        faultless.start()
        try:
            return asyncio.run(make())
        finally:
            faultless.kill()


def is_watch(url: str) -> bool:
    return "watch=true" in url


def is_list(url: str) -> bool:
    return "watch=true" not in url and url.partition("?")[0].rpartition("/")[2] in (
        "pods",
        names.PLURAL,
        "services",
    )


def is_pod_watch(url: str) -> bool:
    return is_watch(url) and "/pods?" in url


GONE = (
    json.dumps(
        {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}
    ).encode()
    + b"\n"
)
BROKEN = (
    json.dumps(
        {"type": "ERROR", "object": {"kind": "Status", "code": 500, "reason": "Internal"}}
    ).encode()
    + b"\n"
)
FAULTS = {
    "watches cut within an event": (Fault(cut_after=200), is_watch, 12),
    "watches answered 410": (Fault(events=GONE), is_watch, 12),
    "watches with an error event": (Fault(events=BROKEN), is_pod_watch, 1),
    "watches refused": (Fault(status=500), is_watch, 12),
    "watches not found": (Fault(status=404), is_pod_watch, 1),
    "pauses asked for": (Fault(status=429, retry_after_s=1), lambda url: True, 8),
    "credentials refused": (Fault(status=401), lambda url: True, 3),
    "lists refused": (Fault(status=500), is_list, 6),
    "lists that fail half-way": (Fault(cut_after=100), is_list, 6),
    "events twice": (Fault(repeats=2), is_watch, sys.maxsize),
    "events late": (Fault(late_s=0.5), is_watch, sys.maxsize),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_the_objects_are_the_same_after_faults(
    plane: EmbeddedControlPlane, operator: Operator, expected: list[tuple[str, str]], name: str
) -> None:
    fault, wanted, times = FAULTS[name]
    operator.fail(fault, wanted, times)
    operator.start()
    async with served(plane, f"fault-{list(FAULTS).index(name)}") as cluster:
        await run_pods(cluster)
        operator.fail(fault, wanted, times)
        await delete_and_wait_for_replacement(cluster, "decode-0")
        assert await objects(cluster) == expected, operator.log.read_text()[-3000:]


@pytest.mark.chaos
@pytest.mark.parametrize("number", [*range(1, 60, 3)])
async def test_the_objects_are_the_same_after_a_kill_at_any_request(
    plane: EmbeddedControlPlane, operator: Operator, expected: list[tuple[str, str]], number: int
) -> None:
    left = number

    def kill(request: web.Request) -> Fault | None:
        nonlocal left
        left -= 1
        if left == 0 and operator.process is not None:
            operator.process.send_signal(signal.SIGKILL)
        return None

    async with served(plane, f"killed-{number}") as cluster:
        operator.proxy.fault = kill
        operator.start()
        process = operator.process
        assert process is not None
        with contextlib.suppress(AssertionError):
            await until(lambda: process.poll() is not None, "the end of the operator", 10)
        operator.kill()
        operator.start()
        await run_pods(cluster)
        assert await objects(cluster) == expected


async def test_kopf_writes_nothing(plane: EmbeddedControlPlane, operator: Operator) -> None:
    operator.start()
    async with served(plane, "clean") as cluster:
        await run_pods(cluster)
        await delete_and_wait_for_replacement(cluster, "decode-1")
        metadata = (await cluster.service())["metadata"]
        assert "finalizers" not in metadata
        assert "annotations" not in metadata
        managers = {entry["manager"] for entry in metadata["managedFields"]}
        assert names.MANAGER in managers
        assert not [manager for manager in managers if "kopf" in manager]
        events = await cluster.kube.list_all("Event", NAMESPACE)
        mine = [event for event in events if event["involvedObject"]["name"] == "clean"]
        assert {event["source"]["component"] for event in mine} == {names.MANAGER}
    operator.process.terminate()
    assert await asyncio.to_thread(operator.process.wait, 30) == 0, (
        "a thread of kopf is still waiting"
    )
    by_kopf = {method for agent, method in operator.proxy.agents if agent.startswith("kopf")}
    assert by_kopf == {"GET"}
    others = {agent for agent, method in operator.proxy.agents if method != "GET"}
    assert others
    assert not [agent for agent in others if "kopf" in agent]
