"""A real API server and a kubelet process, without controllers and scheduler.

For the test of the kubelet process.
"""

import json
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import yaml

from baton_kube.client import Object
from pocketkube.control_plane.real import RealControlPlane
from pocketkube.kubeconfig import certificate_authority
from support.waiting import eventually


class ApiServer(RealControlPlane):
    """A real API server. `request()` sends JSON requests as an administrator."""

    def __init__(self, assets: Path, folder: Path) -> None:
        flags = ("--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",)
        super().__init__(
            assets,
            folder,
            service_network="198.19.0.0/24",
            apiserver_flags=flags,
            has_controllers=False,
        )

    def request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        document = yaml.safe_load(self.kubeconfig.read_text())
        url = document["clusters"][0]["cluster"]["server"] + path
        token = document["users"][0]["user"]["token"]
        data = json.dumps(body).encode() if body is not None else None
        headers = {"Authorization": f"Bearer {token}", "Content-Type": content_type}
        request = urllib.request.Request(url, data, headers, method=method)
        context = ssl.create_default_context(cadata=certificate_authority(self.kubeconfig).decode())
        with urllib.request.urlopen(request, context=context, timeout=20) as response:
            answer: Object = json.loads(response.read())
        return answer

    def get(self, path: str) -> Object | None:
        """Return the object at `path`, or None if it does not exist."""
        try:
            return self.request("GET", path)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def create(self, path: str, body: Object) -> Object:
        return self.request("POST", path, body)

    def patch(self, path: str, body: Object) -> Object:
        return self.request("PATCH", path, body, "application/merge-patch+json")


class KubeletProcess:
    """The kubelet under test, as its users start it."""

    def __init__(self, server: ApiServer, state_dir: Path, node: str, pool: str) -> None:
        self.server = server
        self.node = node
        self._command = [
            *(sys.executable, "-m", "pocketkube.kubelet", "--kubeconfig", str(server.kubeconfig)),
            *("--state-dir", str(state_dir), "--node-name", node, "--address-pool", pool),
            *("--backoff-base", "0.2", "--backoff-cap", "1", "--refresh", "0.5"),
        ]
        self._log = state_dir.with_suffix(".log")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self._log, "ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        eventually(self._ready, "the node being Ready")

    def kill(self) -> None:
        """Kill the kubelet with SIGKILL, so that it cannot clean up."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()

    def log(self) -> str:
        return self._log.read_text()

    def _ready(self) -> bool:
        assert self.process.poll() is None, self.log()[-3000:]
        node = self.server.get(f"/api/v1/nodes/{self.node}") or {}
        conditions = (node.get("status") or {}).get("conditions") or []
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
