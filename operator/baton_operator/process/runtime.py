"""The parts of an operator process: client, reconciler, controller, autoscaler and metrics."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from baton_kube.client import KubeError, connect
from baton_operator import names
from baton_operator.autoscale.autoscaler import Autoscaler
from baton_operator.autoscale.scrape import Scraper
from baton_operator.builders.restrictions import Restrictions
from baton_operator.kube.objects import PAGE_SIZE, Kube, resource_of
from baton_operator.observe.freshness import Freshness
from baton_operator.observe.pod_clients import CoordinatorClient, Drainer
from baton_operator.process.operator_metrics import Metrics
from baton_operator.reconcile.controller import TIMEOUT_S, Controller, Outcome, Reconcile
from baton_operator.reconcile.reconciler import Reconciler
from baton_operator.status.status_probes import StatusProbes

logger = logging.getLogger(__name__)

RESYNC_S = 300.0  # default of --resync
CRD_POLL_S = 1.0  # interval of the check whether the CRD is installed
STUCK_S = TIMEOUT_S + 60.0  # a reconcile that runs this long has outlived its timeout


class Runtime:
    """The controller, the autoscaler and the resync of an operator process.

    An instance belongs to the event loop in which it is created.

    Args:
        reconcile: takes one step towards the desired state of one service.
        autoscale: runs the autoscaler until cancelled. Its argument is the function that queues a
            reconcile of a service.
        resync_s: seconds between two reconciles of a service for which no event arrives.
    """

    def __init__(
        self,
        kube: Kube,
        reconcile: Reconcile,
        metrics: Metrics,
        autoscale: Callable[[Callable[[names.Key], None]], Coroutine[Any, Any, None]],
        resync_s: float = RESYNC_S,
    ) -> None:
        self.kube = kube
        self.metrics = metrics
        self.controller = Controller(self._reconcile, retried=metrics.retries.inc)
        self._step = reconcile
        self._autoscale = autoscale
        self._resync_s = resync_s
        self._service_paths: set[str] = set()  # API paths of the watched LLMService collections
        self._loop = asyncio.get_running_loop()
        kube.client.on_request = self.count_request
        metrics.queue.set_function(lambda: self.controller.queue_depth)
        metrics.services.set_function(lambda: len(self.controller))

    async def run(self) -> None:
        """Run the controller, the autoscaler and the resync until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.controller.run())
            tasks.create_task(self._autoscale(self.controller.add))
            while True:
                await asyncio.sleep(self._resync_s * random.uniform(0.9, 1.1))
                await self.resync()

    async def _reconcile(self, key: names.Key, freshness: Freshness) -> Outcome:
        """Reconcile one service, and record the result and the duration as metrics."""
        result = "error"
        try:
            with self.metrics.seconds.time():
                outcome = await self._step(key, freshness)
            result = "ok"
            return outcome
        finally:
            self.metrics.reconciles.labels(result).inc()

    def count_request(self, verb: str, path: str, code: int) -> None:
        """Count a request to the API server in the metrics. Code 0: there was no response."""
        self.metrics.requests.labels(verb, resource_of(path), code).inc()

    async def wait_for_crd(self) -> None:
        """Wait until the API server responds and the CRD of LLMService is installed."""
        logged = ""
        while True:
            try:
                if await self.kube.discover():
                    return
                state = "it is not installed; apply manifests/crd/llmservices.yaml"
            except (KubeError, OSError) as error:
                state = f"the API server does not answer: {error}"
            if state != logged:
                logger.warning("the operator waits for the CRD of LLMService: %s", state)
                logged = state
            await asyncio.sleep(CRD_POLL_S)

    def queue_reconcile(self, key: names.Key, kind: str, version: str) -> None:
        """Queue a reconcile of the service, after a watch event for one of its objects.

        Any thread may call this method.

        Args:
            kind: kind of the object in the event, such as Pod.
            version: resource version of the object in the event.
        """
        self._loop.call_soon_threadsafe(
            lambda: self.controller.observe(
                key, kind, version, is_own_write=self.kube.is_own_write(version)
            )
        )

    def queue_all(self, path: str) -> None:
        """Queue a reconcile of every service, after a watch listed the collection at `path`.

        The watch may have missed events before that list. Any thread may call this method.
        """

        def add_all() -> None:
            if path.endswith(f"/{names.PLURAL}"):
                self._service_paths.add(path)
            self.controller.add_all()

        self._loop.call_soon_threadsafe(add_all)

    async def resync(self) -> None:
        """List the LLMServices, and queue a reconcile of each one.

        The resync makes up for events that the watches have missed.
        """
        found: set[names.Key] = set()
        for path in self._service_paths:
            try:
                found |= {
                    names.Key(*each) for each in await self.kube.client.names(path, PAGE_SIZE)
                }
            except (KubeError, OSError) as error:
                logger.warning(
                    "LLMServices could not be listed; the next resync lists them again: %s", error
                )
        self.controller.add_all(found)

    def explain_stuck(self) -> str:
        """Return why the process must be restarted; empty if no restart is needed."""
        longest_s = self.controller.longest_s
        return f"a reconcile has not ended for {longest_s:.0f} s" if longest_s > STUCK_S else ""


@asynccontextmanager
async def open_runtime(
    kubeconfig: Path | str | None,
    restrictions: Restrictions | None,
    resync_s: float = RESYNC_S,
    operator_namespace: str | None = None,
) -> AsyncIterator[Runtime]:
    """Connect to the cluster and yield a runtime.

    Args:
        restrictions: what LLMServices may request. None: everything.
        operator_namespace: namespace of the operator's pod. None: the operator does not run in the
            cluster.

    Raises:
        ConfigException: no cluster is configured.
    """
    # No limit: the wait for a free connection would count towards the timeout of a request.
    unlimited = aiohttp.TCPConnector(limit=0)
    async with connect(kubeconfig) as client, aiohttp.ClientSession(connector=unlimited) as session:
        kube, metrics, autoscaler = Kube(client), Metrics(), Autoscaler()
        drainer, coordinators = Drainer(session), CoordinatorClient(session)
        reconciler = Reconciler(
            kube,
            drainer,
            coordinators,
            operator_namespace,
            autoscaler,
            probes=StatusProbes(session),
            restrictions=restrictions,
        )
        autoscale = partial(autoscaler.run, Scraper(session, metrics.scrapes))
        yield Runtime(kube, reconciler.reconcile, metrics, autoscale, resync_s)
