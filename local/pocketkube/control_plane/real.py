"""A real control plane: etcd, kube-apiserver, kube-controller-manager and kube-scheduler.

The binaries come from `KUBEBUILDER_ASSETS`, or from the cache that `make control-plane` fills. Any
Kubernetes from 1.20 on works. All processes listen on 127.0.0.1. They end when the thread that
started them ends. etcd accepts only clients with a certificate of the cluster's authority. Only the
user of this process can read the key of such a certificate. Use this control plane for development
and tests only.

`python -m pocketkube.control_plane.real --state-dir D` runs a control plane until SIGTERM or
SIGINT. `D/kubeconfig` appears when the control plane is ready.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from pocketkube.certificates import Certificates, create_certificates, create_signing_key
from pocketkube.child_processes import Children, ComponentError
from pocketkube.kubeconfig import write_kubeconfig
from pocketkube.networks import SERVICE_RANGES
from pocketkube.ports import LOOPBACK, free_ports
from pocketkube.private_files import create_private_folder, write_private

BINARIES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
_CACHE = (
    Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton" / "control-plane"
)
AUDIT_POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
"""


def find_assets() -> Path | None:
    """Return the folder of the control plane's binaries; None if no folder has all of them.

    The folder is `KUBEBUILDER_ASSETS` if set, else the newest version in the cache that
    `make control-plane` fills.
    """
    if named := os.environ.get("KUBEBUILDER_ASSETS"):
        return Path(named) if _complete(Path(named)) else None
    versions = sorted(
        (p for p in _CACHE.glob("v*") if _complete(p)), key=lambda p: _numbers(p.name)
    )
    return versions[-1] if versions else None


def missing_assets() -> str:
    """Return the error message to show if `find_assets()` returns None."""
    where = os.environ.get("KUBEBUILDER_ASSETS") or str(_CACHE / "v1.20.2")
    return (
        f"{', '.join(BINARIES)} not all found in {where}: run `make control-plane` or set "
        "KUBEBUILDER_ASSETS"
    )


def _complete(folder: Path) -> bool:
    return all(os.access(folder / name, os.X_OK) for name in BINARIES)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


class RealControlPlane:
    """A kube-apiserver with etcd, kube-controller-manager and kube-scheduler.

    Call `start()` from a long-lived thread. The processes end when that thread ends.

    Args:
        assets: folder of the four binaries (see `find_assets`).
        state_dir: folder for keys, logs, `kubeconfig` and etcd's data. Each start deletes the data.
        service_network: range of the cluster addresses of Services.
        audit_log: file for one JSON object per request (`audit.k8s.io/v1`, without bodies); None
            for no log.
        apiserver_flags: further flags of kube-apiserver.
        has_controllers: whether kube-controller-manager and kube-scheduler also run.
    """

    def __init__(
        self,
        assets: Path,
        state_dir: Path,
        service_network: str = SERVICE_RANGES["real"],
        audit_log: Path | None = None,
        apiserver_flags: tuple[str, ...] = (),
        *,
        has_controllers: bool = True,
    ) -> None:
        self.kubeconfig = state_dir / "kubeconfig"
        self._apiserver_flags, self._has_controllers = apiserver_flags, has_controllers
        self._audit_log = audit_log
        self._assets = assets
        self._state_dir = state_dir
        self._service_network = service_network
        self._children = Children(state_dir)

    def start(self, timeout_s: float = 90.0) -> None:
        """Start the processes, and wait until objects can be created.

        Raises:
            ComponentError: a process has ended, or was not ready within `timeout_s`.
            PermissionError: another user owns the state folder or may write to it.
        """
        deadline = time.monotonic() + timeout_s
        try:
            self._start(deadline)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the processes, clients before servers. Idempotent."""
        for name in reversed(BINARIES):
            self._children.stop([name])

    def check(self) -> None:
        """Check that all processes run.

        Raises:
            ComponentError: a process has ended.
        """
        self._children.check()

    def _start(self, deadline: float) -> None:
        create_private_folder(self._state_dir)
        shutil.rmtree(self._state_dir / "etcd", ignore_errors=True)
        pki = self._state_dir / "pki"
        certificate = create_certificates(pki, [LOOPBACK])
        accounts_key = create_signing_key(pki / "service-accounts.key")
        tokens = _create_tokens(pki / "tokens.csv")
        etcd, peer, api = free_ports(3)
        server = f"https://{LOOPBACK}:{api}"

        self._spawn_etcd(etcd, peer, certificate)
        tls = ssl.create_default_context(cafile=str(certificate.authority))
        tls.load_cert_chain(certificate.client_certificate, certificate.client_key)
        etcd_health = f"https://{LOOPBACK}:{etcd}/health"
        self._await("etcd", lambda: self._answers(etcd_health, tls), deadline)
        self._spawn_apiserver(api, etcd, certificate, accounts_key, pki / "tokens.csv")
        self._await(
            "kube-apiserver",
            lambda: self._answers(f"{server}/readyz", tls, tokens["admin"]),
            deadline,
        )
        component, needed = "kube-apiserver", f"{server}/api/v1/namespaces/default"
        if self._has_controllers:
            self._spawn_controllers(server, certificate, accounts_key, tokens)
            # Pods can be created once the default service account exists.
            component, needed = "kube-controller-manager", f"{needed}/serviceaccounts/default"
        self._await(component, lambda: self._answers(needed, tls, tokens["admin"]), deadline)
        write_kubeconfig(self.kubeconfig, server, certificate.authority, tokens["admin"])

    def _spawn_etcd(self, port: int, peer_port: int, certificate: Certificates) -> None:
        client, peer = f"https://{LOOPBACK}:{port}", f"https://{LOOPBACK}:{peer_port}"
        self._spawn(
            "etcd",
            f"--data-dir={self._state_dir / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--client-cert-auth",
            f"--trusted-ca-file={certificate.authority}",
            f"--cert-file={certificate.certificate}",
            f"--key-file={certificate.key}",
            "--peer-client-cert-auth",
            f"--peer-trusted-ca-file={certificate.authority}",
            f"--peer-cert-file={certificate.certificate}",
            f"--peer-key-file={certificate.key}",
            # etcd's gRPC gateway would connect with the server certificate. etcd refuses this,
            # because it is not a client certificate.
            "--enable-grpc-gateway=false",
        )

    def _spawn_apiserver(
        self,
        port: int,
        etcd_port: int,
        certificate: Certificates,
        accounts_key: Path,
        tokens: Path,
    ) -> None:
        # The endpoint reconciler would publish a loopback address, which kube-apiserver refuses.
        self._spawn(
            "kube-apiserver",
            f"--etcd-servers=https://{LOOPBACK}:{etcd_port}",
            f"--etcd-cafile={certificate.authority}",
            f"--etcd-certfile={certificate.client_certificate}",
            f"--etcd-keyfile={certificate.client_key}",
            f"--bind-address={LOOPBACK}",
            f"--advertise-address={LOOPBACK}",
            "--endpoint-reconciler-type=none",
            f"--secure-port={port}",
            f"--cert-dir={self._state_dir / 'pki'}",
            f"--tls-cert-file={certificate.certificate}",
            f"--tls-private-key-file={certificate.key}",
            f"--kubelet-client-certificate={certificate.client_certificate}",
            f"--kubelet-client-key={certificate.client_key}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={accounts_key}",
            f"--service-account-signing-key-file={accounts_key}",
            f"--service-cluster-ip-range={self._service_network}",
            "--kubelet-preferred-address-types=InternalIP",
            "--allow-privileged=true",
            *self._audit(),
            *self._apiserver_flags,
        )

    def _spawn_controllers(
        self,
        server: str,
        certificate: Certificates,
        accounts_key: Path,
        tokens: dict[str, str],
    ) -> None:
        def common(name: str, port: int) -> tuple[str, ...]:
            kubeconfig = self._state_dir / f"{name}.kubeconfig"
            write_kubeconfig(kubeconfig, server, certificate.authority, tokens[name], name)
            return (
                "--leader-elect=false",
                f"--bind-address={LOOPBACK}",
                f"--cert-dir={self._state_dir / 'pki'}",
                f"--kubeconfig={kubeconfig}",
                f"--secure-port={port}",
                *self._no_insecure_port(f"kube-{name}"),
            )

        controllers, scheduler = free_ports(2)
        self._spawn(
            "kube-controller-manager",
            *common("controller-manager", controllers),
            f"--service-account-private-key-file={accounts_key}",
            f"--root-ca-file={certificate.authority}",
            "--use-service-account-credentials=true",
        )
        self._spawn("kube-scheduler", *common("scheduler", scheduler))

    def _audit(self) -> tuple[str, ...]:
        if self._audit_log is None:
            return ()
        policy = self._state_dir / "audit-policy.yaml"
        policy.write_text(AUDIT_POLICY)
        return (
            f"--audit-policy-file={policy}",
            f"--audit-log-path={self._audit_log}",
            "--audit-log-mode=blocking-strict",
        )

    def _spawn(self, name: str, *arguments: str) -> None:
        environment = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        self._children.start(name, [str(self._assets / name), *arguments], environment)

    def _no_insecure_port(self, name: str) -> tuple[str, ...]:
        """Return the flag that disables the insecure port of the binary `name`.

        The result is empty for versions from 1.23 on, which have no insecure port.
        """
        command = [str(self._assets / name), "--version"]
        version = _numbers(
            subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        )
        return ("--port=0",) if version < (1, 23) else ()

    def _answers(self, url: str, tls: ssl.SSLContext | None = None, token: str = "") -> bool:
        request = urllib.request.Request(
            url, headers={"Authorization": f"Bearer {token}"} if token else {}
        )
        try:
            with urllib.request.urlopen(request, timeout=5, context=tls) as response:
                return bool(response.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def _await(self, name: str, ready: Callable[[], bool], deadline: float) -> None:
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise ComponentError(
                    f"{name} was not ready in time\n{self._children.log_tail(name)}"
                )
            time.sleep(0.1)


def _create_tokens(path: Path) -> dict[str, str]:
    """Create a bearer token per client, write them to `path`, and return client name -> token."""
    tokens = {
        name: secrets.token_urlsafe(32) for name in ("admin", "controller-manager", "scheduler")
    }
    lines = (
        f'{tokens["admin"]},pocketkube-admin,pocketkube-admin,"system:masters"',
        f"{tokens['controller-manager']},system:kube-controller-manager,kcm",
        f"{tokens['scheduler']},system:kube-scheduler,scheduler",
    )
    write_private(path, "\n".join(lines).encode() + b"\n")
    return tokens


def main() -> None:
    """Parse the command line, and run a control plane until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m pocketkube.control_plane.real")
    parser.add_argument(
        "--state-dir", type=Path, required=True, help="etcd's data, keys, logs and the kubeconfig"
    )
    parser.add_argument(
        "--service-network", default=SERVICE_RANGES["real"], help="addresses of Services"
    )
    parser.add_argument(
        "--audit-log",
        type=Path,
        metavar="FILE",
        help="one JSON object per request; default: no log",
    )
    arguments = parser.parse_args()
    assets = find_assets()
    if assets is None:
        sys.exit(missing_assets())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    plane = RealControlPlane(
        assets, arguments.state_dir, arguments.service_network, arguments.audit_log
    )
    try:
        plane.start()
        print(plane.kubeconfig, flush=True)
        while True:
            plane.check()
            time.sleep(0.5)
    except ComponentError as error:
        sys.exit(str(error))
    finally:
        plane.stop()


if __name__ == "__main__":
    main()
