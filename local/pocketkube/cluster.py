"""The processes of a cluster: control plane, controllers, kubelet and proxy.

These processes are children of the process that runs `LocalCluster`. When that process ends, the
kernel ends its children with SIGTERM or SIGKILL. A reaper process kills the pods when the kubelet
ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pocketkube.child_processes import Children, ComponentError
from pocketkube.containers.backoff import BackoffPolicy
from pocketkube.networks import Networks, claim_networks

RESTARTS = BackoffPolicy()


@dataclass(frozen=True)
class Component:
    """One process of the cluster: its name, its command, and variables added to the environment."""

    name: str
    command: list[str]
    env: dict[str, str]


class LocalCluster:
    """Starts, restarts and stops the components of a cluster.

    Args:
        state_dir: a folder that no other cluster uses; the logs are written to `logs` in it.
        control_plane: "embedded" or "real".
        ingress_port: port of the Ingress proxy on 127.0.0.1; 0 picks a free one.
        node_name: name of the cluster's only node.
        host_root: folder in which the kubelet first looks up the path of a hostPath volume. If the
            path does not exist there, or if `host_root` is None, the path in `/` is used.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        control_plane: str,
        ingress_port: int,
        node_name: str,
        host_root: Path | None = None,
    ) -> None:
        self.control_plane = control_plane
        self.kubeconfig = state_dir / "control-plane" / "kubeconfig"
        self.logs = state_dir / "logs"
        self._state_dir = state_dir
        self._ingress_port = ingress_port
        self._node_name = node_name
        self._host_root = host_root
        self._children = Children(self.logs)
        self._components: dict[str, Component] = {}
        #: Component -> delay in seconds before the last restart, and monotonic time of the restart.
        self._restarts: dict[str, tuple[float, float]] = {}
        #: Component that has ended -> monotonic time at which `heal()` noticed the end.
        self._ended_at: dict[str, float] = {}
        self._networks: Networks | None = None

    async def start_control_plane(self, timeout_s: float) -> None:
        """Start the control plane and wait until its API server answers.

        Raises:
            ComponentError: the control plane has ended, or did not answer within `timeout_s`.
            NetworksInUseError: too many clusters run on this machine.
        """
        self._networks = claim_networks(self.control_plane)
        self.kubeconfig.unlink(missing_ok=True)
        module = [sys.executable, "-P", "-m", f"pocketkube.control_plane.{self.control_plane}"]
        options = [
            *("--state-dir", str(self.kubeconfig.parent)),
            *("--service-network", self._networks.services),
        ]
        self.start(Component("control-plane", [*module, *options], {}))
        deadline = time.monotonic() + timeout_s
        while not self.kubeconfig.exists():
            self.check()
            if time.monotonic() > deadline:
                raise ComponentError(
                    f"the control plane did not answer within {timeout_s:g} s\n"
                    f"{self._children.log_tail('control-plane')}"
                )
            await asyncio.sleep(0.02)

    def start_node(self) -> None:
        """Start the kubelet, the proxy and, with the embedded control plane, the controllers."""
        assert self._networks is not None, "the control plane is started first"
        self._start_client(
            "kubelet",
            *("--state-dir", str(self._state_dir / "kubelet")),
            *("--address-pool", self._networks.pods),
            *("--node-name", self._node_name),
            *(("--host-root", str(self._host_root)) if self._host_root else ()),
        )
        if self.control_plane == "embedded":
            self._start_client("controllers")
        self._start_client("proxy", "--ingress-port", str(self._ingress_port))

    def _start_client(self, name: str, *options: str) -> None:
        module = [sys.executable, "-P", "-m", f"pocketkube.{name}"]
        kubeconfig = ["--kubeconfig", str(self.kubeconfig)]
        self.start(Component(name, [*module, *kubeconfig, *options], {}))

    def start(self, component: Component) -> None:
        """Start a component. If the component ends, `heal()` restarts it."""
        again = component.name in self._components
        self._components[component.name] = component
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **component.env}
        self._children.start(component.name, component.command, env, append=again)

    def check(self) -> None:
        """Check that all components run.

        Raises:
            ComponentError: a component has ended.
        """
        self._children.check()

    def heal(self) -> list[str]:
        """Restart components that have ended, and return the names of the restarted components.

        The first restart of a component is immediate. The backoff policy `RESTARTS` delays later
        restarts.

        Raises:
            ComponentError: the control plane has ended, so all objects of the cluster are lost.
        """
        started = []
        now = time.monotonic()
        for name in self._children.ended():
            if name == "control-plane":
                self.check()
            ended_at, delay_s = self._ended_at.setdefault(name, now), 0.0
            if name in self._restarts:
                last_delay_s, started_at = self._restarts[name]
                delay_s = RESTARTS.next_delay(last_delay_s, ended_at - started_at)
            if now >= ended_at + delay_s:
                del self._ended_at[name]
                self._restarts[name] = delay_s, now
                self.start(self._components[name])
                started.append(name)
        return started

    def stop(self) -> None:
        """Stop all components, and release the cluster's address ranges. Idempotent.

        The API server stops last, after the kubelet and the proxy. All other components stop first,
        so that the controllers do not replace stopped pods.
        """
        node = ("kubelet", "proxy")
        clients = [name for name in self._components if name not in (*node, "control-plane")]
        for stage in (clients, node, ("control-plane",)):
            self._children.stop(stage)
        if self._networks is not None:
            self._networks.release()
