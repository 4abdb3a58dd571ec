"""A service on a simulated cluster, with the real operator.

For the tests of the Reconciler.

The API server, nodes, engines and the coordinator are simulated. kopf, the handlers, the controller
and the Reconciler are real. The event loop has a simulated clock: it runs everything that is due,
and never waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Callable, Coroutine, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import kopf

from baton_kube.client import KubeError, Object
from baton_operator import handlers as handlers  # registers them
from baton_operator import names
from baton_operator.api.llmservice import decode_spec
from baton_operator.builders.resolved_service import controlled_by
from baton_operator.builders.restrictions import Restrictions
from baton_operator.kube.objects import Kube
from baton_operator.names import Key
from baton_operator.observe.freshness import Freshness
from baton_operator.observe.observation import member
from baton_operator.process.operator_metrics import Metrics
from baton_operator.process.runtime import Runtime
from baton_operator.process.watch_session import WatchSession
from baton_operator.reconcile.controller import Outcome
from baton_operator.reconcile.reconciler import Reconciler
from support.operator.simulation.api_server import (
    NAMESPACE,
    ApiServer,
    Crash,
    Fault,
    SimulatedClient,
    service_path,
)
from support.operator.simulation.coordinator import Coordinator
from support.operator.simulation.nodes import MEMBER_NAME, Nodes
from support.operator.simulation.service_checks import StepChecks, is_rank
from support.operator.simulation.watches import Wire

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """A selector that calls `idle()` instead of waiting when nothing is due."""

    idle: Callable[[], None]

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout > 0:
            self.idle()
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop on a simulated clock.

    Args:
        clock: returns seconds. Tests advance it between runs.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._simulated_clock = clock
        self._ended_s = 0.0
        selector = _Selector()
        selector.idle = self.stop
        super().__init__(selector)

    def time(self) -> float:
        return self._simulated_clock() + self._ended_s

    def run_until_idle(self) -> None:
        """Run everything that is due at the current simulated time."""
        self.run_forever()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, and return its result.

        Raises:
            RuntimeError: the coroutine waits for something that is not due.
        """
        return self.run_until_complete(work)

    def end(self) -> None:
        """Wait up to 100 s of simulated time until all tasks have ended, then close the loop."""
        while asyncio.all_tasks(self) and self._ended_s < 100.0:
            self.run_until_idle()
            self._ended_s += 10.0
        assert not asyncio.all_tasks(self), asyncio.all_tasks(self)
        self.close()


NAME = "demo"
KEY = Key(NAMESPACE, NAME)
#: Kinds whose watches fail in tests.
WATCHED = ["LLMService", "Pod", "ConfigMap", "Deployment", "Service"]
RESYNC_S = 300.0
ROUND_S = 6.0
ROUNDS = 200


class Service:
    """An LLMService and its cluster. `reconcile()` checks each step, `settle()` the final state.

    Args:
        restrictions: what the service may request. None: everything. A change has an effect when
            the operator restarts.
    """

    def __init__(self, restrictions: Restrictions | None = None) -> None:
        self.restrictions = restrictions
        self.server = ApiServer()
        self.nodes = Nodes(self.server)
        self.coordinator = Coordinator(started=self._started_ranks, clock=self.server.seconds)
        #: Addresses of engines that do not answer.
        self.silent: set[str] = set()
        #: Events that are lost silently.
        self.lost_events = False
        self._checks = StepChecks(self.server)
        self._operator_starts()
        self._foreign = self.server.put(
            {
                "metadata": {
                    "name": "foreign",
                    "labels": {
                        names.LABEL_SERVICE: NAME,
                        names.LABEL_ROLE: "decode",
                        names.LABEL_MEMBER: "true",
                    },
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
            "apiVersion": names.API_VERSION, "kind": names.KIND,
            "metadata": {"name": NAME, "namespace": NAMESPACE},
            "spec": spec,
        }  # fmt: skip
        self.server.request("POST", service_path(), body, {}, "application/json")

    def patch(self, spec: Object) -> None:
        self.server.request(
            "PATCH", service_path(NAME), {"spec": spec}, {}, "application/merge-patch+json"
        )

    def delete(self) -> None:
        self.server.request("DELETE", service_path(NAME), None, {}, "application/json")

    def object(self) -> Object:
        return dict(self.server.request("GET", service_path(NAME), None, {}, ""))

    @property
    def exists(self) -> bool:
        return bool(self.server.list(f"{names.PLURAL}.{names.GROUP}"))

    # The operator

    def _operator_starts(self) -> None:
        """Start a new operator process without state."""
        self.client, self._loop = SimulatedClient(self.server), SimulatedLoop(self.server.seconds)
        self._revisit_at = float("inf")
        self._resync_at = self.server.seconds() + RESYNC_S
        self._error: Exception | None = None
        self._loop.run(self._start())
        self.events_come()

    async def _start(self) -> None:
        drainer: Any = self
        coordinator: Any = self.coordinator
        kube = Kube(self.client)
        await kube.discover()
        self._reconciler = Reconciler(
            kube,
            drainer,
            coordinator,
            clock=lambda: self.server.now,
            restrictions=self.restrictions,
        )
        self.runtime = Runtime(kube, self._reconcile, Metrics(), _autoscale_nothing)
        self._stop = asyncio.Event()  # without it kopf kills this process when it does not stop
        memo = kopf.Memo(runtime=self.runtime, watch_session=WatchSession(self.runtime))
        self._kopf = asyncio.ensure_future(
            kopf.operator(memo=memo, clusterwide=True, stop_flag=self._stop)
        )

    async def _reconcile(self, key: Key, freshness: Freshness) -> Outcome:
        """Reconcile the service for the controller. Record an error before raising it."""
        try:
            return await self._reconciler.reconcile(key, freshness)
        except Exception as error:
            self._error = error
            raise

    def _operator_ends(self) -> None:
        self.client.lives = False
        self._stop.set()
        self._loop.end()

    def operator_restarts(self) -> None:
        self._operator_ends()
        self._operator_starts()

    async def drain(self, host: str, key: Any = None) -> int | None:
        """Return the unfinished requests of the engine at `host`; None if it does not respond."""
        return None if host in self.silent else self.nodes.unfinished.get(host, 0)

    def wire(self, kind: str) -> Wire:
        """Return the watches of `kind`."""
        return self.server.wire(self.runtime.kube.resource(kind))

    def events_come(self) -> None:
        """Deliver the pending watch events to the operator."""
        self._loop.run_until_idle()
        assert not self._kopf.done(), f"kopf ended: {self._kopf}"

    @property
    def is_current(self) -> bool:
        """Whether the API server's watch caches are up to date."""
        return not any(wire.is_behind for wire in self.server.wires)

    def reconcile(
        self,
        faults: dict[int, Fault] | None = None,
        actions: dict[int, Callable[[], None]] | None = None,
        *,
        hit_writes: bool = False,
        delays: list[int] | None = None,
        deliver_events: bool = True,
    ) -> bool:
        """Reconcile once, and check the step.

        Args:
            faults, actions, hit_writes, delays: see SimulatedClient.begin.
            deliver_events: whether pending events arrive before the step.

        Returns:
            True if the step succeeded without any disturbance.
        """
        if deliver_events:
            self.events_come()
        before = self._by_name()
        ranks = dict(self.coordinator.ranks)
        self.client.begin(faults or {}, actions or {}, hit_writes=hit_writes, delays=delays or [0])
        undisturbed = not faults and not actions and self.is_current
        client, self._error = self.client, None
        try:
            revisit_s = self._loop.run(self.runtime.controller.reconcile(KEY))
        except Crash:
            self.operator_restarts()
            went_well = False
        else:
            self._revisit_at = (
                self.server.seconds() + revisit_s if revisit_s is not None else float("inf")
            )
            if self._error is not None and not isinstance(self._error, (KubeError, OSError)):
                raise self._error
            assert self._error is None or not undisturbed, "nothing was wrong with the API server"
            assert not client.waits or not undisturbed, "a read waited for events that never come"
            went_well = undisturbed and self._error is None
        self._check(client, before, ranks, went_well)
        return went_well

    def _check(
        self,
        client: SimulatedClient,
        before: dict[str, Object],
        ranks: dict[str, str],
        went_well: bool,
    ) -> None:
        name = self._foreign["metadata"]["name"]
        assert self.server.get("pods", name) == self._foreign, "a pod of another owner was changed"
        self.server.cluster.collector.drain()
        self._checks.after(client, before, self._by_name(), ranks, went_well)

    def _by_name(self) -> dict[str, Object]:
        return {pod["metadata"]["name"]: pod for pod in self.pods()}

    # The cluster

    def pods(self) -> list[Object]:
        """Return the members of the service."""
        return self.nodes.pods()

    def passes(self, seconds: float) -> None:
        self.server.now += timedelta(seconds=seconds)

    def _started_ranks(self) -> dict[str, str]:
        started = {
            pod["metadata"]["name"]: pod
            for pod in self.pods()
            if is_rank(pod) and member(pod).started
        }
        return {
            name: pod["metadata"]["uid"]
            for name, pod in started.items()
            if member(pod).deletion is None
        }

    def world(self, moves: Callable[[], bool], seconds: float) -> None:
        """Let time pass. `moves()` decides for each part of the cluster whether it progresses."""
        self.passes(seconds)
        of_services = [
            pod for pod in self.server.list("pods") if MEMBER_NAME.search(pod["metadata"]["name"])
        ]
        for pod in of_services:
            if names.LABEL_MEMBER in pod["metadata"]["labels"] and moves():
                self.nodes.kubelet(pod)
        if moves():
            self.nodes.deployments()
        if moves():
            self.coordinator.step(found=moves())

    def rounds(self, number: int) -> None:
        """Reconcile and let the whole cluster progress, `number` times."""
        for _ in range(number):
            self.reconcile()
            self.world(lambda: True, ROUND_S)

    def condition(self, type_: str = "Ready") -> Object:
        """Return the condition of this type in the status."""
        (found,) = [each for each in self.object()["status"]["conditions"] if each["type"] == type_]
        return dict(found)

    # The end

    def settle(self) -> None:
        """End all faults, and check that the service reaches the desired state."""
        self.silent.clear()
        self.nodes.unfinished.clear()
        self.coordinator.returns()
        self.coordinator.refuses = self.coordinator.loses = 0
        for wire in self.server.wires:
            wire.mended()
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
        for _ in range(2):
            self.reconcile()
            assert not self.client.writes, f"at rest, {self.client.writes} were written"
            self.operator_restarts()
            self.events_come()

    def _is_due(self) -> bool:
        now = self.server.seconds()
        if self.lost_events and now >= self._resync_at:
            self._resync_at, self.lost_events = now + RESYNC_S, False
            self._loop.run(self.runtime.resync())
        return self.runtime.controller.is_due(KEY) or now >= self._revisit_at

    def _is_settled(self) -> bool:
        conditions = (self.object().get("status") or {}).get("conditions") or []
        reasons = {each["type"]: each["reason"] for each in conditions}
        right = (
            reasons.get("Ready") in ("AllGroupsReady", "ScaledToZero")
            and reasons["Updating"] == "UpToDate"
        )
        is_observed = all(
            each["observedGeneration"] == self.object()["metadata"]["generation"]
            for each in conditions
        )
        return right and is_observed and self.is_current and not self.lost_events

    def _check_end(self) -> None:
        service = self.object()
        status, spec = service["status"], decode_spec(service["spec"])
        members = [member(pod) for pod in self.pods()]
        conditions = {each["type"]: each for each in status["conditions"]}
        for role in names.MEMBER_ROLES:
            mine = [m for m in members if f"-{role}-" in m.name]
            assert len(mine) == status[role]["desired"], self.describe()
            assert all(
                m.ready and not m.draining and m.revision == status[role]["revision"] for m in mine
            )
            assert status[role]["updated"] == status[role]["ready"] == status[role]["desired"]
        reason = "AllGroupsReady" if spec.decode.replicas else "ScaledToZero"
        assert conditions["Ready"]["reason"] == reason, conditions
        assert conditions["Updating"]["reason"] == "UpToDate", conditions
        volumes = [v for pod in self.server.list("pods") for v in pod["spec"].get("volumes") or []]
        used = {volume["configMap"]["name"] for volume in volumes if "configMap" in volume}
        made = {
            obj["metadata"]["name"]
            for obj in self.server.list("configmaps")
            if obj["metadata"].get("labels")
        }
        assert used <= made, "a pod's configuration is missing"
        roles = {"prefill", "decode", "gateway"} if spec.prefill else {"decode", "gateway"}
        assert len(made) == len(roles), f"unused configurations: {made}"
        coordinators = [
            d
            for d in self.server.list("deployments.apps")
            if "coordinator" in d["metadata"]["name"]
        ]
        assert bool(coordinators) == spec.decode.parallelism.expert
        if spec.decode.parallelism.expert:
            assert sorted(self.coordinator.ranks) == sorted(
                m.name for m in members if "-decode-" in m.name
            )
        self._check_orphans(service["metadata"]["uid"])

    def _check_orphans(self, uid: str) -> None:
        """Check that all labelled objects belong to the service or to one of its Deployments."""
        deployments = [
            d["metadata"]["uid"]
            for d in self.server.list("deployments.apps")
            if controlled_by(d, uid)
        ]
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
    """Yield a service that has reached the desired state of `spec`."""
    with contextlib.closing(Service()) as service:
        service.create(spec)
        service.settle()
        yield service


async def _autoscale_nothing(add: Callable[[Key], None]) -> None:
    await asyncio.Event().wait()
