"""Write and read kubeconfig files."""

from __future__ import annotations

import base64
from pathlib import Path

import yaml

from pocketkube.private_files import write_private


def write_account_kubeconfig(admin: Path, path: Path, token: str) -> Path:
    """Write to `path` the kubeconfig `admin` with the bearer token `token`. Return `path`."""
    document = yaml.safe_load(admin.read_text())
    document["users"][0]["user"] = {"token": token}
    write_private(path, yaml.safe_dump(document, sort_keys=False).encode())
    return path


def write_kubeconfig(
    path: Path, server: str, authority: Path, token: str, user: str = "pocketkube-admin"
) -> None:
    """Write a kubeconfig with the context `pocketkube`. Only the file's owner can read it."""
    data = base64.b64encode(authority.read_bytes()).decode()
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": "pocketkube",
                "cluster": {"server": server, "certificate-authority-data": data},
            }
        ],
        "users": [{"name": user, "user": {"token": token}}],
        "contexts": [
            {
                "name": "pocketkube",
                "context": {"cluster": "pocketkube", "user": user, "namespace": "default"},
            }
        ],
        "current-context": "pocketkube",
    }
    write_private(path, yaml.safe_dump(document, sort_keys=False).encode())


def certificate_authority(kubeconfig: Path) -> bytes:
    """Return the CA certificate, in PEM, from a kubeconfig that `write_kubeconfig()` wrote."""
    [cluster] = yaml.safe_load(kubeconfig.read_text())["clusters"]
    return base64.b64decode(cluster["cluster"]["certificate-authority-data"])
