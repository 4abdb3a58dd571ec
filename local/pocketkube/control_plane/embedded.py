"""The embedded control plane: pocketkube's API server and garbage collector.

`EmbeddedControlPlane` runs the control plane in a thread.
`python -m pocketkube.control_plane.embedded` runs the control plane in a separate process.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

from pocketkube.apiserver.cluster_state import ClusterState
from pocketkube.apiserver.serving.api_server import ApiServer
from pocketkube.apiserver.store import DEFAULT_WINDOW
from pocketkube.certificates import create_certificates
from pocketkube.child_processes import ComponentError
from pocketkube.kubeconfig import write_kubeconfig
from pocketkube.lifecycle import run_until_terminated, until_stopped
from pocketkube.networks import SERVICE_RANGES
from pocketkube.ports import LOOPBACK
from pocketkube.private_files import create_private_folder


class EmbeddedControlPlane:
    """Pocketkube's API server and garbage collector, on 127.0.0.1.

    Args:
        state_dir: folder for the certificates and `kubeconfig`; the objects are in memory only.
        port: port to listen on; 0 for a free one.
        service_network: range of the cluster addresses of Services.
        event_window: number of latest changes to keep per kind. A watch can resume after any of
            them.
    """

    def __init__(
        self,
        state_dir: Path,
        port: int = 0,
        service_network: str = SERVICE_RANGES["embedded"],
        event_window: int = DEFAULT_WINDOW,
    ) -> None:
        self.kubeconfig = state_dir / "kubeconfig"
        self._state_dir = state_dir
        self._port = port
        self._service_network = service_network
        self._window = event_window
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event | None = None
        self._failure: BaseException | None = None

    @property
    def server(self) -> str:
        """URL of the API server. Valid after `start()`."""
        return f"https://{LOOPBACK}:{self._port}"

    def start(self, timeout_s: float = 60.0) -> None:
        """Start the API server in a new thread, and wait until it answers.

        Raises:
            ComponentError: the API server did not start.
        """
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(ready,), name="embedded-control-plane", daemon=True
        )
        self._thread.start()
        if not ready.wait(timeout_s):
            raise ComponentError(
                f"the embedded control plane did not start within {timeout_s:.0f} s"
            )
        if self._failure:
            raise ComponentError(
                f"the embedded control plane did not start: {self._failure}"
            ) from self._failure

    def stop(self) -> None:
        """Stop the API server and end its thread. Idempotent."""
        if self._loop and self._ending and self._thread and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join(timeout=10)
        self._thread = None

    def _run(self, ready: threading.Event) -> None:
        try:
            asyncio.run(self.serve(ready.set))
        except Exception as error:
            self._failure = error
        finally:
            ready.set()

    async def serve(self, on_ready: Callable[[], None]) -> None:
        """Run the API server in the current event loop until `stop()` or cancellation.

        Args:
            on_ready: called once the API server answers requests.
        """
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        files = create_certificates(self._state_dir / "pki", [LOOPBACK])
        token = secrets.token_urlsafe(32)
        cluster = ClusterState(token, self._service_network, self._window)
        server = ApiServer(cluster, LOOPBACK, self._port, files)
        try:
            await server.start()
            self._port = server.port
            write_kubeconfig(self.kubeconfig, self.server, files.authority, token)
            on_ready()
            await until_stopped(self._ending, cluster.collector.run())
        finally:
            await server.stop()


def main() -> None:
    """Parse the command line, and run a control plane until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(
        prog="python -m pocketkube.control_plane.embedded",
        description=(
            "Run the embedded control plane until SIGTERM or SIGINT; print the kubeconfig's path."
        ),
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        required=True,
        help="where certificates and the kubeconfig are written",
    )
    parser.add_argument(
        "--service-network", default=SERVICE_RANGES["embedded"], help="addresses of Services"
    )
    arguments = parser.parse_args()
    create_private_folder(arguments.state_dir)
    plane = EmbeddedControlPlane(arguments.state_dir, service_network=arguments.service_network)

    async def run(stop: asyncio.Event) -> None:
        await until_stopped(stop, plane.serve(lambda: print(plane.kubeconfig, flush=True)))

    run_until_terminated(run, name="control-plane", stop_timeout_s=10.0)


if __name__ == "__main__":
    main()
