"""The whole operator process against a real kube-apiserver, with the rights its generated RBAC gives and no more.
The tests play kubelet and Deployment controller by writing pod status."""

from __future__ import annotations

import asyncio
import base64
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from api_server import api_server

from baton_engine.protocol.config import EngineConfig
from baton_engine.protocol.service_key import ServiceKey
from baton_engine.protocol.topology import (
    COORDINATOR_HTTP_PORT,
    MemberStatus,
    OperationPhase,
    OperationStatus,
    RankPhase,
    TopologyRequest,
    TopologyStatus,
)
from baton_local.control_plane.real import find_assets, free_ports
from baton_operator.builders import service_key
from baton_operator.crd import custom_resource_definition
from baton_operator.kube import Kube, KubeError, connect
from baton_operator.manifests import files
from baton_operator.names import GROUP
from baton_operator.observe import is_ready
from support.http_routes import ROUTES

Object = dict[str, Any]
DEADLINE_S = 30.0
RESYNC_S = 0.5
NAMESPACE = "default"

pytestmark = pytest.mark.skipif(
    find_assets() is None, reason="no kube-apiserver: run `make control-plane` or set KUBEBUILDER_ASSETS"
)


@pytest.fixture(scope="module")
def kubeconfigs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    folder = tmp_path_factory.mktemp("control-plane")
    binaries = find_assets()
    assert binaries
    with api_server(binaries, folder) as configs:
        asyncio.run(_install(configs["admin"]))
        yield configs


async def _install(kubeconfig: Path) -> None:
    """The generated CRD and RBAC, as an administrator applies them."""
    paths = {
        "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
        "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
        "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    }
    async with connect(str(kubeconfig)) as (kube, _):
        for objects in files().values():
            for obj in objects:
                if path := paths.get(obj["kind"]):
                    await kube._request("POST", path, body=obj)
        await eventually(kube.discover, "the CRD to be served")


@dataclass
class Operator:
    """The process, seen from outside."""

    http_port: int

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if line.split()[0] == name)

    async def look_around(self, times: int) -> None:
        """Returns when the operator has looked at every service `times` times more: each resync makes all of them due."""
        looks = times * self.metric("baton_operator_services") + self.metric("baton_operator_reconcile_seconds_count")

        async def looked() -> bool:
            return self.metric("baton_operator_reconcile_seconds_count") >= looks

        await eventually(looked, f"{times} resyncs")


@pytest.fixture(scope="module")
def operator(kubeconfigs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    log = tmp_path_factory.mktemp("operator") / "log"
    [port] = free_ports(1)
    command = [sys.executable, "-m", "baton_operator.cli", "--kubeconfig", str(kubeconfigs["operator"])]
    command += ["--host", "127.0.0.1", "--http-port", str(port), "--resync", str(RESYNC_S)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield Operator(port)
        assert process.poll() is None, f"the operator ended:\n{log.read_text()[-3000:]}"
        process.terminate()
        assert process.wait(20) == 0, log.read_text()[-3000:]
        assert "Traceback" not in log.read_text(), log.read_text()
        assert "forbidden" not in log.read_text().lower(), log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture
async def kube(kubeconfigs: dict[str, Path], operator: Operator) -> AsyncIterator[Kube]:
    async with connect(str(kubeconfigs["admin"])) as (client, _):
        await client.discover()
        yield client


async def eventually(check: Callable[[], Any], what: str) -> Any:
    """What `check` returns as soon as it is true."""
    deadline = time.monotonic() + DEADLINE_S
    result = None
    while time.monotonic() < deadline:
        result = await check()
        if result:
            return result
        await asyncio.sleep(0.1)
    raise AssertionError(f"waited {DEADLINE_S:.0f} s for {what}; last: {result!r}")


class Cluster:
    """One service, and the kubelet's part."""

    def __init__(self, kube: Kube, name: str) -> None:
        self.kube, self.name = kube, name

    async def create(self, **spec: Any) -> None:
        body = {"model": {"uri": "file:///models/x"}, **spec}
        metadata = {"name": self.name, "namespace": NAMESPACE}
        await self.kube.create(
            {"apiVersion": f"{GROUP}/v1alpha1", "kind": "LLMService", "metadata": metadata, "spec": body}
        )

    async def patch(self, spec: Object) -> None:
        await self.kube.merge("LLMService", NAMESPACE, self.name, {"spec": spec})

    async def pods(self) -> dict[str, Object]:
        pods = await self.kube.list_all("Pod", NAMESPACE, {f"{GROUP}/service": self.name})
        return {pod["metadata"]["name"]: pod for pod in pods}

    async def names(self, *wanted: str) -> dict[str, Object]:
        """Once exactly these pods exist."""
        full = {f"{self.name}-{short}" for short in wanted}

        async def check() -> Any:
            pods = await self.pods()
            return pods if set(pods) == full else None

        return dict(await eventually(check, f"exactly the pods {sorted(full)}"))

    async def run(self, pod: str, ip: str = "127.201.0.1", ready: bool = True) -> None:
        """The kubelet's report of a pod that runs."""
        flag = "True" if ready else "False"
        container = {
            "name": "engine", "image": "x", "imageID": "x", "restartCount": 0, "ready": ready, "started": True,
            "state": {"running": {"startedAt": "2020-01-01T00:00:00Z"}},
        }  # fmt: skip
        status = {
            "phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "containerStatuses": [container],
            "conditions": [{"type": "Ready", "status": flag}],
        }  # fmt: skip
        await self.kube.merge("Pod", NAMESPACE, f"{self.name}-{pod}", {"status": status}, "status")

    async def die(self, pod: str, message: str) -> None:
        """The kubelet's report of a container that ended for good reasons."""
        ended = {"terminated": {"exitCode": 78, "reason": "Error", "message": message}}
        container = {
            "name": "engine", "image": "x", "imageID": "x", "restartCount": 1, "ready": False, "started": False,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ended,
        }  # fmt: skip
        status = {
            "phase": "Running", "containerStatuses": [container], "conditions": [{"type": "Ready", "status": "False"}],
        }  # fmt: skip
        await self.kube.merge("Pod", NAMESPACE, f"{self.name}-{pod}", {"status": status}, "status")

    async def run_gateway(self) -> None:
        """The Deployment controller's and the kubelet's part for the gateway."""

        async def deployed() -> Any:
            return await self.kube.get("Deployment", NAMESPACE, f"{self.name}-gateway")

        deployment = await eventually(deployed, "the gateway Deployment")
        template = deployment["spec"]["template"]
        await self.kube.create(
            {
                "apiVersion": "v1", "kind": "Pod", "spec": template["spec"],
                "metadata": {"name": f"{self.name}-gateway-0", "namespace": NAMESPACE, **template["metadata"]},
            }
        )  # fmt: skip
        await self.run("gateway-0")
        counts = {"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1, "readyReplicas": 1}
        await self.kube.merge("Deployment", NAMESPACE, f"{self.name}-gateway", {"status": counts}, "status")

    async def service(self) -> Object:
        found = await self.kube.get("LLMService", NAMESPACE, self.name)
        assert found
        return found

    async def condition(self, type_: str, status: str, reason: str | None = None) -> Object:
        """Once the condition is so for the newest generation."""

        async def check() -> Any:
            service = await self.service()
            for condition in service.get("status", {}).get("conditions", []):
                right = condition["type"] == type_ and condition["status"] == status
                newest = condition["observedGeneration"] == service["metadata"]["generation"]
                if right and newest and reason in (None, condition["reason"]):
                    return condition
            return None

        try:
            return dict(await eventually(check, f"{type_}={status} {reason}"))
        except AssertionError as error:
            raise AssertionError(f"{error}; status: {(await self.service()).get('status')}") from None


class DrainingEngine:
    """An engine's HTTP that answers POST /drain; with a key, to those who have it."""

    def __init__(self, unfinished: int, key: ServiceKey | None = None) -> None:
        self.unfinished, self.asked, self.refused = unfinished, 0, 0
        self._key = key

    async def answer(self, request: web.Request) -> web.Response:
        if self._key is not None and not self._key.admits(request.headers.get("Authorization")):
            self.refused += 1
            raise web.HTTPUnauthorized
        self.asked += 1
        return web.json_response({"draining": True, "unfinished": self.unfinished})


async def serve_drain(ip: str, engine: DrainingEngine) -> web.AppRunner:

    app = web.Application()
    app.add_routes([web.post("/drain", engine.answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, ip, 8000).start()
    return runner


class PlayedCoordinator:
    """A coordinator's HTTP on its Service's address. Operations go on when the test says so."""

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
        """All that was asked for are ranks; those of before stand by."""
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

    async def asked_for(self, *names: str) -> None:
        async def asked() -> bool:
            return bool(self.requests) and self.requests[-1].members == sorted(names)

        await eventually(asked, f"the topology {names}; asked for: {self.requests}")

    @asynccontextmanager
    async def serve(self, ip: str) -> AsyncIterator[None]:
        app = web.Application()
        app.add_routes([web.get("/topology", self.get), web.put("/topology", self.put)])
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, ip, COORDINATOR_HTTP_PORT).start()
            yield
        finally:
            await runner.cleanup()


async def test_a_group_of_ranks_follows_its_coordinator(kube: Kube) -> None:
    experts = Cluster(kube, "experts")
    await experts.create(decode={"replicas": 2, "parallelism": {"expert": True}})
    await experts.names("decode-0", "decode-1")
    service = await kube.get("Service", NAMESPACE, "experts-coordinator")
    assert service
    address = service["spec"]["clusterIP"]
    pods = await experts.pods()
    volumes = pods["experts-decode-0"]["spec"]["volumes"]
    (name,) = [volume["configMap"]["name"] for volume in volumes if "configMap" in volume]
    config_map = await kube.get("ConfigMap", NAMESPACE, name)
    assert config_map
    parallel = msgspec.json.decode(config_map["data"]["decode.json"], type=EngineConfig).parallel
    assert (parallel.enable_expert_parallel, parallel.coordinator) == (True, f"{address}:5560")
    deployment = await kube.get("Deployment", NAMESPACE, "experts-coordinator")
    assert deployment
    assert deployment["spec"]["template"]["spec"]["containers"][0]["command"][0] == "baton-coordinator"
    await experts.condition("Scaling", "Unknown", "CoordinatorUnreachable")

    coordinator = PlayedCoordinator()
    async with coordinator.serve(address):
        # Forms when both have started.
        for pod in ("decode-0", "decode-1"):
            await experts.run(pod, ready=False)
        await coordinator.asked_for("experts-decode-0", "experts-decode-1")
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

        # Grows by a pod; the first try fails.
        await experts.patch({"decode": {"replicas": 3}})
        await experts.names("decode-0", "decode-1", "decode-2")
        await experts.run("decode-2", ready=False)
        await coordinator.asked_for("experts-decode-0", "experts-decode-1", "experts-decode-2")
        await experts.condition("Scaling", "True", "ScalingUp")
        coordinator.fail("decode-2: no memory")
        failed = await experts.condition("Scaling", "False", "ScaleFailed")
        assert "decode-2: no memory" in failed["message"]
        await experts.condition("DecodeReady", "False", "ScaleFailed")
        coordinator.commit()
        await experts.run("decode-2")
        await experts.condition("DecodeReady", "True")

        # Shrinks: the pod stays while it is a rank.
        await experts.patch({"decode": {"replicas": 2}})
        await coordinator.asked_for("experts-decode-0", "experts-decode-1")
        await experts.condition("Scaling", "True", "ScalingDown")
        assert len(await experts.pods()) == 3
        engine = DrainingEngine(unfinished=0)
        runner = await serve_drain("127.201.0.1", engine)
        try:
            coordinator.commit()
            await experts.names("decode-0", "decode-1")
        finally:
            await runner.cleanup()
        await experts.condition("DecodeReady", "True")

        async def told() -> Any:
            events = await kube.list_all("Event", NAMESPACE)
            mine = {event["reason"] for event in events if event["involvedObject"]["name"] == "experts"}
            return {"TopologyOperationStarted", "TopologyOperationFailed", "TopologyOperationEnded"} <= mine

        await eventually(told, "the events of the operations")

    # Nobody is deleted while nothing is known of the topology.
    await experts.patch({"decode": {"replicas": 1}})
    await experts.condition("Scaling", "Unknown", "CoordinatorUnreachable")
    assert len(await experts.pods()) == 2


async def test_the_coordinator_goes_with_the_last_rank(kube: Kube) -> None:
    plain = Cluster(kube, "plain")
    await plain.create(decode={"replicas": 1, "parallelism": {"expert": True}}, drainTimeoutSeconds=0)
    before = await plain.names("decode-0")
    await plain.patch({"decode": {"parallelism": {"expert": False}}})

    async def replaced() -> bool:
        pods = await plain.pods()
        return bool(pods) and all(
            p["metadata"]["uid"] != before["plain-decode-0"]["metadata"]["uid"] for p in pods.values()
        )

    async def gone() -> bool:
        found = [await kube.get(kind, NAMESPACE, "plain-coordinator") for kind in ("Deployment", "Service")]
        return not any(found)

    await eventually(replaced, "the rank to be replaced by an engine of its own")
    await eventually(gone, "the coordinator's Deployment and Service to be deleted")
    status = (await plain.service())["status"]
    assert "topology" not in status["decode"]
    assert "Scaling" not in {condition["type"] for condition in status["conditions"]}


async def test_a_service_comes_up_and_tells_its_story(kube: Kube) -> None:
    demo = Cluster(kube, "demo")
    await demo.create(prefill={}, decode={"replicas": 2}, gateway={"ingress": {"host": "demo.localhost"}})
    pods = await demo.names("prefill-0", "decode-0", "decode-1")
    starting = await demo.condition("Ready", "False", "Starting")
    assert pods["demo-decode-0"]["spec"]["containers"][0]["command"][0] == "baton-engine"
    for pod in ("prefill-0", "decode-0", "decode-1"):
        await demo.run(pod)
    await demo.run_gateway()
    ready = await demo.condition("Ready", "True", "AllGroupsReady")
    assert ready["lastTransitionTime"] >= starting["lastTransitionTime"]
    status = (await demo.service())["status"]
    gateway = await kube.get("Service", NAMESPACE, "demo-gateway")
    assert gateway
    assert status["endpoint"] == f"http://{gateway['spec']['clusterIP']}"
    assert status["ingressEndpoint"] == "http://demo.localhost"
    selector = f"{GROUP}/service=demo,{GROUP}/role=decode"
    assert {"desired": 2, "ready": 2, "replicas": 2, "selector": selector}.items() <= status["decode"].items()
    service = await demo.service()
    assert "finalizers" not in service["metadata"]
    assert "annotations" not in service["metadata"]


async def test_a_steady_service_is_not_written_again(kube: Kube, operator: Operator) -> None:
    steady = Cluster(kube, "steady")
    await steady.create()
    await steady.names("decode-0")
    await steady.run("decode-0")
    await steady.run_gateway()
    await steady.condition("Ready", "True")

    async def versions() -> dict[str, str]:
        kinds = ("LLMService", "Deployment", "Service", "ServiceAccount", "Role", "RoleBinding", "Pod", "ConfigMap")
        objects = [(kind, obj) for kind in kinds for obj in await kube.list_all(kind, NAMESPACE)]
        return {
            f"{kind}/{obj['metadata']['name']}": obj["metadata"]["resourceVersion"]
            for kind, obj in objects
            if obj["metadata"]["name"].startswith("steady")
        }

    before = await versions()
    await operator.look_around(times=4)
    assert await versions() == before


async def test_a_member_drains_before_it_is_deleted(kube: Kube) -> None:
    shrink = Cluster(kube, "shrink")
    await shrink.create(decode={"replicas": 2})
    await shrink.names("decode-0", "decode-1")
    secret = await kube.get("Secret", NAMESPACE, "shrink-key")
    assert secret
    engine = DrainingEngine(unfinished=2, key=service_key.read(secret))
    runner = await serve_drain("127.201.0.2", engine)
    try:
        await shrink.run("decode-0")
        await shrink.run("decode-1", ip="127.201.0.2")
        await shrink.condition("DecodeReady", "True")
        await shrink.patch({"decode": {"replicas": 1}})

        async def draining() -> Any:
            annotations = (await shrink.pods())["shrink-decode-1"]["metadata"].get("annotations", {})
            return annotations.get(f"{GROUP}/draining") == "true"

        await eventually(draining, "decode-1 to be marked as draining")

        async def asked_again() -> bool:
            return engine.asked > 3

        await eventually(asked_again, "the engine to be asked more than once")
        assert "shrink-decode-1" in await shrink.pods(), "deleted with two requests unfinished"
        engine.unfinished = 0
        await shrink.names("decode-0")
        assert engine.refused == 0
    finally:
        await runner.cleanup()


async def test_a_missing_model_is_named_and_heals(kube: Kube) -> None:
    lost = Cluster(kube, "lost")
    await lost.create()
    await lost.names("decode-0")
    await lost.run_gateway()
    await lost.die("decode-0", "loading\nFATAL ModelNotFound: /models/x does not exist\n")
    condition = await lost.condition("Ready", "False", "ModelNotFound")
    assert "/models/x" in condition["message"]

    async def told() -> Any:
        events = await kube.list_all("Event", NAMESPACE)
        return any(e["reason"] == "ModelNotFound" and e["involvedObject"]["name"] == "lost" for e in events)

    await eventually(told, "the event, which follows the status")
    await lost.run("decode-0")
    await lost.condition("Ready", "True")


async def test_a_new_revision_replaces_one_member_at_a_time(kube: Kube, operator: Operator) -> None:
    roll = Cluster(kube, "roll")
    in_place = {"decode": {"maxSurge": 0, "maxUnavailable": 1}}
    await roll.create(decode={"replicas": 2}, drainTimeoutSeconds=0, updateStrategy=in_place)
    old = await roll.names("decode-0", "decode-1")
    for pod in ("decode-0", "decode-1"):
        await roll.run(pod)
    await roll.condition("DecodeReady", "True")
    await roll.patch({"engine": {"maxNumSeqs": 7}})

    def replaced(name: str) -> Callable[[], Any]:
        async def check() -> Any:
            pods = await roll.pods()
            assert len(pods) >= 1
            new = pods.get(name)
            return new and new["metadata"]["uid"] != old[name]["metadata"]["uid"]

        return check

    await eventually(replaced("roll-decode-1"), "decode-1 to be replaced")
    await roll.condition("DecodeReady", "False")
    await operator.look_around(times=3)
    assert (await roll.pods())["roll-decode-0"]["metadata"]["uid"] == old["roll-decode-0"]["metadata"]["uid"]
    await roll.run("decode-1")
    await eventually(replaced("roll-decode-0"), "decode-0 to be replaced")
    await roll.run("decode-0")
    await roll.condition("DecodeReady", "True")

    async def one_configuration() -> Any:
        found = await kube.list_all("ConfigMap", NAMESPACE, {f"{GROUP}/service": "roll", f"{GROUP}/role": "decode"})
        return len(found) == 1

    await eventually(one_configuration, "the old ConfigMap to be collected")


async def test_what_belongs_to_someone_else_is_left_alone(kube: Kube) -> None:
    metadata = {"name": "taken-gateway", "namespace": NAMESPACE}
    ports = [{"port": 1234}]
    await kube.create({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": ports}})
    taken = Cluster(kube, "taken")
    await taken.create()
    condition = await taken.condition("Ready", "False", "NameConflict")
    assert "Service taken-gateway" in condition["message"]
    foreign = await kube.get("Service", NAMESPACE, "taken-gateway")
    assert foreign
    assert foreign["spec"]["ports"][0]["port"] == 1234
    await kube.delete("Service", NAMESPACE, "taken-gateway", foreign["metadata"]["uid"])
    await taken.names("decode-0")


async def test_a_group_whose_pods_are_refused_does_not_hold_up_another(kube: Kube) -> None:
    half = Cluster(kube, "half")
    no_image = {"spec": {"containers": [{"name": "engine", "image": ""}]}}
    await half.create(prefill={"template": no_image}, decode={"replicas": 2})
    await half.names("decode-0", "decode-1")
    condition = await half.condition("Ready", "False", "ReconcileError")
    assert "image" in condition["message"]
    await half.patch({"decode": {"replicas": 1}})
    await half.names("decode-0")


def key_of(pod: Object) -> str:
    """What names the key that a pod was made with."""
    return str(pod["metadata"]["annotations"][f"{GROUP}/service-key"])


async def test_a_service_has_a_key_that_is_drawn_once_and_that_nobody_can_change(kube: Kube) -> None:
    service = Cluster(kube, "secretive")
    await service.create(decode={"replicas": 1})
    await service.names("decode-0")
    drawn = await kube.get("Secret", NAMESPACE, "secretive-key")
    assert drawn is not None
    assert len(bytes.fromhex(base64.b64decode(drawn["data"]["key"]).decode())) == 32
    await service.patch({"decode": {"replicas": 2}})
    await service.names("decode-0", "decode-1")
    assert await kube.get("Secret", NAMESPACE, "secretive-key") == drawn
    with pytest.raises(KubeError, match="immutable"):
        await kube.merge("Secret", NAMESPACE, "secretive-key", {"data": {"key": "eA=="}})


async def test_deleting_the_key_draws_another_and_replaces_all_pods_one_by_one(kube: Kube, operator: Operator) -> None:
    service = Cluster(kube, "rotated")
    await service.create(prefill={}, decode={"replicas": 2}, drainTimeoutSeconds=0)
    old = await service.names("prefill-0", "decode-0", "decode-1")
    for pod in ("prefill-0", "decode-0", "decode-1"):
        await service.run(pod)
    await service.condition("DecodeReady", "True")
    drawn = await kube.get("Secret", NAMESPACE, "rotated-key")
    assert drawn is not None
    await kube.delete("Secret", NAMESPACE, "rotated-key", drawn["metadata"]["uid"])

    async def drawn_anew() -> Any:
        found = await kube.get("Secret", NAMESPACE, "rotated-key")
        return found and found["data"] != drawn["data"]

    await eventually(drawn_anew, "another key")
    old_key = key_of(old["rotated-decode-0"])

    async def decode_pods() -> list[Object]:
        return [pod for name, pod in (await service.pods()).items() if "-decode-" in name]

    async def begun() -> Any:
        return [pod for pod in await decode_pods() if key_of(pod) != old_key]

    await eventually(begun, "a decode pod with another key")
    await operator.look_around(times=3)
    assert [pod for pod in await decode_pods() if key_of(pod) == old_key], "all went although no new one is ready"

    async def done() -> bool:
        pods = await decode_pods()
        for pod in pods:
            if key_of(pod) != old_key and not is_ready(pod):
                await service.run(pod["metadata"]["name"].removeprefix("rotated-"))
        return len(pods) == 2 and all(key_of(pod) != old_key for pod in pods)

    await eventually(done, "all decode pods to be replaced")
    gateway = await kube.get("Deployment", NAMESPACE, "rotated-gateway")
    assert gateway
    assert key_of(gateway["spec"]["template"]) != old_key


async def test_somebody_elses_secret_is_neither_used_nor_changed(kube: Kube) -> None:
    foreign = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "lent-key", "namespace": NAMESPACE},
        "data": {"key": base64.b64encode(b"theirs").decode()},
    }
    await kube.create(foreign)
    service = Cluster(kube, "lent")
    await service.create(prefill={}, decode={"replicas": 1})
    condition = await service.condition("Ready", "False", "NameConflict")
    assert "Secret lent-key" in condition["message"]
    assert await service.pods() == {}
    found = await kube.get("Secret", NAMESPACE, "lent-key")
    assert found is not None
    assert found["data"] == foreign["data"]


async def test_a_secret_of_ours_without_a_key_is_told(kube: Kube) -> None:
    service = Cluster(kube, "keyless")
    await service.create()
    await service.names("decode-0")
    drawn = await kube.get("Secret", NAMESPACE, "keyless-key")
    assert drawn is not None
    emptied = {"metadata": {key: drawn["metadata"][key] for key in ("name", "namespace", "ownerReferences")}}
    await kube.delete("Secret", NAMESPACE, "keyless-key", drawn["metadata"]["uid"])
    try:
        await kube.create({"apiVersion": "v1", "kind": "Secret", **emptied})
    except KubeError:  # the operator was faster
        again = await kube.get("Secret", NAMESPACE, "keyless-key")
        assert again is not None
        await kube.delete("Secret", NAMESPACE, "keyless-key", again["metadata"]["uid"])
        await kube.create({"apiVersion": "v1", "kind": "Secret", **emptied})
    condition = await service.condition("Ready", "False", "ServiceKeyUnusable")
    assert "keyless-key" in condition["message"]
    assert "delete it" in condition["message"]


async def test_a_template_that_takes_away_the_pod_is_named(kube: Kube) -> None:
    bad = Cluster(kube, "badtemplate")
    await bad.create(decode={"template": {"spec": "none"}})
    condition = await bad.condition("Ready", "False", "InvalidSpec")
    assert "template: spec" in condition["message"]


async def test_what_an_older_api_server_would_have_let_pass_is_named(kube: Kube) -> None:
    """Before Kubernetes 1.25 schemas have no rules: what is stored there meets those of the operator."""
    definition = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/llmservices.serving.baton.dev"
    bad = Cluster(kube, "brokenrule")
    await bad.create()
    await bad.names("decode-0")
    await kube._request("PUT", definition, body=await with_rules(kube, definition, False))
    try:
        await bad.patch({"gateway": {"limits": {"maxConcurrentPerKey": 1}}})
        condition = await bad.condition("Ready", "False", "InvalidSpec")
    finally:
        await kube._request("PUT", definition, body=await with_rules(kube, definition, True))
    assert "gateway: limits.maxConcurrentPerKey needs apiKeys" in condition["message"]
    assert "brokenrule-decode-0" in await bad.pods(), "what runs is left as it is"


async def test_a_route_waits_for_the_gateway_api_and_nothing_else_does(kube: Kube) -> None:
    routed = Cluster(kube, "routed")
    await routed.create(gateway={"httpRoute": {"parentRefs": [{"name": "public"}], "hostnames": ["a.example"]}})
    condition = await routed.condition("Ready", "False", "GatewayAPIMissing")
    assert "spec.gateway.httpRoute" in condition["message"]
    await routed.names("decode-0")
    await kube._request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", body=ROUTES)

    async def route() -> Object | None:
        return await kube.get("HTTPRoute", NAMESPACE, "routed-gateway")

    async def written() -> Any:
        return await route()

    found = await eventually(written, "the route to be written")
    assert found["spec"]["hostnames"] == ["a.example"]
    await routed.patch({"gateway": {"httpRoute": None}})

    async def gone() -> bool:
        return await route() is None

    await eventually(gone, "the route to be deleted")


async def with_rules(kube: Kube, path: str, rules: bool) -> Object:
    """The stored definition, its schema with or without rules."""
    stored: Object = await kube._request("GET", path)
    stored["spec"]["versions"] = custom_resource_definition(rules=rules)["spec"]["versions"]
    return stored


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"model": {}}, "spec.model.uri"),
        ({"model": {"uri": "ftp://host/x"}}, "spec.model.uri"),
        ({"decode": {"replicas": -1}}, "spec.decode.replicas"),
        ({"decode": {"parallelism": {"tensor": 0}}}, "spec.decode.parallelism.tensor"),
        ({"decode": {"parallelism": {"redundantExperts": -1}}}, "spec.decode.parallelism.redundantExperts"),
        ({"engine": {"kvCacheMemory": "lots"}}, "spec.engine.kvCacheMemory"),
        ({"kvTransfer": {"transport": "pigeon"}}, "spec.kvTransfer.transport"),
    ],
)
async def test_a_wrong_spec_is_refused_by_field(kube: Kube, spec: Object, field: str) -> None:
    with pytest.raises(KubeError, match=field.replace(".", r"\.")) as refused:
        await Cluster(kube, "wrong").create(**spec)
    assert refused.value.status == 422


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_kubectl_applies_the_generated_files_as_they_are(kubeconfigs: dict[str, Path], operator: Operator) -> None:
    manifests = Path(__file__).parents[3] / "manifests"
    for path in ("crd", "rbac", "operator.yaml"):
        # Servers before 1.25 know no rules in schemas, and validation refuses them.
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
    assert columns.split() == ["NAME", "READY", "REASON", "PREFILL", "DECODE", "ENDPOINT", "AGE"]
