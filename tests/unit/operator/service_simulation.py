"""A service on a simulated cluster: API server, scheduler, kubelets, Deployment controller, engines and coordinator; and the real
Reconciler on it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from simulated_api_server import NAMESPACE, ApiServer, Crash, Fault, SimulatedKube, service_path

from baton_engine.protocol.topology import MemberStatus, RankPhase, TopologyRequest, TopologyStatus
from baton_operator import names
from baton_operator.api import decode_spec
from baton_operator.api_update import surge_and_unavailable
from baton_operator.builders.owner import controlled_by
from baton_operator.kube import KubeError
from baton_operator.observe import member
from baton_operator.plan import STUCK_TERMINATING, Member
from baton_operator.reconcile import Reconciler
from baton_operator.workqueue import Key

Object = dict[str, Any]
NAME = "demo"
KEY = Key(NAMESPACE, NAME)
BROKEN = {"name": "BROKEN", "value": "1"}
"""In a template: its pods never become ready."""
ROUND_S = 6.0
ROUNDS = 200


@dataclass
class Coordinator:
    """Of ranks: what is asked for is so as soon as all have started, when `step` is called."""

    generation: int = 0
    asked_for: list[str] = field(default_factory=list)
    ranks: list[str] = field(default_factory=list)
    started: Callable[[], dict[str, str]] = dict
    """Ranks that run: name -> instance."""

    async def topology(self, host: str, key: Any = None) -> TopologyStatus:
        running = self.started()
        self.ranks = [name for name in self.ranks if name in running]
        members = [
            MemberStatus(
                name=name,
                instance_id=instance,
                phase=RankPhase.SERVING if name in self.ranks else RankPhase.STANDBY,
                rank=self.ranks.index(name) if name in self.ranks else None,
            )
            for name, instance in running.items()
        ]
        return TopologyStatus(generation=self.generation, desired=sorted(self.asked_for), members=members)

    async def ask_for(self, host: str, request: TopologyRequest, key: Any = None) -> TopologyStatus:
        self.asked_for = list(request.members)
        return await self.topology(host)

    def step(self) -> None:
        running = self.started()
        ready = [name for name in self.asked_for if name in running]
        if ready and ready != self.ranks:
            self.generation, self.ranks = self.generation + 1, ready


class Service:
    """One LLMService and all around it. `reconcile` checks what must hold at every step, `settle` what must hold in the end."""

    def __init__(self) -> None:
        self.server = ApiServer()
        self.kube = SimulatedKube(self.server)
        self.coordinator = Coordinator(started=self._started_ranks)
        self.unfinished: dict[str, int] = {}
        """By address: requests of an engine."""
        self.silent: set[str] = set()
        """Addresses of engines that do not answer."""
        self.capacity = 100
        """Member pods that the nodes have room for."""
        self._addresses = (f"10.1.{n // 250}.{n % 250 + 1}" for n in itertools.count())
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self.kube.discover())
        self._operator_starts()
        self._foreign = [
            self.server.put(
                {
                    "metadata": {
                        "name": "foreign",
                        "labels": {names.LABEL_SERVICE: NAME, names.LABEL_ROLE: "decode", names.LABEL_MEMBER: "true"},
                    },
                    "spec": {"containers": [{"name": "c", "image": "i"}]},
                },
                "pods",
            )
        ]

    def close(self) -> None:
        self._loop.close()

    # The user

    def create(self, spec: Object) -> None:
        body = {
            "apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": NAME, "namespace": NAMESPACE},
            "spec": spec,
        }  # fmt: skip
        self.server.request("POST", service_path(), body, {}, "application/json")
        self._edited()

    def patch(self, spec: Object) -> None:
        self.server.request("PATCH", service_path(NAME), {"spec": spec}, {}, "application/merge-patch+json")
        self._edited()

    def delete(self) -> None:
        self.server.request("DELETE", service_path(NAME), None, {}, "application/json")

    def object(self) -> Object:
        return dict(self.server.request("GET", service_path(NAME), None, {}, ""))

    @property
    def exists(self) -> bool:
        return bool(self.server.list(f"{names.PLURAL}.{names.GROUP}"))

    def _edited(self) -> None:
        """A new period, in which the spec stays."""
        self._period = {pod["metadata"]["name"]: pod for pod in self.pods()}
        self._departed: list[Object] = []
        self._revisions: dict[str, str] = {}
        self._most: dict[str, int] = {}

    # The operator

    def _operator_starts(self) -> None:
        drainer: Any = self
        coordinator: Any = self.coordinator
        self._reconciler = Reconciler(self.kube, drainer, coordinator, clock=lambda: self.server.now)

    async def drain(self, host: str, key: Any = None) -> int | None:
        """What the engine at `host` answers."""
        return None if host in self.silent else self.unfinished.get(host, 0)

    def reconcile(self, faults: dict[int, Fault] | None = None, *, hit_writes: bool = False) -> bool:
        """One step of the operator. False: it failed or crashed, and a new one has begun."""
        before = {pod["metadata"]["name"]: pod for pod in self.pods()}
        self.kube.requests, self.kube.writes = 0, []
        self.kube.faults, self.kube.faults_hit_writes = faults or {}, hit_writes
        try:
            self._loop.run_until_complete(self._reconciler.reconcile(KEY))
            went_well = not faults
        except Crash:
            self._operator_starts()
            went_well = False
        except (KubeError, OSError):
            assert faults, "nothing was wrong with the API server"
            went_well = False
        self.kube.faults = {}
        self._check(before, went_well)
        return went_well

    def _check(self, before: dict[str, Object], went_well: bool) -> None:
        for foreign in self._foreign:
            assert self.server.get("pods", foreign["metadata"]["name"]) == foreign, "somebody else's pod was touched"
        if not self.exists:
            assert not self.kube.writes, "a service that is gone"
            return
        service = self.object()
        spec = decode_spec(service["spec"])
        after = {pod["metadata"]["name"]: pod for pod in self.pods()}
        for role, group in (("prefill", spec.prefill), ("decode", spec.decode)):
            desired = group.replicas if group else 0
            strategy = spec.update_strategy.decode if role == "decode" else spec.update_strategy.prefill
            surge, unavailable = surge_and_unavailable(strategy, desired)
            is_group = role == "decode" and (spec.decode.parallelism.expert or any(map(_is_rank, before.values())))
            old = [member(pod) for pod in before.values() if _role(pod) == role]
            new = [member(pod) for pod in after.values() if _role(pod) == role]
            alive, now = self._alive(old), self._alive(new)
            grown = len(now) > len(alive)
            if spec.paused:
                assert len(now) <= max(len(alive), desired + surge), f"{role}: more in a pause"
            elif grown:
                assert len(now) <= max(desired + max(surge, 1 if is_group else 0), len(alive) + is_group), (
                    f"{role}: more than {desired} and a surge of {surge}: {[m.name for m in now]}"
                )
            if is_group:
                continue  # ranks serve, not pods: expert_group_simulation.py
            taken = [m for m in old if _healthy(m) and not _healthy_in(new, m)]
            if taken and not spec.paused:
                waits = self._waits_for_room(old, timedelta(seconds=strategy.surge_timeout_seconds))
                wanted = desired - max(unavailable, 1 if waits else 0)
                left = sum(_healthy(m) for m in new)
                assert left >= wanted, f"{role}: {left} of {desired} serve, {[m.name for m in taken]} were taken"
            if spec.paused:
                assert len(taken) <= max(0, sum(map(_stays, old)) - desired), f"{role}: taken away in a pause"
            self._departed += [before[m.name] for m in taken]
        if went_well:
            self._check_departed(service, spec)

    def _check_departed(self, service: Object, spec: Any) -> None:
        """Nobody of the newest revision who served left, but for a smaller size."""
        for role in ("prefill", "decode"):
            told = (service.get("status") or {}).get(role) or {}
            newest, desired = told.get("revision"), told.get("desired", 0)
            self._most[role] = max(self._most.get(role, 0), desired)
            if newest is None or self._revisions.setdefault(role, newest) != newest:
                continue
            at_first = [member(pod) for pod in self._period.values() if _role(pod) == role]
            surplus = sum(m.revision == newest and _stays(m) for m in at_first) - desired
            gone = [pod for pod in self._departed if _role(pod) == role and member(pod).revision == newest]
            assert len(gone) <= max(0, surplus), (
                f"{role}: {[pod['metadata']['name'] for pod in gone]} had no reason to go"
            )

    def _alive(self, members: list[Member]) -> list[Member]:
        return [m for m in members if m.deletion is None or self.server.now < m.deletion + STUCK_TERMINATING]

    def _waits_for_room(self, members: list[Member], patience: timedelta) -> bool:
        return any(m.no_room_since and self.server.now >= m.no_room_since + patience for m in members)

    # The cluster

    def pods(self) -> list[Object]:
        """Members of the service."""
        services = self.server.list(f"{names.PLURAL}.{names.GROUP}")
        uids = [service["metadata"]["uid"] for service in services]
        return [pod for pod in self.server.list("pods") if any(controlled_by(pod, uid) for uid in uids)]

    def passes(self, seconds: float) -> None:
        self.server.now += timedelta(seconds=seconds)

    def kubelet(self, pod: Object) -> None:
        """The next thing that happens to a member."""
        name, now = pod["metadata"]["name"], self.server.now
        observed = member(pod)
        if observed.deletion is not None:
            self.server.remove("pods", name)
        elif observed.failed:
            return
        elif not pod["spec"].get("nodeName"):
            bound = sum(bool(each["spec"].get("nodeName")) for each in self.pods())
            if bound < self.capacity:
                self._bind(name)
            elif observed.no_room_since is None:
                self._no_room(name, now)
        elif not observed.serving:
            self._run(name, next(self._addresses), ready=False)
        elif not observed.ready and BROKEN not in pod["spec"]["containers"][0]["env"]:
            self._run(name, pod["status"]["podIP"], ready=True)
        elif (left := self.unfinished.get(pod["status"].get("podIP", ""), 0)) > 0:
            self.unfinished[pod["status"]["podIP"]] = left - 1

    def _bind(self, name: str) -> None:
        def bind(pod: Object) -> None:
            pod["spec"]["nodeName"] = "node"
            pod["status"] = {**pod.get("status", {}), "conditions": [{"type": "PodScheduled", "status": "True"}]}

        self.server.edit("pods", name, bind)

    def _no_room(self, name: str, now: datetime) -> None:
        condition = {
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.", "lastTransitionTime": now.isoformat(),
        }  # fmt: skip

        def say(pod: Object) -> None:
            pod["status"] = {**pod.get("status", {}), "conditions": [condition]}

        self.server.edit("pods", name, say)

    def _run(self, name: str, address: str, *, ready: bool) -> None:
        container = {
            "name": "engine", "restartCount": 0, "ready": ready, "started": True,
            "state": {"running": {"startedAt": datetime(2020, 1, 1, tzinfo=UTC).isoformat()}},
        }  # fmt: skip
        condition = {"type": "Ready", "status": "True" if ready else "False"}

        def run(pod: Object) -> None:
            pod["status"] = {
                "phase": "Running", "podIP": address, "containerStatuses": [container], "conditions": [condition],
            }  # fmt: skip

        self.server.edit("pods", name, run)

    def container_dies(self, name: str) -> None:
        def die(pod: Object) -> None:
            status = pod.get("status") or {}
            for container in status.get("containerStatuses") or []:
                container |= {"started": False, "ready": False, "restartCount": container["restartCount"] + 1}
                container["state"] = {"waiting": {"reason": "CrashLoopBackOff"}}
            status["conditions"] = [{"type": "Ready", "status": "False"}]

        self.server.edit("pods", name, die)

    def pod_fails(self, name: str) -> None:
        def fail(pod: Object) -> None:
            pod["status"] = {**pod.get("status", {}), "phase": "Failed", "conditions": []}

        self.server.edit("pods", name, fail)

    def pod_vanishes(self, name: str) -> None:
        self.server.remove("pods", name)

    def deployments(self) -> None:
        """The Deployment controller, and the kubelet for its pods, at once."""
        for deployment in self.server.list("deployments.apps"):
            spec, metadata = deployment["spec"], deployment["metadata"]
            template = spec["template"]
            wanted = names.content_hash(template)
            mine = [pod for pod in self.server.list("pods") if controlled_by(pod, metadata["uid"])]
            current = [pod for pod in mine if pod["metadata"]["labels"].get("hash") == wanted]
            for pod in [each for each in mine if each not in current] + current[spec["replicas"] :]:
                self.server.remove("pods", pod["metadata"]["name"])
            for _ in range(spec["replicas"] - len(current)):
                reference = {
                    "apiVersion": "apps/v1", "kind": "Deployment", "name": metadata["name"], "uid": metadata["uid"],
                    "controller": True,
                }  # fmt: skip
                pod = self.server.put(
                    {
                        "metadata": {
                            "generateName": f"{metadata['name']}-",
                            "labels": {**template["metadata"]["labels"], "hash": wanted},
                            "ownerReferences": [reference],
                        },
                        "spec": template["spec"],
                    },
                    "pods",
                )
                self._run(pod["metadata"]["name"], next(self._addresses), ready=True)

            def report(obj: Object, replicas: int = spec["replicas"]) -> None:
                seen = obj["metadata"]["generation"]
                obj["status"] = {"observedGeneration": seen, "replicas": replicas, "updatedReplicas": replicas}

            if (deployment.get("status") or {}).get("observedGeneration") != metadata["generation"]:
                self.server.edit("deployments.apps", metadata["name"], report)

    def _started_ranks(self) -> dict[str, str]:
        started = {pod["metadata"]["name"]: pod for pod in self.pods() if _is_rank(pod) and member(pod).serving}
        return {name: pod["metadata"]["uid"] for name, pod in started.items() if member(pod).deletion is None}

    def world(self, moves: Callable[[], bool], seconds: float) -> None:
        """Time passes; each thing that can move on does so, or not."""
        self.passes(seconds)
        of_services = [pod for pod in self.server.list("pods") if pod["metadata"]["name"].startswith(f"{NAME}-")]
        for pod in of_services:
            if names.LABEL_MEMBER in pod["metadata"]["labels"] and moves():
                self.kubelet(pod)
        if moves():
            self.deployments()
        if moves():
            self.coordinator.step()

    # The end

    def settle(self) -> None:
        """From here on everything goes well. Raises AssertionError if the service does not become what it should be."""
        self.silent.clear()
        self.unfinished.clear()
        for _ in range(ROUNDS):
            self.reconcile()
            quiet = not self.kube.writes
            before = self.server.cluster.store.version
            self.world(lambda: True, ROUND_S)
            if quiet and self.server.cluster.store.version == before and self._is_settled():
                break
        else:
            raise AssertionError(f"not settled within {ROUNDS} rounds: {self.describe()}")
        self._check_end()

    def _is_settled(self) -> bool:
        conditions = (self.object().get("status") or {}).get("conditions") or []
        reasons = {each["type"]: each["reason"] for each in conditions}
        return reasons.get("Ready") in ("AllGroupsReady", "ScaledToZero") and reasons["Updating"] == "UpToDate"

    def _check_end(self) -> None:
        service = self.object()
        status, spec = service["status"], decode_spec(service["spec"])
        members = [member(pod) for pod in self.pods()]
        conditions = {each["type"]: each for each in status["conditions"]}
        for role in names.MEMBER_ROLES:
            mine = [m for m in members if f"-{role}-" in m.name]
            assert len(mine) == status[role]["desired"], self.describe()
            assert all(m.ready and not m.draining and m.revision == status[role]["revision"] for m in mine)
            assert status[role]["updated"] == status[role]["ready"] == status[role]["desired"]
        reason = "AllGroupsReady" if spec.decode.replicas else "ScaledToZero"
        assert conditions["Ready"]["reason"] == reason, conditions
        assert conditions["Updating"]["reason"] == "UpToDate", conditions
        volumes = [v for pod in self.server.list("pods") for v in pod["spec"].get("volumes") or []]
        used = {volume["configMap"]["name"] for volume in volumes if "configMap" in volume}
        made = {obj["metadata"]["name"] for obj in self.server.list("configmaps") if obj["metadata"].get("labels")}
        assert used <= made, "a pod's configuration is missing"
        roles = {"prefill", "decode", "gateway"} if spec.prefill else {"decode", "gateway"}
        assert len(made) == len(roles), f"configurations that nobody needs: {made}"
        coordinators = [d for d in self.server.list("deployments.apps") if "coordinator" in d["metadata"]["name"]]
        assert bool(coordinators) == spec.decode.parallelism.expert

    def describe(self) -> str:
        status = self.object().get("status", {}) if self.exists else None
        return f"{[member(pod) for pod in self.pods()]}\n{status}"


def _role(pod: Object) -> str:
    return str(pod["metadata"]["labels"][names.LABEL_ROLE])


def _is_rank(pod: Object) -> bool:
    return names.ANNOTATION_EXPERT_GROUP in (pod["metadata"].get("annotations") or {})


def _stays(m: Member) -> bool:
    return m.deletion is None and not m.failed and not m.draining


def _healthy(m: Member) -> bool:
    return _stays(m) and m.ready


def _healthy_in(members: list[Member], m: Member) -> bool:
    return any(each.name == m.name and _healthy(each) for each in members)
