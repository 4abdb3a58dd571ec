"""Measures the operator with 200 LLMServices, and the demo service from apply to Ready.

    make bench SUBJECT=operator [ARGS="--services 20 --rest 10 --no-demo"]

The figures are reconcile times, API requests, writes while nothing changes, and memory.
`fake_nodes.py` makes the pods of the 200 services ready. The demo has real engines and is started
by `baton up`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from demo_phases import demo_phases
from fake_nodes import FakeNodes
from operator_metrics import Reading

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import report
from baton_kube.client import connect
from baton_operator import names
from baton_operator.api.crd import custom_resource_definition
from baton_operator.kube.objects import Kube
from pocketkube.control_plane.embedded import EmbeddedControlPlane
from pocketkube.control_plane.real import RealControlPlane, find_assets, free_ports
from support.waiting import until

Object = dict[str, Any]
WRITES = ("create", "patch", "apply", "update", "delete")
NAMESPACE = "default"
FLEET_TIMEOUT_S = 1800.0
#: Median seconds from apply to Ready of 200 services with the earlier operator, which used caches.
CACHED_FLEET_S = 18.2
IDLE_S = 5.0  #: Time without a reconcile after which the operator is idle.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--services", type=int, default=200)
    parser.add_argument(
        "--rest", type=float, default=60.0, metavar="S", help="seconds of the measurement at rest"
    )
    parser.add_argument("--control-plane", choices=["embedded", "real"], default="embedded")
    parser.add_argument("--no-demo", action="store_true", help="without real engines")
    parser.add_argument("--no-report", action="store_true", help="print only")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows, goals = asyncio.run(measure(args, Path(folder)))
    if not args.no_demo:
        rows += demo_phases()
    report.print_table(rows)
    if args.no_report:
        report.show(goals)
        return
    report.write(
        "operator",
        rows,
        goals,
        services=args.services,
        control_plane=args.control_plane,
        rest_seconds=args.rest,
    )


async def measure(args: argparse.Namespace, folder: Path) -> tuple[list[Object], list[report.Goal]]:
    """Measure the operator with `args.services` services. Return rows of figures, and goals."""
    plane = _plane(args.control_plane, folder)
    plane.start(timeout_s=120)
    try:
        async with connect(plane.kubeconfig) as connection:
            kube = Kube(connection)
            path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
            await kube.client.create(path, custom_resource_definition())
            await until(kube.discover, "the CRD is served", FLEET_TIMEOUT_S, every_s=0.2)
            with _operator(plane.kubeconfig, folder) as (process, port):
                nodes = asyncio.ensure_future(FakeNodes(kube).run())
                try:
                    return await _fleet(kube, process, port, args)
                finally:
                    nodes.cancel()
                    await asyncio.gather(nodes, return_exceptions=True)
    finally:
        plane.stop()


def _plane(kind: str, folder: Path) -> EmbeddedControlPlane | RealControlPlane:
    if kind == "embedded":
        return EmbeddedControlPlane(folder)
    assets = find_assets()
    if assets is None:
        sys.exit("no real control plane on this machine: run `make control-plane`")
    return RealControlPlane(assets, folder)


@contextmanager
def _operator(kubeconfig: Path, folder: Path) -> Iterator[tuple[psutil.Process, int]]:
    [port] = free_ports(1)
    command = [sys.executable, "-m", "baton_operator.cli", "--kubeconfig", str(kubeconfig)]
    command += ["--host", "127.0.0.1", "--http-port", str(port), "--log-level", "warning"]
    command += ["--host-path", "/models/"]  # the folder of the services' model
    with (folder / "operator.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield psutil.Process(process.pid), port
        finally:
            process.terminate()
            process.wait(60)


async def _fleet(
    kube: Kube, process: psutil.Process, port: int, args: argparse.Namespace
) -> tuple[list[Object], list[report.Goal]]:
    def is_serving() -> bool:
        try:
            Reading.of(port)
        except OSError:
            return False
        return True

    await until(is_serving, "the operator serves metrics", FLEET_TIMEOUT_S, every_s=0.2)
    empty_rss = process.memory_info().rss
    start = Reading.of(port)
    seconds = await _bring_up(kube, args.services)
    await _wait_until_idle(port)
    up = Reading.of(port).since(start)
    full_rss = process.memory_info().rss

    # A change that triggers a reconcile of every service without effect. The embedded API server
    # shares this process, where a garbage collection would delay responses by 0.17 s.
    gc.collect()
    gc.freeze()
    before, cpu = Reading.of(port), process.cpu_times()
    for number in range(args.services):
        await kube.merge(
            names.KIND,
            NAMESPACE,
            f"fleet-{number}",
            {"metadata": {"annotations": {"touched": "1"}}},
        )

    def is_each_reconciled() -> bool:
        return Reading.of(port).since(before).reconciles >= args.services

    what = "each service was reconciled"
    await until(is_each_reconciled, what, FLEET_TIMEOUT_S, every_s=0.2)
    await _wait_until_idle(port)
    visit, visit_cpu_s = Reading.of(port).since(before), _cpu_s(process, cpu)

    before, cpu = Reading.of(port), process.cpu_times()
    await asyncio.sleep(args.rest)
    rest, rest_cpu_s = Reading.of(port).since(before), _cpu_s(process, cpu)

    rows = [
        _row("bring-up", up, services=args.services),
        _row(
            "a look at a service at rest",
            visit,
            cpu_ms=round(1e3 * visit_cpu_s / visit.reconciles, 2),
        ),
        _row(f"rest, {args.rest:g} s", rest, cpu_seconds=round(rest_cpu_s, 2)),
        {
            "part": "apply to Ready of the fleet",
            "median s": round(statistics.median(seconds), 2),
            "p99 s": round(sorted(seconds)[int(0.99 * (len(seconds) - 1))], 2),
            "all s": round(max(seconds), 2),
        },
        {
            "part": "memory of the operator",
            "empty MiB": round(empty_rss / 2**20, 1),
            "full MiB": round(full_rss / 2**20, 1),
            "per service KiB": round((full_rss - empty_rss) / 2**10 / args.services, 1),
        },
    ]
    writes = sum(part.requests[verb] for part in (visit, rest) for verb in WRITES)
    at_rest = sum(count for verb, count in rest.requests.items() if verb != "watch")
    median_s = statistics.median(seconds)
    goals = [
        report.Goal(
            "writes at rest and in looks at rest", float(writes), 0.0, "requests", at_most=True
        ),
        report.Goal(
            "requests at rest besides watches", float(at_rest), 0.0, "requests", at_most=True
        ),
        report.Goal("requests of a look at rest", _per(visit), 6.0, "requests", at_most=True),
        report.Goal("look at rest, p99", visit.quantile_ms(0.99), 100.0, "ms", at_most=True),
        report.Goal("memory of the operator", full_rss / 2**20, 160.0, "MiB", at_most=True),
    ]
    if args.services == 200:
        # The earlier operator was measured on a machine of this kind.
        goals.append(
            report.Goal(
                "apply to Ready of 200 services", median_s, 1.2 * CACHED_FLEET_S, "s", at_most=True
            )
        )
    return rows, goals


def _cpu_s(process: psutil.Process, before: Any) -> float:
    now = process.cpu_times()
    return float(now.user + now.system - before.user - before.system)


def _per(reading: Reading) -> float:
    """Return the API requests per reconcile. Watches are not counted."""
    return (sum(reading.requests.values()) - reading.requests["watch"]) / max(1, reading.reconciles)


def _row(part: str, reading: Reading, **more: object) -> Object:
    return {
        "part": part,
        "reconciles": reading.reconciles,
        "p50 ms": round(reading.quantile_ms(0.5), 2) if reading.reconciles else None,
        "p99 ms": round(reading.quantile_ms(0.99), 2) if reading.reconciles else None,
        "requests per reconcile": round(_per(reading), 2) if reading.reconciles else None,
        "requests": " ".join(f"{verb}:{count}" for verb, count in sorted(reading.requests.items()))
        or "none",
        **more,
    }


async def _bring_up(kube: Kube, services: int) -> list[float]:
    """Create LLMServices one after the other, and wait until all are Ready.

    Returns:
        The seconds from creation to Ready of each service.
    """
    created: dict[str, float] = {}
    ready: dict[str, float] = {}
    path = kube.path(names.KIND, NAMESPACE)
    _, version = await kube.client.list(path)

    async def follow() -> None:
        async for _, obj in kube.client.watch(path, version, timeout_s=3600, silence_s=3600):
            conditions = (obj.get("status") or {}).get("conditions") or []
            if any(c["type"] == "Ready" and c["status"] == "True" for c in conditions):
                ready.setdefault(obj["metadata"]["name"], time.monotonic())
            if len(ready) == services:
                return

    following = asyncio.ensure_future(follow())
    try:
        for number in range(services):
            name = f"fleet-{number}"
            created[name] = time.monotonic()
            await kube.create(_service(name))
        async with asyncio.timeout(FLEET_TIMEOUT_S):
            await following
    finally:
        following.cancel()
    return [ready[name] - created[name] for name in created]


def _service(name: str) -> Object:
    spec = {
        "model": {"uri": "file:///models/x"},
        "prefill": {"replicas": 1},
        "decode": {"replicas": 1},
    }
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata, "spec": spec}


async def _wait_until_idle(port: int) -> None:
    """Wait until the operator has reconciled nothing for IDLE_S."""
    last, since = Reading.of(port), time.monotonic()

    def is_idle() -> bool:
        nonlocal last, since
        now = Reading.of(port)
        if now.since(last).reconciles or now.queue_depth:
            last, since = now, time.monotonic()
        return time.monotonic() >= since + IDLE_S

    await until(is_idle, "the operator is idle", FLEET_TIMEOUT_S, every_s=0.5)


if __name__ == "__main__":
    main()
