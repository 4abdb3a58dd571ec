"""A service on a simulated cluster: API server, nodes, engines and coordinator; and the real Reconciler on it, which reads through
the real cache that the real watches fill."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from service_checks import StepChecks, is_rank
from simulated_api_server import NAMESPACE, ApiServer, Crash, Fault, SimulatedKube, service_path
from simulated_coordinator import Coordinator
from simulated_loop import SimulatedLoop
from simulated_nodes import MEMBER_NAME, Nodes
from simulated_watches import Wire

from baton_operator import names
from baton_operator.api import decode_spec
from baton_operator.builders.owner import controlled_by
from baton_operator.kube import KubeError
from baton_operator.observe import member
from baton_operator.reconcile import Reconciler
from baton_operator.watch import FILL_TIMEOUT_S, Watches
from baton_operator.workqueue import Key

Object = dict[str, Any]
NAME = "demo"
KEY = Key(NAMESPACE, NAME)
WATCHED = ["LLMService", "Pod", "ConfigMap", "Deployment", "Service"]
"""Kinds on which most depends."""
RESYNC_S = 300.0
ROUND_S = 6.0
ROUNDS = 200


class Service:
    """One LLMService and all around it. `reconcile` checks what must hold at every step, `settle` what must hold in the end."""

    def __init__(self) -> None:
        self.server = ApiServer()
        self.nodes = Nodes(self.server)
        self.coordinator = Coordinator(started=self._started_ranks, clock=self.server.seconds)
        self.silent: set[str] = set()
        """Addresses of engines that do not answer."""
        self.lost_events = False
        """Without a word."""
        self._checks = StepChecks(self.server)
        self._operator_starts()
        self._foreign = self.server.put(
            {
                "metadata": {
                    "name": "foreign",
                    "labels": {names.LABEL_SERVICE: NAME, names.LABEL_ROLE: "decode", names.LABEL_MEMBER: "true"},
                },
                "spec": {"containers": [{"name": "c", "image": "i"}]},
            },
            "pods",
        )

    def close(self) -> None:
        self._operator_ends()

    # The user

    def create(self, spec: Object) -> None:
        body = {
            "apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": NAME, "namespace": NAMESPACE},
            "spec": spec,
        }  # fmt: skip
        self.server.request("POST", service_path(), body, {}, "application/json")

    def patch(self, spec: Object) -> None:
        self.server.request("PATCH", service_path(NAME), {"spec": spec}, {}, "application/merge-patch+json")

    def delete(self) -> None:
        self.server.request("DELETE", service_path(NAME), None, {}, "application/json")

    def object(self) -> Object:
        return dict(self.server.request("GET", service_path(NAME), None, {}, ""))

    @property
    def exists(self) -> bool:
        return bool(self.server.list(f"{names.PLURAL}.{names.GROUP}"))

    # The operator

    def _operator_starts(self) -> None:
        """A process that knows nothing."""
        drainer: Any = self
        coordinator: Any = self.coordinator
        self.kube, self._loop = SimulatedKube(self.server), SimulatedLoop(self.server.seconds)
        self._due, self._revisit_at = True, float("inf")
        self._resync_at = self.server.seconds() + RESYNC_S
        self._loop.run(self.kube.discover())
        self.kube.open_stores(lambda key: setattr(self, "_due", True))
        watches = Watches(self.kube, [], RESYNC_S)
        self._watching = self._loop.create_task(watches.run())
        filled = self._loop.create_task(watches.filled())
        self._loop.run_until_idle()
        if not filled.done():
            self.passes(FILL_TIMEOUT_S)
            self._loop.run_until_idle()
        filled.result()
        self._reconciler = Reconciler(self.kube, drainer, coordinator, clock=lambda: self.server.now)

    def _operator_ends(self) -> None:
        self.kube.lives = False
        self._loop.end()

    def operator_restarts(self) -> None:
        self._operator_ends()
        self._operator_starts()

    async def drain(self, host: str, key: Any = None) -> int | None:
        """What the engine at `host` answers."""
        return None if host in self.silent else self.nodes.unfinished.get(host, 0)

    def wire(self, kind: str) -> Wire:
        """What carries the events of `kind`."""
        return self.server.wire(self.kube.resource(kind))

    def events_come(self) -> None:
        """Those that are on their way."""
        self._loop.run_until_idle()
        assert not self._watching.done(), "the watches ended"

    @property
    def is_current(self) -> bool:
        """The cache shows what is."""
        matches = {names.LABEL_MANAGED_BY: names.MANAGER}.items()
        for kind, store in self.kube.stores.items():
            shown = {obj["metadata"]["name"]: obj["metadata"]["resourceVersion"] for obj in store.all(NAMESPACE)}
            items = self.server.request("GET", self.kube.path(kind, NAMESPACE), None, {}, "")["items"]
            if kind != names.KIND:
                items = [obj for obj in items if matches <= (obj["metadata"].get("labels") or {}).items()]
            if shown != {obj["metadata"]["name"]: obj["metadata"]["resourceVersion"] for obj in items}:
                return False
        return True

    def reconcile(
        self,
        faults: dict[int, Fault] | None = None,
        meanwhile: dict[int, Callable[[], None]] | None = None,
        *,
        hit_writes: bool = False,
        delays: list[int] | None = None,
        told: bool = True,
    ) -> bool:
        """One step of the operator. False: it failed or crashed, and a new one has begun.

        Args:
            faults, hit_writes: see SimulatedKube.
            meanwhile, delays: see SimulatedKube.begin.
            told: the events on their way come before.
        """
        if told:
            self.events_come()
        before = self._by_name()
        ranks = list(self.coordinator.ranks)
        self.kube.begin(faults or {}, meanwhile or {}, hit_writes=hit_writes, delays=delays or [0])
        undisturbed = not faults and not meanwhile and self.is_current
        kube, self._due, self._revisit_at = self.kube, False, float("inf")
        try:
            revisit_s = self._loop.run(self._reconciler.reconcile(KEY))
            self._revisit_at = self.server.seconds() + revisit_s if revisit_s is not None else float("inf")
            went_well = undisturbed
        except Crash:
            self.operator_restarts()
            went_well = False
        except (KubeError, OSError):
            assert not undisturbed, "nothing was wrong with the API server"
            self._due, went_well = True, False
        self._check(kube, before, ranks, went_well)
        return went_well

    def _check(self, kube: SimulatedKube, before: dict[str, Object], ranks: list[str], went_well: bool) -> None:
        name = self._foreign["metadata"]["name"]
        assert self.server.get("pods", name) == self._foreign, "somebody else's pod was touched"
        self.server.cluster.collector.drain()
        self._checks.after(kube, before, self._by_name(), ranks, went_well)

    def _by_name(self) -> dict[str, Object]:
        return {pod["metadata"]["name"]: pod for pod in self.pods()}

    # The cluster

    def pods(self) -> list[Object]:
        """Members of the service."""
        return self.nodes.pods()

    def passes(self, seconds: float) -> None:
        self.server.now += timedelta(seconds=seconds)

    def _started_ranks(self) -> dict[str, str]:
        started = {pod["metadata"]["name"]: pod for pod in self.pods() if is_rank(pod) and member(pod).serving}
        return {name: pod["metadata"]["uid"] for name, pod in started.items() if member(pod).deletion is None}

    def world(self, moves: Callable[[], bool], seconds: float) -> None:
        """Time passes; each thing that can move on does so, or not."""
        self.passes(seconds)
        of_services = [pod for pod in self.server.list("pods") if MEMBER_NAME.search(pod["metadata"]["name"])]
        for pod in of_services:
            if names.LABEL_MEMBER in pod["metadata"]["labels"] and moves():
                self.nodes.kubelet(pod)
        if moves():
            self.nodes.deployments()
        if moves():
            self.coordinator.step(found=moves())

    # The end

    def settle(self) -> None:
        """From here on everything goes well, and the operator looks when it has a reason to. Raises AssertionError if the service
        does not become what it should be."""
        self.silent.clear()
        self.nodes.unfinished.clear()
        self.coordinator.returns()
        self.coordinator.refuses = self.coordinator.loses = 0
        for kind in self.kube.stores:
            self.wire(kind).mended()
        for _ in range(ROUNDS):
            self.events_come()
            version = self.server.cluster.store.version
            if self._is_due():
                self.reconcile()
            self.world(lambda: True, ROUND_S)
            if self.server.cluster.store.version == version and self._is_settled():
                break
        else:
            raise AssertionError(f"not settled within {ROUNDS} rounds: {self.describe()}")
        self._check_end()
        self.lost_events = False
        for _ in range(2):
            self.reconcile()
            assert not self.kube.writes, f"at rest, {self.kube.writes} were written"
            self.operator_restarts()
            self.events_come()

    def _is_due(self) -> bool:
        now = self.server.seconds()
        if self.lost_events and now >= self._resync_at:
            self._resync_at, self._due = now + RESYNC_S, True
        return self._due or now >= self._revisit_at

    def _is_settled(self) -> bool:
        conditions = (self.object().get("status") or {}).get("conditions") or []
        reasons = {each["type"]: each["reason"] for each in conditions}
        right = reasons.get("Ready") in ("AllGroupsReady", "ScaledToZero") and reasons["Updating"] == "UpToDate"
        told = all(each["observedGeneration"] == self.object()["metadata"]["generation"] for each in conditions)
        return right and told and self.is_current

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
        if spec.decode.parallelism.expert:
            assert sorted(self.coordinator.ranks) == sorted(m.name for m in members if "-decode-" in m.name)
        self._check_orphans(service["metadata"]["uid"])

    def _check_orphans(self, uid: str) -> None:
        """All that is labelled as the operator's belongs to the service or to one of its Deployments."""
        deployments = [d["metadata"]["uid"] for d in self.server.list("deployments.apps") if controlled_by(d, uid)]
        for storage, obj in self.server.cluster.store:
            labels = obj["metadata"].get("labels") or {}
            if labels.get(names.LABEL_MANAGED_BY) == names.MANAGER:
                owned = any(controlled_by(obj, each) for each in (uid, *deployments))
                assert owned, f"an orphan: {storage} {obj['metadata']['name']}"

    def describe(self) -> str:
        status = self.object().get("status", {}) if self.exists else None
        return f"{[member(pod) for pod in self.pods()]}\n{status}\ncurrent: {self.is_current}"


@contextlib.contextmanager
def settled(spec: Object) -> Iterator[Service]:
    """A service with all its pods, which serve."""
    with contextlib.closing(Service()) as service:
        service.create(spec)
        service.settle()
        yield service
