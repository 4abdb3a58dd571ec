"""The `baton` command as a user runs it: its errors and `baton status`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from baton_kube.client import KubeError
from baton_local.cli import main
from baton_local.cluster_api import ClusterApi
from baton_local.service_status import PodStatus, ServiceStatus
from baton_local.state_dir import ClusterInfo, StateDir

SERVICE = "apiVersion: serving.baton.dev/v1alpha1\nkind: LLMService\nmetadata: %s"


@pytest.mark.parametrize(
    "command", ["status", "down", "logs", "up -f service.yaml", "up --detach -f service.yaml"]
)
def test_a_state_folder_that_is_a_file_is_refused(tmp_path, monkeypatch, capsys, command) -> None:
    home = tmp_path / "file"
    home.touch()
    (tmp_path / "service.yaml").write_text(f"{SERVICE % '{name: x}'}\nspec: {{}}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATON_HOME", str(home))
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(sys, "argv", ["baton", *command.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    output = ended.value.code if isinstance(ended.value.code, str) else capsys.readouterr().out
    assert (
        f"cannot keep a local cluster in {home}: Not a directory; set BATON_HOME to another folder"
        in output
    )
    assert ended.value.code != 0


def test_a_state_folder_that_cannot_be_created_is_refused(monkeypatch, capsys) -> None:
    monkeypatch.setenv("BATON_HOME", "/proc/self/nowhere")
    monkeypatch.setattr(sys, "argv", ["baton", "up", "--detach", "-f", "service.yaml"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert "cannot keep a local cluster in /proc/self/nowhere: " in str(ended.value.code)


@pytest.mark.parametrize("command", ["status", "logs"])
def test_without_a_cluster_the_error_says_how_to_start_one(tmp_path, monkeypatch, command) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["baton", command])
    with pytest.raises(SystemExit) as ended:
        main()
    assert "the local cluster is not running" in str(ended.value.code)
    assert "`baton up -f FILE`" in str(ended.value.code)


@pytest.mark.parametrize("output", ["json", "table"])
def test_status_of_a_deleted_service_names_the_kubeconfig(monkeypatch, capsys, output) -> None:
    async def deleted(_: ClusterInfo) -> None:
        return None

    monkeypatch.setattr("baton_local.cli._status", deleted)
    monkeypatch.setattr(
        StateDir, "read_info", lambda self: ClusterInfo(1, "/k", "default", "demo", "/f")
    )
    monkeypatch.setattr(sys, "argv", ["baton", "status", "-o", output])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    printed = capsys.readouterr()
    assert "LLMService default/demo was deleted" in printed.err
    if output == "json":
        status = json.loads(printed.out)
        assert (status["service"], status["kubeconfig"], status["exists"], status["pods"]) == (
            "demo",
            "/k",
            False,
            [],
        )
    else:
        assert "kubeconfig  /k" in printed.out


PODS = {"demo-decode-0": "decode", "demo-decode-1": "decode", "demo-gateway-a": "gateway"}


class FakeApi:
    """An API server with the pods of `demo` and a pod of another service."""

    async def log(self, namespace: str, pod: str, **_: Any) -> AsyncIterator[bytes]:
        if pod not in (*PODS, "other"):
            raise KubeError(404, "NotFound", f'pods "{pod}" not found')
        yield f"log of {pod}\n".encode()


@pytest.fixture
def run_logs(tmp_path, monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Run `baton logs`. Return the exit code, stdout and stderr."""

    async def status(_: ClusterInfo) -> ServiceStatus:
        pods = [
            PodStatus(name, role, "127.77.0.2", "Running", True, 0, "")
            for name, role in PODS.items()
        ]
        return ServiceStatus("demo", "default", "", "demo", [], pods, "", "/k")

    @contextlib.asynccontextmanager
    async def connect(_: Path) -> AsyncIterator[FakeApi]:
        yield FakeApi()

    info = ClusterInfo(1, "/k", "default", "demo", "/f")
    monkeypatch.setattr("baton_local.cli._status", status)
    monkeypatch.setattr(ClusterApi, "connect", connect)
    monkeypatch.setattr(StateDir, "read_info", lambda self: info)
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "kubelet.log").write_text("")

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["baton", "logs", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err

    return run


def test_logs_of_a_role_are_the_logs_of_its_pods(run_logs) -> None:
    decode = [f"[{name}] log of {name}\n" for name in ("demo-decode-0", "demo-decode-1")]
    assert run_logs("decode") == (0, "".join(decode), "")
    assert run_logs("gateway") == (0, "log of demo-gateway-a\n", "")
    assert run_logs("demo-decode-1") == (0, "log of demo-decode-1\n", "")
    assert run_logs("other") == (0, "log of other\n", "")
    assert run_logs()[1].count("log of") == 3


def test_logs_of_an_unknown_name_list_the_names(run_logs) -> None:
    names = "decode, demo-decode-0, demo-decode-1, demo-gateway-a, gateway, kubelet"
    assert run_logs("nope") == (1, "", f'pods "nope" not found\ntry one of: {names}\n')


def test_output_through_a_pipe_is_not_wrapped(tmp_path, monkeypatch, capsys) -> None:
    message = "word " * 60
    long = tmp_path / "a long name of a folder"
    pods = [PodStatus("demo-gateway-" + "x" * 90, "gateway", "", "Pending", False, 1, message)]
    found = ServiceStatus("demo", "default", "", "demo", [], pods, "", "/k")

    async def status(_: ClusterInfo) -> ServiceStatus | None:
        return found

    monkeypatch.setattr("baton_local.cli._status", status)
    monkeypatch.delenv("COLUMNS", raising=False)
    info = ClusterInfo(1, "/k", "namespace-" + "x" * 90, "demo", "/f")
    monkeypatch.setattr(StateDir, "read_info", lambda self: info)
    monkeypatch.setattr(sys, "argv", ["baton", "status"])
    with pytest.raises(SystemExit):
        main()
    [line] = [line for line in capsys.readouterr().out.splitlines() if "demo-gateway" in line]
    assert pods[0].name in line
    assert message.strip() in line
    found = None
    with pytest.raises(SystemExit):
        main()
    assert f"LLMService {info.namespace}/demo was deleted\n" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["baton", "up", "-f", str(long / ("x" * 90))])
    with pytest.raises(SystemExit):
        main()
    assert f"cannot read {long / ('x' * 90)}: No such file" in capsys.readouterr().out


def test_serve_without_a_model_names_the_missing_argument() -> None:
    command = [sys.executable, "-m", "baton_local.cli", "serve"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("the following arguments are required: MODEL")
