"""The operator's process: holds the Lease, fills the cache, works through the queue, until it is told to end."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import signal
import uuid
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import aiohttp

from baton_engine.protocol.config import ENGINE_HTTP_PORT
from baton_operator import names
from baton_operator.autoscale.autoscaler import Autoscaler
from baton_operator.autoscale.scrape import Scraper
from baton_operator.cached_kube import CachedKube
from baton_operator.coordinator import CoordinatorClient
from baton_operator.drain import Drainer
from baton_operator.kube import Kube, KubeError, connect
from baton_operator.leader import Election, Elector
from baton_operator.loading import LoadingPods
from baton_operator.logs import about_its_service
from baton_operator.peers import KVPeers
from baton_operator.reconcile import Reconciler
from baton_operator.server import Metrics, serve
from baton_operator.watch import Watches
from baton_operator.workqueue import WORK_TIMEOUT_S, WorkQueue

log = logging.getLogger("baton_operator")

CRD_POLL_S = 1.0
STUCK_S = WORK_TIMEOUT_S + 60.0
"""Work that is not even ended by its timeout."""


async def run(args: argparse.Namespace) -> None:
    """Until SIGTERM or SIGINT; arguments as of `cli`.

    Raises:
        ConfigException: there is no way to a cluster.
        AddressError: see `serve`.
        LeaseLostError: another process may work now.
    """
    metrics, stop = Metrics(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    async with connect(args.kubeconfig, CachedKube) as (kube, _), aiohttp.ClientSession() as session:
        kube.counted = metrics.requested
        operator_namespace = os.environ.get("POD_NAMESPACE") if args.kubeconfig is None else None
        drainer, coordinators = Drainer(session, ENGINE_HTTP_PORT), CoordinatorClient(session)
        autoscaler, scraper = Autoscaler(), Scraper(session, metrics.scrapes)
        reconciler = Reconciler(
            kube,
            drainer,
            coordinators,
            operator_namespace,
            autoscaler,
            loading=LoadingPods(session),
            peers=KVPeers(session),
        )
        work = metrics.measured(about_its_service(reconciler.reconcile))
        queue = WorkQueue(work, retried=metrics.retries.inc)
        metrics.queue.set_function(lambda: len(queue))
        async with serve(args.host, args.http_port, metrics, lambda: _stuck(queue)):
            autoscale = partial(autoscaler.run, scraper, queue.add)
            reconciling = _reconcile_all(kube, queue, autoscale, metrics, args.namespace, args.resync)
            if not args.leader_elect:
                metrics.leader.set(1)
                await _until(stop, reconciling)
                return
            election = Election(
                f"{os.environ.get('POD_NAME', os.uname().nodename)}_{uuid.uuid4()}", args.lease_duration
            )
            lease_kube = Kube(kube.api)  # it may always write
            lease_kube.counted = metrics.requested
            elector = Elector(lease_kube, election, args.lease_namespace, args.lease_name)
            kube.may_write_s = lambda: election.may_write_s
            metrics.leader.set_function(lambda: float(election.held_s > 0))
            try:
                await _until(stop, _lead(elector, reconciling))
            finally:
                reconciling.close()
                await elector.release()


def _stuck(queue: WorkQueue) -> str:
    return f"a reconcile has not ended for {queue.longest_s:.0f} s" if queue.longest_s > STUCK_S else ""


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Awaits `work`, or cancels it when `stop` is set. Raises what it raises."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for future in (task, stopped):
            future.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


async def _lead(elector: Elector, reconciling: Coroutine[Any, Any, None]) -> None:
    """Raises LeaseLostError."""
    await elector.acquire()
    keeping, working = asyncio.ensure_future(elector.keep()), asyncio.ensure_future(reconciling)
    try:
        done, _ = await asyncio.wait([keeping, working], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)  # renewing meanwhile: what is under way may still write
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def _reconcile_all(
    kube: CachedKube,
    queue: WorkQueue,
    autoscale: Callable[[], Coroutine[Any, Any, None]],
    metrics: Metrics,
    namespaces: list[str],
    resync_s: float,
) -> None:
    """Does not return."""
    await _wait_for_crd(kube)
    kube.open_stores(queue.add)
    watches = Watches(kube, namespaces, resync_s, metrics.watch_restarted)
    services = kube.stores[names.KIND]
    metrics.services.set_function(lambda: len(services))
    for kind in watches.kinds:
        metrics.watch_silence(kind, _silence(watches, kind))
    async with asyncio.TaskGroup() as group:
        group.create_task(watches.run())
        await watches.filled()
        group.create_task(queue.run())
        group.create_task(autoscale())
        while True:
            interval_s = resync_s * random.uniform(0.9, 1.1)
            await asyncio.sleep(interval_s)
            for key in services.keys():  # noqa: SIM118 - of services, not of a mapping
                queue.add_after(key, random.uniform(0.0, interval_s / 10))


def _silence(watches: Watches, kind: str) -> Callable[[], float]:
    return lambda: watches.silent_s(kind)


async def _wait_for_crd(kube: Kube) -> None:
    """Until the API server answers and serves LLMServices."""
    told = ""
    while True:
        try:
            if await kube.discover():
                return
            state = "the CRD of LLMService is not installed; apply manifests/crd/llmservices.yaml"
        except (KubeError, OSError, TimeoutError) as error:
            state = f"the API server does not answer: {error}"
        if state != told:
            log.warning("waiting: %s", state)
            told = state
        await asyncio.sleep(CRD_POLL_S)
