"""The `baton up` command: its output, and no process is left after any kind of end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import msgspec
import psutil
import pytest
import yaml

from baton_local.up.supervisor import AGENT_QUESTION, PROMPT
from support.service.local_cluster import (
    BATON,
    LocalClusterUnderTest,
    manifest,
    processes_with_home,
    require_control_plane,
)
from support.waiting import eventually

DEMO = Path(__file__).parents[3] / "manifests/samples/demo.yaml"


@pytest.fixture
def home(tmp_path) -> LocalClusterUnderTest:
    return LocalClusterUnderTest(tmp_path, "embedded")


def demo_file(home: LocalClusterUnderTest, checkpoints) -> str:
    path = home.home / "demo.yaml"
    path.write_text(yaml.safe_dump(manifest("demo", checkpoints["qwen3"])))
    return str(path)


def assert_nothing_left(home: LocalClusterUnderTest) -> None:
    eventually(
        lambda: not processes_with_home(home.home),
        timeout_s=60,
        what="every process of the cluster gone",
    )


def test_once_streams_an_answer_reports_kv_bytes_and_leaves_nothing(home, checkpoints) -> None:
    started = time.monotonic()
    done = home.baton("up", "-f", demo_file(home, checkpoints), "--once")
    assert done.returncode == 0, done.stdout + done.stderr + home.component_logs()
    for word in ("TTFT", "tokens/s", "KV moved", "Ready", "kubectl", "curl"):
        assert word in done.stdout
    assert re.fullmatch(
        r"KV moved from prefill to decode: \d+\.\d\d MiB over ucx tcp/lo",
        done.stdout.splitlines()[-1],
    )
    print(f"baton up --once took {time.monotonic() - started:.1f} s")
    assert_nothing_left(home)


def test_a_failure_is_printed_and_the_exit_code_is_1(home, tmp_path) -> None:
    path = tmp_path / "missing.yaml"
    path.write_text(yaml.safe_dump(manifest("demo", tmp_path / "no-model")))
    done = home.baton("up", "-f", str(path), "--once", "--timeout", "30")
    assert done.returncode == 1
    assert "cannot become Ready: ModelNotFound: " in done.stdout
    assert_nothing_left(home)
    assert home.baton("up", "-f", str(tmp_path / "nowhere.yaml"), "--once").returncode == 1
    misspelt = manifest("demo", tmp_path / "no-model")
    misspelt["spec"]["decode"] = {"replica": 2}
    path.write_text(yaml.safe_dump(misspelt))
    done = home.baton("up", "-f", str(path), "--once")
    assert done.returncode == 1
    assert "spec.decode.replica" in done.stdout
    assert_nothing_left(home)


def test_up_detached_then_status_logs_and_down(home, checkpoints) -> None:
    done = home.baton("up", "-f", demo_file(home, checkpoints), "--detach")
    assert done.returncode == 0, done.stdout + home.component_logs()
    status = msgspec.json.decode(home.baton("status", "-o", "json").stdout)
    assert status["service"] == "demo"
    assert status["endpoint"].startswith("http://")
    assert {pod["role"] for pod in status["pods"]} == {"prefill", "decode", "gateway"}
    assert all(psutil.pid_exists(pod["pid"]) for pod in status["pods"])
    assert any(c["type"] == "Ready" and c["status"] == "True" for c in status["conditions"])
    assert "demo-decode-0" in home.baton("status").stdout
    assert home.baton("logs", "demo-decode-0", "--tail", "3").stdout
    assert (
        "already running" in home.baton("up", "-f", demo_file(home, checkpoints), "--once").stdout
    )
    assert home.baton("down").stdout.strip() == "stopped"
    assert_nothing_left(home)
    assert home.baton("status").returncode == 1


def test_the_printed_manifest_can_be_edited_and_applied(home, checkpoints) -> None:
    require_control_plane("embedded")
    bounds = {"decode": {"surgeTimeoutSeconds": 40}}
    service = manifest(
        "demo",
        home.home / "elsewhere",
        prefill=0,
        progressDeadlineSeconds=500,
        updateStrategy=bounds,
    )
    (home.home / "demo.yaml").write_text(yaml.safe_dump(service))
    model = checkpoints["qwen3"]
    done = home.baton("up", "-f", str(home.home / "demo.yaml"), "--model", str(model), "--detach")
    assert done.returncode == 0, done.stdout + home.component_logs()
    [line] = [line for line in done.stdout.splitlines() if "kubectl apply" in line]
    file = Path(line.split()[-1])
    assert file == home.home / "demo.yaml"
    applied = home.kubectl("apply", "-f", str(file), check=False)
    assert applied.endswith("/demo unchanged\n")
    assert "Warning" not in applied
    edited = yaml.safe_load(file.read_text())
    edited["spec"]["updateStrategy"]["decode"]["surgeTimeoutSeconds"] = 60
    del edited["spec"]["progressDeadlineSeconds"]
    file.write_text(yaml.safe_dump(edited))
    home.kubectl("apply", "-f", str(file))
    spec = home.get("llms", "demo")["spec"]
    assert spec["updateStrategy"]["decode"]["surgeTimeoutSeconds"] == 60
    assert spec["progressDeadlineSeconds"] == 600, (
        "a field removed from the file must have its default again"
    )
    assert spec["model"]["uri"] == service["spec"]["model"]["uri"]
    home.baton("down")
    assert_nothing_left(home)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_kill_9_leave_no_process(home, checkpoints, signum) -> None:
    supervisor = subprocess.Popen(
        [*BATON, "up", "-f", demo_file(home, checkpoints)],
        env=home.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually(
            lambda: '"demo-decode-0"' in home.baton("status", "-o", "json").stdout,
            timeout_s=180,
            what="a decode pod",
        )
        os.kill(supervisor.pid, signum)
        supervisor.wait(timeout=60)
    finally:
        supervisor.kill()
        supervisor.wait()
    assert_nothing_left(home)


def test_the_demo_answers_and_an_agent_reads_the_cluster(home) -> None:
    require_control_plane("embedded")
    done = home.baton("up", "-f", str(DEMO), "--agent", "--once")
    assert done.returncode == 0, done.stdout + done.stderr + home.component_logs()
    lines = done.stdout.splitlines()
    asked = lines.index(f"> {PROMPT}")
    assert lines[asked + 1] == (
        "A prefill pod hands the baton, the KV cache of a prompt, to a decode pod, "
        "which runs the rest of the race and generates the tokens."
    )
    assert lines[lines.index(f"> {AGENT_QUESTION}") + 1 : -1] == [
        'call    ready_pods({"role": "decode"})',
        "result  2",
        "answer  2 decode pods are ready.",
    ]
    assert lines[-1].startswith("KV moved from prefill to decode: ")
    assert_nothing_left(home)
