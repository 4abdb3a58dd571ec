"""`baton-operator`: one process that keeps LLMServices in their desired state."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import aiohttp
from kubernetes.aio.config import ConfigException

from baton_engine.protocol.config import ENGINE_HTTP_PORT, pod_ip
from baton_operator.coordinator import CoordinatorClient
from baton_operator.drain import Drainer
from baton_operator.kube import Kube, KubeError, connect
from baton_operator.reconcile import Reconciler
from baton_operator.server import Liveness, Metrics, serve
from baton_operator.watch import watch
from baton_operator.workqueue import Key, WorkQueue

log = logging.getLogger("baton_operator")

RESYNC_S = 30.0
MISSED_RESYNCS = 10
"""In a row: /health fails."""
CRD_POLL_S = 1.0
HTTP_PORT = 8081
EXIT_CONFIGURATION = 78


def main(argv: list[str] | None = None) -> None:
    """Entry point. Exits 78 for a configuration that cannot work, with a last line `FATAL <Reason>: <message>`."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)  # warns that signals are ours
    try:
        asyncio.run(run(args))
    except ConfigException as error:
        hint = "" if args.kubeconfig else "; outside a cluster give --kubeconfig"
        print(f"FATAL ConfigurationError: no access to a cluster: {error}{hint}", file=sys.stderr)
        sys.exit(EXIT_CONFIGURATION)
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="baton-operator", description="Runs LLMServices on Kubernetes.")
    parser.add_argument("--kubeconfig", metavar="FILE", help="default: the pod's service account")
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="NS",
        help="watch this one only; repeat for more; default: all",
    )
    parser.add_argument(
        "--host", default=pod_ip(), help="address of /health and /metrics; default: $POD_IP, else loopback"
    )
    parser.add_argument(
        "--http-port", type=int, default=HTTP_PORT, help="port of /health and /metrics (default: %(default)s)"
    )
    parser.add_argument(
        "--resync",
        type=float,
        default=RESYNC_S,
        metavar="S",
        help="seconds between full resyncs (default: %(default)s)",
    )
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return parser


async def run(args: argparse.Namespace) -> None:
    """Until SIGTERM or SIGINT. Raises ConfigException, KubeError (no right to list), OSError (port taken)."""
    metrics, stop = Metrics(), asyncio.Event()
    liveness = Liveness(limit_s=MISSED_RESYNCS * args.resync)
    async with (
        connect(args.kubeconfig) as (kube, configuration),
        aiohttp.ClientSession() as session,
        serve(args.host, args.http_port, metrics, liveness),
    ):
        reconciler = Reconciler(kube, Drainer(session, ENGINE_HTTP_PORT), CoordinatorClient(session))
        queue = WorkQueue(metrics.measured(reconciler.reconcile))
        metrics.queue.set_function(lambda: len(queue))
        await _until_signalled(_wait_for_crd(kube, liveness), stop)
        if stop.is_set():
            return
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(queue.run()),
                group.create_task(_resync(kube, queue, args.namespace, args.resync, metrics, liveness)),
            ]
            await watch(
                queue.add,
                configuration=configuration,
                in_cluster=args.kubeconfig is None,
                namespaces=args.namespace,
                stop=stop,
            )
            for task in background:
                task.cancel()


async def _until_signalled(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
    """Awaits `work`; SIGTERM or SIGINT ends it and sets `stop`, also later on."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()

    def stopped() -> None:
        stop.set()
        task.cancel()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopped)
    try:
        await task
    except asyncio.CancelledError:
        if not stop.is_set():
            raise


async def _wait_for_crd(kube: Kube, liveness: Liveness) -> None:
    """Until the API server answers and serves LLMServices."""
    told = ""
    while True:
        try:
            if await kube.discover():
                return
            state = "the CRD of LLMService is not installed; apply manifests/crd/llmservices.yaml"
            liveness.beat()
        except (KubeError, OSError, TimeoutError) as error:
            state = f"the API server does not answer: {error}"
        if state != told:
            log.warning("waiting: %s", state)
            told = state
        await asyncio.sleep(CRD_POLL_S)


async def _resync(
    kube: Kube, queue: WorkQueue, namespaces: list[str], interval_s: float, metrics: Metrics, liveness: Liveness
) -> None:
    """Makes every service due every `interval_s`: what an event would have told, had it not been lost."""
    while True:
        try:
            scopes: list[str | None] = [*namespaces] or [None]
            services = [s for scope in scopes for s in await kube.list_all("LLMService", scope)]
            for service in services:
                queue.add(Key(service["metadata"]["namespace"], service["metadata"]["name"]))
            metrics.services.set(len(services))
            liveness.beat()
        except (KubeError, OSError, TimeoutError) as error:
            log.warning("resync failed, again in %.0f s: %s", interval_s, error)
        await asyncio.sleep(interval_s)


if __name__ == "__main__":
    main()
