"""A local cluster under test: `baton up --detach` with its own state folder.

For the end-to-end tests of services.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.waiting import eventually

BATON = [sys.executable, "-m", "baton_local.cli"]
ASSETS = (
    Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "baton/control-plane/v1.20.2"
)


def require_control_plane(kind: str) -> None:
    """Skip the test if kubectl or the control plane's binaries are missing.

    The test fails instead if `BATON_REQUIRE_REAL_CONTROL_PLANE` is 1.
    """
    missing = ""
    if shutil.which("kubectl") is None:
        missing = "no kubectl on this machine: install 1.32 or newer"
    elif (
        kind == "real"
        and not os.environ.get("KUBEBUILDER_ASSETS")
        and not (ASSETS / "kube-apiserver").exists()
    ):
        missing = (
            "no real control plane on this machine: run `make control-plane` once, "
            "or set KUBEBUILDER_ASSETS"
        )
    if missing and os.environ.get("BATON_REQUIRE_REAL_CONTROL_PLANE") == "1":
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)


def processes_with_home(home: Path) -> list[psutil.Process]:
    """Return the running processes of the cluster in the folder `home`, found by environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            ours = environment.get("BATON_HOME") == str(home) or environment.get(
                "POCKETKUBE_POD_ROOT", ""
            ).startswith(f"{home}/")
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class LocalClusterUnderTest:
    def __init__(self, home: Path, control_plane: str) -> None:
        self.home = home
        self.control_plane = control_plane
        self.env = {**os.environ, "BATON_HOME": str(home), "OMP_NUM_THREADS": "1"}

    def baton(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*BATON, *args],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=240.0,
            check=False,
        )

    def up(self, manifest: dict[str, Any]) -> None:
        path = self.home / "service.yaml"
        path.write_text(json.dumps(manifest))  # JSON is YAML
        done = self.baton("up", "-f", str(path), "--detach", "--control-plane", self.control_plane)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{self.component_logs()}"

    def down(self) -> None:
        self.baton("down")

    def component_logs(self) -> str:
        return "\n".join(
            f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-25:])
            for log in sorted(self.home.glob("logs/*.log"))
        )

    def kubectl(self, *args: str, check: bool = True, stdin: str | None = None) -> str:
        """Run kubectl, and return its stdout.

        Args:
            check: fail if the command fails. If False, return stdout and stderr in any case.
        """
        done = subprocess.run(
            ["kubectl", "--kubeconfig", str(self.home / "control-plane" / "kubeconfig"), *args],
            capture_output=True,
            text=True,
            timeout=120.0,
            check=False,
            input=stdin,
        )
        if check:
            assert done.returncode == 0, (
                f"kubectl {' '.join(args)}: {done.stderr}\n{self.component_logs()}"
            )
            return done.stdout
        return done.stdout + done.stderr

    @contextlib.contextmanager
    def following(self, *args: str) -> Iterator[Callable[[], str]]:
        """Run a kubectl command during the block. Yield a function that returns the output."""
        command = [
            "kubectl",
            "--kubeconfig",
            str(self.home / "control-plane" / "kubeconfig"),
            *args,
        ]
        with (
            tempfile.TemporaryFile("w+b") as output,
            subprocess.Popen(command, stdout=output) as process,
        ):
            try:
                yield lambda: os.pread(output.fileno(), 2**20, 0).decode()
            finally:
                process.kill()

    def get(self, *args: str) -> dict[str, Any]:
        return json.loads(self.kubectl("get", *args, "-o", "json"))

    def apply(self, manifest: dict[str, Any]) -> None:
        # Kubernetes 1.20 has no server-side field validation, and no schema for kubectl's own.
        self.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))

    def condition(self, name: str, kind: str = "Ready") -> dict[str, Any]:
        conditions = self.get("llms", name).get("status", {}).get("conditions", [])
        return next(
            (c for c in conditions if c["type"] == kind),
            {"status": None, "reason": None, "message": None},
        )

    def wait_ready(self, name: str, timeout_s: float = 120.0) -> dict[str, Any]:
        """Wait for Ready=True of the current generation. Return the service's status."""

        def probe() -> dict[str, Any] | None:
            service = self.get("llms", name)
            status = service.get("status", {})
            ready = next((c for c in status.get("conditions", []) if c["type"] == "Ready"), {})
            assert ready.get("status") == "True", (
                f"{status} {self.kubectl('get', 'pods', '-o', 'wide')}"
            )
            assert ready.get("observedGeneration") == service["metadata"]["generation"]
            return status

        return eventually(probe, timeout_s=timeout_s, what=f"{name} Ready") or {}

    def pods(self, service: str, role: str) -> list[dict[str, Any]]:
        labels = f"serving.baton.dev/service={service},serving.baton.dev/role={role}"
        return self.get("pods", "-l", labels)["items"]

    def pod_processes(self) -> list[tuple[str, psutil.Process]]:
        """Return (pod name, process) for each process of a pod."""
        found = []
        for process in processes_with_home(self.home):
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                if "POCKETKUBE_POD_ROOT" in environment:
                    found.append((environment["POD_NAME"], process))
        return found

    def process_of(self, pod: str) -> psutil.Process:
        """Return the first process of the pod, which is the main process of its container."""
        for name, process in self.pod_processes():
            if name == pod:
                return process
        raise AssertionError(f"no process of pod {pod}")


@contextlib.contextmanager
def local_cluster(control_plane: str) -> Iterator[LocalClusterUnderTest]:
    require_control_plane(control_plane)
    with tempfile.TemporaryDirectory(prefix="baton-", ignore_cleanup_errors=True) as folder:
        cluster = LocalClusterUnderTest(Path(folder), control_plane)
        try:
            yield cluster
        finally:
            cluster.down()


def manifest(
    name: str, checkpoint: Path, *, prefill: int = 1, decode: int = 1, **spec: Any
) -> dict[str, Any]:
    """Return a small LLMService. Several such services fit on two cores."""
    return {
        "apiVersion": "serving.baton.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "model": {"uri": f"file://{checkpoint}", "servedName": name, "dtype": "float32"},
            **({"prefill": {"replicas": prefill}} if prefill else {}),
            "decode": {"replicas": decode},
            # Longer prompts are prefilled in chunks.
            "engine": {
                "numThreads": 1,
                "maxNumBatchedTokens": 64,
            },
            **spec,
        },
    }
