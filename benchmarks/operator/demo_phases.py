"""Measures the phases of the demo service on a local cluster, from apply to Ready."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton_kube.client import KubeError, connect
from baton_operator import names
from baton_operator.kube.objects import Kube
from baton_operator.observe.observation import is_ready

Object = dict[str, Any]
DEMO = Path(__file__).parents[2] / "manifests/samples/demo.yaml"
TIMEOUT_S = 300.0
#: Phases in order. A phase ends when its condition and all earlier conditions hold.
PHASES: dict[str, Callable[[Object, list[Object]], bool]] = {
    "objects applied": lambda service, pods: (
        {_role(pod) for pod in pods} >= {"prefill", "decode", "gateway"}
    ),
    "pods scheduled": lambda service, pods: all(pod["spec"].get("nodeName") for pod in pods),
    "engines loaded": lambda service, pods: all(
        is_ready(pod) for pod in pods if _role(pod) != "gateway"
    ),
    "ready": lambda service, pods: any(
        c["type"] == "Ready" and c["status"] == "True"
        for c in (service.get("status") or {}).get("conditions") or []
    ),
}


def demo_phases() -> list[Object]:
    """Run the demo service with `baton up`. Return one row with the seconds of each phase."""
    with tempfile.TemporaryDirectory(prefix="baton-", ignore_cleanup_errors=True) as home:
        environment = {**os.environ, "BATON_HOME": home}
        command = [sys.executable, "-m", "baton_local.cli", "up", "-f", str(DEMO)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        try:
            return [asyncio.run(_follow(Path(home) / "control-plane" / "kubeconfig", process))]
        finally:
            process.terminate()
            process.wait(60)


async def _follow(kubeconfig: Path, process: subprocess.Popen[bytes]) -> Object:
    deadline = time.monotonic() + TIMEOUT_S
    while not kubeconfig.exists():
        _check(process, deadline)
        await asyncio.sleep(0.02)
    async with connect(kubeconfig) as connection:
        kube = Kube(connection)
        row: Object = {"part": "apply to Ready of the demo"}
        began: float | None = None
        left = dict(PHASES)
        while left:
            _check(process, deadline)
            service, pods = await _state(kube)
            now = time.monotonic()
            if service is None:
                await asyncio.sleep(0.02)
                continue
            began = phase_began = now if began is None else began
            while left and next(iter(left.values()))(service, pods):
                row[f"{next(iter(left))} s"] = round(now - phase_began, 2)
                left.pop(next(iter(left)))
            await asyncio.sleep(0.02)
        return row


def _check(process: subprocess.Popen[bytes], deadline: float) -> None:
    if process.poll() is not None or time.monotonic() > deadline:
        sys.exit("the demo did not become Ready")


async def _state(kube: Kube) -> tuple[Object | None, list[Object]]:
    try:
        services = await kube.list_all(names.KIND, None)
        pods = await kube.list_all("Pod", None, {names.LABEL_MANAGED_BY: names.MANAGER})
    except (KubeError, OSError, TimeoutError):  # not served yet
        return None, []
    return (services[0] if services else None), pods


def _role(pod: Object) -> str:
    return str(pod["metadata"]["labels"].get(names.LABEL_ROLE))
