"""The `baton` command as a user runs it: its errors and `baton status`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from baton_local.cli import main
from baton_local.state import ClusterInfo, StateDir

SERVICE = "apiVersion: serving.baton.dev/v1alpha1\nkind: LLMService\nmetadata: %s"


@pytest.mark.parametrize(
    "command", ["status", "down", "logs", "up -f service.yaml", "up --detach -f service.yaml"]
)
def test_a_state_folder_that_is_a_file_is_refused(tmp_path, monkeypatch, capsys, command):
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


def test_a_state_folder_that_cannot_be_created_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("BATON_HOME", "/proc/self/nowhere")
    monkeypatch.setattr(sys, "argv", ["baton", "up", "--detach", "-f", "service.yaml"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert "cannot keep a local cluster in /proc/self/nowhere: " in str(ended.value.code)


@pytest.mark.parametrize("command", ["status", "logs"])
def test_without_a_cluster_the_error_says_how_to_start_one(tmp_path, monkeypatch, command):
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["baton", command])
    with pytest.raises(SystemExit) as ended:
        main()
    assert "the local cluster is not running" in str(ended.value.code)
    assert "`baton up -f FILE`" in str(ended.value.code)


@pytest.mark.parametrize("output", ["json", "table"])
def test_status_of_a_deleted_service_names_the_kubeconfig(monkeypatch, capsys, output):
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


def test_serve_without_a_model_names_the_missing_argument():
    command = [sys.executable, "-m", "baton_local.cli", "serve"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("the following arguments are required: MODEL")
