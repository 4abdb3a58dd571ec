"""`baton-operator` that cannot start exits with one line that names the problem."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from kubernetes.aio.config import ConfigException

from baton_kube.client import connect
from baton_operator import cli
from baton_operator.builders.restrictions import Restrictions


def kubeconfig(cluster: object) -> str:
    content = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": cluster}],
        "users": [{"name": "u", "user": {}}],
    }
    return json.dumps(content)


@pytest.mark.parametrize(
    "content",
    [
        b"a: [",
        b"- 1",
        b"clusters: 3",
        b"",
        b"\xff\xfe\x00",
        kubeconfig(3).encode(),
        kubeconfig(
            {"server": "https://127.0.0.1:1", "certificate-authority-data": "QUJD"}
        ).encode(),
    ],
)
async def test_an_invalid_kubeconfig_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "kubeconfig"
    path.write_bytes(content)
    with pytest.raises(ConfigException, match=f"{path} is not a kubeconfig"):
        async with connect(str(path)):
            pass


async def test_a_valid_kubeconfig_connects_and_later_errors_are_raised(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig({"server": "https://127.0.0.1:1"}))
    with pytest.raises(TypeError, match="of its user"):
        async with connect(str(path)):
            raise TypeError("of its user")


def test_the_operator_exits_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text("a: [\n  - b\n c")
    command = [
        sys.executable,
        "-m",
        "baton_operator.cli",
        "--kubeconfig",
        str(path),
        "--http-port",
        "0",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 78
    assert ended.stderr.splitlines()[-1].startswith(
        f"FATAL ConfigurationError: cannot access the cluster: {path} is not a "
    )
    assert "Traceback" not in ended.stderr


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig({"server": "http://127.0.0.1:1"}))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ["--kubeconfig", str(path), "--host", "127.0.0.1", "--http-port", port]
        command = [sys.executable, "-m", "baton_operator.cli", *flags]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].endswith(
        f"cannot listen on 127.0.0.1:{port}: Address already in use"
    )
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], Restrictions()),
        (["--namespace", "a"], None),
        (["--namespace", "a", "--templates", "restricted"], Restrictions()),
        (["--templates", "unrestricted"], None),
        (
            ["--host-path", "/mnt/a/", "--host-path", "/mnt/b", "--annotation-prefix", "x.io/"],
            Restrictions(host_paths=("/mnt/a/", "/mnt/b"), annotation_prefixes=("x.io/",)),
        ),
    ],
)
def test_an_operator_of_all_namespaces_restricts_services(
    flags: list[str], expected: Restrictions | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = []

    async def run(args: argparse.Namespace, restrictions: Restrictions | None) -> None:
        passed.append(restrictions)

    monkeypatch.setattr(cli, "run", run)
    cli.main(["--kubeconfig", "x", *flags])
    assert passed == [expected]


def test_an_invalid_host_path_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--kubeconfig", "x", "--host-path", "/mnt/../etc"])
    assert ended.value.code == 2
    assert "host path /mnt/../etc must be an absolute path" in capsys.readouterr().err


def test_kopf_run_exits_without_a_kubeconfig(tmp_path: Path) -> None:
    path = tmp_path / "missing"
    command = [sys.executable, "-m", "kopf", "run", "-m", "baton_operator.handlers", "-n", "x"]
    environment = {**os.environ, "KUBECONFIG": str(path)}
    environment.pop("KUBERNETES_SERVICE_HOST", None)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert str(path) in ended.stderr
