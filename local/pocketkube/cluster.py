"""The processes of a cluster: control plane, kubelet, proxy, and the controllers of an embedded control plane.

They are children of this process and end with it: each asks the kernel for SIGKILL at its parent's death. Pods end with their
kubelet in the same way.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pocketkube.lifecycle import set_parent_death_signal
from pocketkube.networks import Networks, claim_networks

STOP_TIMEOUT_S = 20.0
FIRST_DELAY_S, LAST_DELAY_S = 1.0, 30.0
HELD_S = 60.0
"""A component that ran this long starts its delays anew."""


class ComponentError(Exception):
    """A process of the cluster did not start, or ended by itself; the text has the end of its log."""


@dataclass(frozen=True)
class Component:
    name: str
    command: list[str]
    env: dict[str, str]


@dataclass
class _Restarts:
    """When a component that keeps ending may be started again."""

    delay_s: float = 0.0
    last: float = float("-inf")

    def due(self, now: float) -> bool:
        """Whether to start it now; if so, the next time waits longer, unless this time holds."""
        if now < self.last + self.delay_s:
            return False
        held = now > self.last + HELD_S
        self.delay_s = FIRST_DELAY_S if held else min(2 * self.delay_s, LAST_DELAY_S)
        self.last = now
        return True


class LocalCluster:
    """Starts, restarts and stops the components in order.

    Args:
        state_dir: a folder that no other cluster uses; the logs are written to `logs` in it.
        control_plane: "embedded" or "real".
        ingress_port: port of the Ingress proxy on 127.0.0.1; 0 picks a free one.
        node_name: name of the cluster's only node.
    """

    def __init__(
        self, state_dir: Path, *, control_plane: str, ingress_port: int, node_name: str
    ) -> None:
        self.control_plane = control_plane
        self.kubeconfig = state_dir / "control-plane" / "kubeconfig"
        self.logs = state_dir / "logs"
        self._state_dir = state_dir
        self._ingress_port = ingress_port
        self._node_name = node_name
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._components: dict[str, Component] = {}
        self._restarts: dict[str, _Restarts] = {}
        self._networks: Networks | None = None

    async def start_control_plane(self, timeout_s: float) -> None:
        """Returns once the API server answers: the kubeconfig exists. Raises ComponentError, NetworksInUseError."""
        self._networks = claim_networks(self.control_plane)
        self.kubeconfig.unlink(missing_ok=True)
        module = [sys.executable, "-m", f"pocketkube.control_plane.{self.control_plane}"]
        options = [
            "--state-dir",
            str(self.kubeconfig.parent),
            "--service-network",
            self._networks.services,
        ]
        self.start(Component("control-plane", [*module, *options], {}))
        deadline = time.monotonic() + timeout_s
        while not self.kubeconfig.exists():
            self.check()
            if time.monotonic() > deadline:
                raise ComponentError(
                    f"the control plane did not answer within {timeout_s:g} s\n{self.log_tail('control-plane')}"
                )
            await asyncio.sleep(0.02)

    def start_node(self) -> None:
        """Kubelet and proxy, and the controllers that a real control plane brings itself."""
        assert self._networks is not None, "the control plane is started first"
        module = [sys.executable, "-m"]
        kubeconfig = ["--kubeconfig", str(self.kubeconfig)]
        kubelet = [
            *module,
            "pocketkube.kubelet",
            *kubeconfig,
            "--state-dir",
            str(self._state_dir / "kubelet"),
        ]
        kubelet += ["--address-pool", self._networks.pods]
        self.start(Component("kubelet", [*kubelet, "--node-name", self._node_name], {}))
        if self.control_plane == "embedded":
            self.start(
                Component("controllers", [*module, "pocketkube.controllers", *kubeconfig], {})
            )
        ingress = ["--ingress-address", "127.0.0.1", "--ingress-port", str(self._ingress_port)]
        self.start(Component("proxy", [*module, "pocketkube.proxy", *kubeconfig, *ingress], {}))

    def start(self, component: Component) -> None:
        """Start a component, which `heal()` restarts and `stop()` stops before the node."""
        parent = os.getpid()

        def die_with_parent() -> None:
            set_parent_death_signal(signal.SIGKILL)
            if os.getppid() != parent:  # it died before prctl
                os._exit(1)

        again = component.name in self._components
        self._components[component.name] = component
        self.logs.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(self.logs / f"{component.name}.log", "ab" if again else "wb") as log:
            self._processes[component.name] = subprocess.Popen(
                component.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **component.env},
                start_new_session=True,  # Ctrl-C reaches the supervisor alone, which stops the rest in order
                preexec_fn=die_with_parent,
            )

    def check(self) -> None:
        """Raises ComponentError if a component ended by itself."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise ComponentError(
                    f"{name} ended with exit code {process.returncode}\n{self.log_tail(name)}"
                )

    def heal(self) -> list[str]:
        """Starts again what ended by itself, with a delay that grows. Returns the names of what it started.

        Raises:
            ComponentError: the control plane ended, and the cluster's objects with it.
        """
        started = []
        now = time.monotonic()
        for name, process in list(self._processes.items()):
            if process.poll() is None:
                continue
            if name == "control-plane":
                self.check()
            restarts = self._restarts.setdefault(name, _Restarts())
            if restarts.due(now):
                self.start(self._components[name])
                started.append(name)
        return started

    def stop(self) -> None:
        """Stop the clients first, so that nothing repairs what is being stopped; then the node, then the API server.

        Idempotent.
        """
        node = ("kubelet", "proxy")
        clients = [name for name in self._processes if name not in (*node, "control-plane")]
        for stage in (clients, node, ("control-plane",)):
            processes = [self._processes.pop(name) for name in stage if name in self._processes]
            for process in processes:
                process.send_signal(signal.SIGTERM)  # nothing is sent to one that has ended
            deadline = time.monotonic() + STOP_TIMEOUT_S
            for process in processes:
                try:
                    process.wait(max(deadline - time.monotonic(), 0.0))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        if self._networks is not None:
            self._networks.release()

    def log_tail(self, name: str, lines: int = 15) -> str:
        try:
            text = (self.logs / f"{name}.log").read_text(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])
