"""The operator process: services start, change and shrink, groups scale, and keys are created."""

from __future__ import annotations

import base64
import shutil
import subprocess
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from baton_kube.client import KubeError, Object
from baton_operator.builders import service_key_secret
from baton_operator.kube.objects import Kube
from baton_operator.names import GROUP
from baton_operator.observe.observation import is_ready
from baton_protocol.options.config import EngineConfig
from baton_protocol.service_key import AdminRequest, ServiceKey
from baton_protocol.topology import (
    COORDINATOR_HTTP_PORT,
    MemberStatus,
    OperationPhase,
    OperationStatus,
    RankPhase,
    TopologyRequest,
    TopologyStatus,
)
from support.http_server import serving
from support.operator.operator_process import NAMESPACE, Cluster, Operator, needs_api_server
from support.waiting import until


class DrainingEngine:
    """An HTTP server with POST /drain, as an engine has it. The server may require a key."""

    def __init__(self, unfinished: int, key: ServiceKey | None = None) -> None:
        self.unfinished, self.asked, self.refused = unfinished, 0, 0
        self._key, self._ip = key, ""

    async def answer(self, request: web.Request) -> web.Response:
        signed = AdminRequest("POST", request.path_qs, self._ip)
        authorization = request.headers.get("Authorization")
        if self._key is not None and not self._key.admits(authorization, signed):
            self.refused += 1
            raise web.HTTPUnauthorized
        self.asked += 1
        return web.json_response({"draining": True, "unfinished": self.unfinished})

    def serve(self, ip: str) -> AbstractAsyncContextManager[int]:
        self._ip = ip
        return serving(web.post("/drain", self.answer), host=ip, port=8000)


class FakeCoordinator:
    """An HTTP server with the coordinator's API. Tests advance the operations."""

    def __init__(self) -> None:
        self.topology = TopologyStatus(generation=0, desired=[], members=[])
        self.requests: list[TopologyRequest] = []

    async def get(self, _: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self.topology))

    async def put(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=TopologyRequest)
        self.requests.append(asked)
        self.topology.desired = sorted(asked.members)
        self._operate(OperationPhase.PREPARING)
        return await self.get(request)

    def commit(self) -> None:
        """Make all requested members serving ranks, and all other ranks STANDBY."""
        left = [each for each in self.topology.members if each.name not in self.topology.desired]
        for each in left:
            each.rank, each.phase = None, RankPhase.STANDBY
        ranks = [
            MemberStatus(name=name, instance_id=f"i-{name}", phase=RankPhase.SERVING, rank=rank)
            for rank, name in enumerate(self.topology.desired)
        ]
        self.topology.members = ranks + left
        self.topology.generation += 1
        self._operate(OperationPhase.DONE)

    def fail(self, reason: str) -> None:
        self._operate(OperationPhase.FAILED, reason)

    def _operate(self, phase: OperationPhase, reason: str = "") -> None:
        self.topology.operation = OperationStatus(
            operation_id=self.requests[-1].operation_id,
            kind="scale" if self.topology.generation else "form",
            phase=phase,
            generation=self.topology.generation + (phase is not OperationPhase.DONE),
            reason=reason,
            seconds={"waiting": 0.25},
        )

    async def requested(self, *names: str) -> None:
        async def asked() -> bool:
            return bool(self.requests) and self.requests[-1].members == sorted(names)

        await until(asked, f"the topology {names}; asked for: {self.requests}")

    def serve(self, ip: str) -> AbstractAsyncContextManager[int]:
        routes = web.get("/topology", self.get), web.put("/topology", self.put)
        return serving(*routes, host=ip, port=COORDINATOR_HTTP_PORT)


pytestmark = needs_api_server


async def test_an_expert_group_forms_grows_and_shrinks_with_its_coordinator(kube: Kube) -> None:
    experts = Cluster(kube, "experts")
    await experts.create(decode={"replicas": 2, "parallelism": {"expert": True}})
    await experts.names("decode-0", "decode-1")
    service = await kube.read("Service", NAMESPACE, "experts-coordinator")
    address = service["spec"]["clusterIP"]
    pods = await experts.pods()
    volumes = pods["experts-decode-0"]["spec"]["volumes"]
    (name,) = [volume["configMap"]["name"] for volume in volumes if "configMap" in volume]
    config_map = await kube.read("ConfigMap", NAMESPACE, name)
    parallel = msgspec.json.decode(config_map["data"]["decode.json"], type=EngineConfig).parallel
    assert (parallel.enable_expert_parallel, parallel.coordinator) == (True, f"{address}:5560")
    deployment = await kube.read("Deployment", NAMESPACE, "experts-coordinator")
    assert (
        deployment["spec"]["template"]["spec"]["containers"][0]["command"][0] == "baton-coordinator"
    )
    await experts.condition("Scaling", "Unknown", "CoordinatorUnreachable")

    coordinator = FakeCoordinator()
    async with coordinator.serve(address):
        # It forms when both pods have started.
        for pod in ("decode-0", "decode-1"):
            await experts.run(pod, ready=False)
        await coordinator.requested("experts-decode-0", "experts-decode-1")
        await experts.condition("Scaling", "True", "Forming")
        coordinator.commit()
        for pod in ("decode-0", "decode-1"):
            await experts.run(pod)
        await experts.condition("Scaling", "False", "AtRest")
        await experts.condition("DecodeReady", "True")
        topology = (await experts.service())["status"]["decode"]["topology"]
        assert topology["generation"] == 1
        assert topology["ranks"][1] == {"name": "experts-decode-1", "rank": 1, "phase": "serving"}
        assert topology["operation"]["phase"] == "done"
        assert topology["operation"]["seconds"] == {"waiting": 0.25}

        # It grows by a pod. The first attempt fails.
        await experts.patch({"decode": {"replicas": 3}})
        await experts.names("decode-0", "decode-1", "decode-2")
        await experts.run("decode-2", ready=False)
        await coordinator.requested("experts-decode-0", "experts-decode-1", "experts-decode-2")
        await experts.condition("Scaling", "True", "ScalingUp")
        coordinator.fail("decode-2: no memory")
        failed = await experts.condition("Scaling", "False", "ScaleFailed")
        assert "decode-2: no memory" in failed["message"]
        await experts.condition("DecodeReady", "False", "ScaleFailed")
        coordinator.commit()
        await experts.run("decode-2")
        await experts.condition("DecodeReady", "True")

        # It shrinks. The pod stays while it is a rank.
        await experts.patch({"decode": {"replicas": 2}})
        await coordinator.requested("experts-decode-0", "experts-decode-1")
        await experts.condition("Scaling", "True", "ScalingDown")
        assert len(await experts.pods()) == 3
        engine = DrainingEngine(unfinished=0)
        async with engine.serve("127.201.0.1"):
            coordinator.commit()
            await experts.names("decode-0", "decode-1")
        await experts.condition("DecodeReady", "True")

        async def has_events() -> Any:
            events = await kube.list_all("Event", NAMESPACE)
            mine = {
                event["reason"] for event in events if event["involvedObject"]["name"] == "experts"
            }
            return {
                "TopologyOperationStarted",
                "TopologyOperationFailed",
                "TopologyOperationEnded",
            } <= mine

        await until(has_events, "the events of the operations")

    # No member is deleted while the topology is not known.
    await experts.patch({"decode": {"replicas": 1}})
    await experts.condition("Scaling", "Unknown", "CoordinatorUnreachable")
    assert len(await experts.pods()) == 2


async def test_the_coordinator_is_deleted_with_the_last_rank(kube: Kube) -> None:
    plain = Cluster(kube, "plain")
    await plain.create(
        decode={"replicas": 1, "parallelism": {"expert": True}}, drainTimeoutSeconds=0
    )
    before = await plain.names("decode-0")
    await plain.patch({"decode": {"parallelism": {"expert": False}}})

    async def are_replaced() -> bool:
        pods = await plain.pods()
        return bool(pods) and all(
            p["metadata"]["uid"] != before["plain-decode-0"]["metadata"]["uid"]
            for p in pods.values()
        )

    async def is_gone() -> bool:
        found = [
            await kube.read(kind, NAMESPACE, "plain-coordinator")
            for kind in ("Deployment", "Service")
        ]
        return not any(found)

    await until(are_replaced, "the rank to be replaced by an engine of its own")
    await until(is_gone, "the coordinator's Deployment and Service to be deleted")
    status = (await plain.service())["status"]
    assert "topology" not in status["decode"]
    assert "Scaling" not in {condition["type"] for condition in status["conditions"]}


async def test_a_service_starts_and_reports_conditions_and_events(kube: Kube) -> None:
    demo = Cluster(kube, "demo")
    await demo.create(
        prefill={}, decode={"replicas": 2}, gateway={"ingress": {"host": "demo.localhost"}}
    )
    pods = await demo.names("prefill-0", "decode-0", "decode-1")
    starting = await demo.condition("Ready", "False", "Starting")
    assert pods["demo-decode-0"]["spec"]["containers"][0]["command"][0] == "baton-engine"
    for pod in ("prefill-0", "decode-0", "decode-1"):
        await demo.run(pod)
    await demo.run_gateway()
    ready = await demo.condition("Ready", "True", "AllGroupsReady")
    assert ready["lastTransitionTime"] >= starting["lastTransitionTime"]
    status = (await demo.service())["status"]
    gateway = await kube.read("Service", NAMESPACE, "demo-gateway")
    assert status["endpoint"] == f"http://{gateway['spec']['clusterIP']}"
    assert status["ingressEndpoint"] == "http://demo.localhost"
    selector = f"{GROUP}/service=demo,{GROUP}/role=decode"
    assert {"desired": 2, "ready": 2, "replicas": 2, "selector": selector}.items() <= status[
        "decode"
    ].items()
    service = await demo.service()
    assert "finalizers" not in service["metadata"]
    assert "annotations" not in service["metadata"]


async def test_an_unchanged_service_is_not_written_again(kube: Kube, operator: Operator) -> None:
    steady = Cluster(kube, "steady")
    await steady.create()
    await steady.names("decode-0")
    await steady.run("decode-0")
    await steady.run_gateway()
    await steady.condition("Ready", "True")

    async def versions() -> dict[str, str]:
        kinds = (
            "LLMService",
            "Deployment",
            "Service",
            "ServiceAccount",
            "Role",
            "RoleBinding",
            "Pod",
            "ConfigMap",
        )
        objects = [(kind, obj) for kind in kinds for obj in await kube.list_all(kind, NAMESPACE)]
        return {
            f"{kind}/{obj['metadata']['name']}": obj["metadata"]["resourceVersion"]
            for kind, obj in objects
            if obj["metadata"]["name"].startswith("steady")
        }

    before = await versions()
    await operator.wait_for_reconciles(times=4)
    assert await versions() == before


async def test_a_member_drains_before_it_is_deleted(kube: Kube) -> None:
    shrink = Cluster(kube, "shrink")
    await shrink.create(decode={"replicas": 2})
    await shrink.names("decode-0", "decode-1")
    secret = await kube.read("Secret", NAMESPACE, "shrink-key")
    assert secret
    engine = DrainingEngine(unfinished=2, key=service_key_secret.read(secret))
    async with engine.serve("127.201.0.2"):
        await shrink.run("decode-0")
        await shrink.run("decode-1", ip="127.201.0.2")
        await shrink.condition("DecodeReady", "True")
        await shrink.patch({"decode": {"replicas": 1}})

        async def draining() -> Any:
            annotations = (await shrink.pods())["shrink-decode-1"]["metadata"].get(
                "annotations", {}
            )
            return annotations.get(f"{GROUP}/draining") == "true"

        await until(draining, "decode-1 to be marked as draining")

        async def drain_is_repeated() -> bool:
            return engine.asked > 3

        await until(drain_is_repeated, "the engine to be asked more than once")
        assert "shrink-decode-1" in await shrink.pods(), "deleted with two unfinished requests"
        engine.unfinished = 0
        await shrink.names("decode-0")
        assert engine.refused == 0


def key_of(pod: Object) -> str:
    """Return the name of the key that a pod was created with."""
    return str(pod["metadata"]["annotations"][f"{GROUP}/service-key"])


async def test_the_key_of_a_service_is_created_once_and_immutable(
    kube: Kube,
) -> None:
    service = Cluster(kube, "secretive")
    await service.create(decode={"replicas": 1})
    await service.names("decode-0")
    drawn = await kube.read("Secret", NAMESPACE, "secretive-key")
    assert len(bytes.fromhex(base64.b64decode(drawn["data"]["key"]).decode())) == 32
    await service.patch({"decode": {"replicas": 2}})
    await service.names("decode-0", "decode-1")
    assert await kube.read("Secret", NAMESPACE, "secretive-key") == drawn
    with pytest.raises(KubeError, match="immutable"):
        await kube.merge("Secret", NAMESPACE, "secretive-key", {"data": {"key": "eA=="}})


async def test_the_configuration_that_pods_mount_cannot_be_edited(kube: Kube) -> None:
    service = Cluster(kube, "configured")
    await service.create(decode={"replicas": 1})
    pods = await service.names("decode-0")
    volumes = pods["configured-decode-0"]["spec"]["volumes"]
    (name,) = [volume["configMap"]["name"] for volume in volumes if "configMap" in volume]
    hostile = '{"parallel": {"worker_class": "attacker.module.Class"}}'
    with pytest.raises(KubeError, match="immutable"):
        await kube.merge("ConfigMap", NAMESPACE, name, {"data": {"decode.json": hostile}})


async def test_a_deleted_key_is_recreated_and_all_pods_are_replaced_one_by_one(
    kube: Kube, operator: Operator
) -> None:
    service = Cluster(kube, "rotated")
    await service.create(prefill={}, decode={"replicas": 2}, drainTimeoutSeconds=0)
    old = await service.names("prefill-0", "decode-0", "decode-1")
    for pod in ("prefill-0", "decode-0", "decode-1"):
        await service.run(pod)
    await service.condition("DecodeReady", "True")
    drawn = await kube.read("Secret", NAMESPACE, "rotated-key")
    await kube.delete("Secret", NAMESPACE, "rotated-key", drawn["metadata"]["uid"])

    async def is_recreated() -> Any:
        found = await kube.read("Secret", NAMESPACE, "rotated-key")
        return found and found["data"] != drawn["data"]

    await until(is_recreated, "another key")
    old_key = key_of(old["rotated-decode-0"])

    async def decode_pods() -> list[Object]:
        return [pod for name, pod in (await service.pods()).items() if "-decode-" in name]

    async def begun() -> Any:
        return [pod for pod in await decode_pods() if key_of(pod) != old_key]

    await until(begun, "a decode pod with another key")
    await operator.wait_for_reconciles(times=3)
    assert [pod for pod in await decode_pods() if key_of(pod) == old_key], (
        "all pods were deleted before a new one is ready"
    )

    async def done() -> bool:
        pods = await decode_pods()
        for pod in pods:
            if key_of(pod) != old_key and not is_ready(pod):
                await service.run(pod["metadata"]["name"].removeprefix("rotated-"))
        return len(pods) == 2 and all(key_of(pod) != old_key for pod in pods)

    await until(done, "all decode pods to be replaced")
    gateway = await kube.read("Deployment", NAMESPACE, "rotated-gateway")
    assert key_of(gateway["spec"]["template"]) != old_key


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_kubectl_applies_the_generated_manifests(
    kubeconfigs: dict[str, Path], operator: Operator
) -> None:
    manifests = Path(__file__).parents[5] / "manifests"
    for path in ("crd", "rbac", "operator.yaml"):
        # Servers before 1.25 refuse rules in schemas during validation.
        command = [
            "kubectl",
            "--kubeconfig",
            str(kubeconfigs["admin"]),
            "apply",
            "--validate=false",
            "-f",
            str(manifests / path),
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
    columns = subprocess.run(
        ["kubectl", "--kubeconfig", str(kubeconfigs["admin"]), "get", "llms"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")[0]
    assert columns.split() == (
        ["NAME", "READY", "REASON", "AVAILABLE", "PREFILL", "DECODE", "ENDPOINT", "AGE"]
    )
