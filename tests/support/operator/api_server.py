"""A real etcd and kube-apiserver with RBAC, without controllers, scheduler and kubelet."""

from __future__ import annotations

import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from pocketkube.certificates import create_signing_key
from pocketkube.ports import free_ports
from support.waiting import eventually

START_S = 60.0
OPERATOR_USER = "system:serviceaccount:baton-system:baton-operator"


@contextmanager
def api_server(binaries: Path, folder: Path) -> Iterator[dict[str, Path]]:
    """Run an API server. Yield kubeconfigs of `admin` and of `operator` with its RBAC."""
    etcd_port, peer_port, port = free_ports(3)
    key = create_signing_key(folder / "service-account.key")
    tokens = folder / "tokens.csv"
    tokens.write_text(f'admin-token,admin,1,"system:masters"\noperator-token,{OPERATOR_USER},2\n')
    etcd_url, peer_url = f"http://127.0.0.1:{etcd_port}", f"http://127.0.0.1:{peer_port}"
    commands = [
        [
            *(
                str(binaries / "etcd"),
                "--data-dir",
                str(folder / "etcd"),
                "--name",
                "test",
                "--unsafe-no-fsync",
            ),
            *("--listen-client-urls", etcd_url, "--advertise-client-urls", etcd_url),
            *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
            *("--initial-cluster", f"test={peer_url}", "--log-level", "error"),
        ],
        [
            *(
                str(binaries / "kube-apiserver"),
                "--etcd-servers",
                etcd_url,
                "--cert-dir",
                str(folder / "certs"),
            ),
            *(
                "--bind-address",
                "127.0.0.1",
                "--secure-port",
                str(port),
                "--endpoint-reconciler-type",
                "none",
            ),
            *(
                "--authorization-mode",
                "RBAC",
                "--token-auth-file",
                str(tokens),
                "--service-cluster-ip-range",
                "127.96.0.0/16",  # tests listen on a Service's address in place of its pods
            ),
            *("--disable-admission-plugins", "ServiceAccount"),  # its controller does not run
            *("--enable-admission-plugins", "OwnerReferencesPermissionEnforcement"),
            *("--service-account-issuer", "https://test", "--service-account-key-file", str(key)),
            *("--service-account-signing-key-file", str(key)),
        ],
    ]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with (folder / f"{Path(command[0]).name}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        server = f"https://127.0.0.1:{port}"
        _wait_ready(server, processes, folder)
        yield {user: _kubeconfig(folder, server, user) for user in ("admin", "operator")}
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


def _wait_ready(server: str, processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    context = ssl._create_unverified_context()
    request = urllib.request.Request(
        f"{server}/readyz", headers={"Authorization": "Bearer admin-token"}
    )

    def is_ready() -> bool:
        for process in processes:
            if process.poll() is not None:
                name = Path(process.args[0]).name
                log = (folder / f"{name}.log").read_text()
                raise RuntimeError(f"{name} ended:\n{log[-2000:]}")
        try:
            with urllib.request.urlopen(request, context=context, timeout=2) as response:
                return response.status == 200
        except OSError as error:
            raise AssertionError(error) from error

    eventually(is_ready, "kube-apiserver ready", START_S, every_s=0.2)


def _kubeconfig(folder: Path, server: str, user: str) -> Path:
    path = folder / f"{user}.kubeconfig"
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "test", "cluster": {"server": server, "insecure-skip-tls-verify": True}}
        ],
        "users": [{"name": user, "user": {"token": f"{user}-token"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
        "current-context": "test",
    }
    path.write_text(yaml.safe_dump(content))
    return path
