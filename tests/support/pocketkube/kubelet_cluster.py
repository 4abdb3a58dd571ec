"""A real etcd and kube-apiserver for kubelet tests, without controllers, scheduler and RBAC."""

import base64
import json
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from baton_kube.client import Object
from pocketkube.certificates import create_signing_key
from pocketkube.ports import free_ports
from support.waiting import eventually

TOKEN = "test-admin-token"


class ApiServer:
    """An API server. `request` sends JSON requests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kubeconfig = folder / "kubeconfig"
        self.url = ""
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, assets: Path) -> None:
        etcd, peer, secure = free_ports(3)
        key_file = create_signing_key(self.folder / "service-account.key")
        (self.folder / "tokens.csv").write_text(f'{TOKEN},admin,admin,"system:masters"\n')
        self._spawn(
            assets / "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{etcd}",
            f"--advertise-client-urls=http://127.0.0.1:{etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            "--unsafe-no-fsync",
        )
        self._spawn(
            assets / "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=198.18.255.254",
            f"--secure-port={secure}",
            f"--cert-dir={self.folder / 'certs'}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=AlwaysAllow",
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
            "--service-account-issuer=https://baton.test",
            f"--service-account-key-file={key_file}",
            f"--service-account-signing-key-file={key_file}",
            "--service-cluster-ip-range=198.19.0.0/24",
        )
        self.url = f"https://127.0.0.1:{secure}"
        self._write_kubeconfig()
        eventually(self._ready, "kube-apiserver answering /readyz", 60)
        eventually(lambda: self.get("/api/v1/namespaces/default"), "the default namespace", 30)

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        data = json.dumps(body).encode() if body is not None else None
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": content_type}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        context = ssl._create_unverified_context()
        with urllib.request.urlopen(request, context=context, timeout=20) as response:
            answer: Object = json.loads(response.read())
        return answer

    def get(self, path: str) -> Object | None:
        """Return the object, or None if there is none."""
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

    def _ready(self) -> bool:
        for process in self._processes:
            assert process.poll() is None, (
                f"{process.args} ended: {(self.folder / 'plane.log').read_text()[-2000:]}"
            )
        try:
            request = urllib.request.Request(
                self.url + "/readyz", headers={"Authorization": f"Bearer {TOKEN}"}
            )
            urllib.request.urlopen(
                request, context=ssl._create_unverified_context(), timeout=2
            ).close()
        except OSError:
            return False
        return True

    def _spawn(self, *command: object) -> None:
        with open(self.folder / "plane.log", "ab") as log:
            self._processes.append(
                subprocess.Popen([str(word) for word in command], stdout=log, stderr=log)
            )

    def _write_kubeconfig(self) -> None:
        certificate = self.folder / "certs" / "apiserver.crt"
        eventually(certificate.exists, "the API server's certificate", 30)
        authority = base64.b64encode(certificate.read_bytes()).decode()
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "t",
                    "cluster": {"server": self.url, "certificate-authority-data": authority},
                }
            ],
            "users": [{"name": "t", "user": {"token": TOKEN}}],
            "contexts": [{"name": "t", "context": {"cluster": "t", "user": "t"}}],
            "current-context": "t",
        }
        self.kubeconfig.write_text(json.dumps(content))


class KubeletProcess:
    """The kubelet under test, as its users start it."""

    def __init__(self, server: ApiServer, state_dir: Path, node: str, pool: str) -> None:
        self.server = server
        self.node = node
        self._command = [
            sys.executable,
            "-m",
            "pocketkube.kubelet",
            "--kubeconfig",
            str(server.kubeconfig),
        ]
        self._command += [
            "--state-dir",
            str(state_dir),
            "--node-name",
            node,
            "--address-pool",
            pool,
        ]
        self._command += ["--backoff-base", "0.2", "--backoff-cap", "1", "--refresh", "0.5"]
        self._log = state_dir.with_suffix(".log")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self._log, "ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        eventually(self._ready, "the node being Ready")

    def kill(self) -> None:
        """SIGKILL: the kubelet gets no chance to clean up."""
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
