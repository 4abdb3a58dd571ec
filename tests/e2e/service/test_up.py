"""The `baton` command: one answer and out, and nothing left behind however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import msgspec
import pytest
import yaml

from support.local_cluster import BATON, LocalClusterUnderTest, manifest, processes_with_home
from support.waiting import eventually


@pytest.fixture
def home(tmp_path) -> LocalClusterUnderTest:
    return LocalClusterUnderTest(tmp_path, "embedded")


def demo_file(home: LocalClusterUnderTest, checkpoints) -> str:
    path = home.home / "demo.yaml"
    path.write_text(yaml.safe_dump(manifest("demo", checkpoints["qwen3"])))
    return str(path)


def assert_nothing_left(home: LocalClusterUnderTest) -> None:
    eventually(lambda: not processes_with_home(home.home), timeout_s=20, what="every process of the cluster gone")


def test_once_streams_an_answer_reports_kv_bytes_and_leaves_nothing(home, checkpoints):
    started = time.monotonic()
    done = home.baton("up", "-f", demo_file(home, checkpoints), "--once")
    assert done.returncode == 0, done.stdout + done.stderr + home.component_logs()
    for word in ("TTFT", "tokens/s", "KV moved", "Ready", "kubectl", "curl"):
        assert word in done.stdout
    print(f"baton up --once took {time.monotonic() - started:.1f} s")
    assert_nothing_left(home)


def test_failure_is_said_and_exits_non_zero(home, tmp_path):
    path = tmp_path / "missing.yaml"
    path.write_text(yaml.safe_dump(manifest("demo", tmp_path / "no-model")))
    done = home.baton("up", "-f", str(path), "--once", "--timeout", "15")
    assert done.returncode == 1
    assert "ModelNotFound" in done.stdout
    assert_nothing_left(home)
    assert home.baton("up", "-f", str(tmp_path / "nowhere.yaml"), "--once").returncode == 1
    misspelt = manifest("demo", tmp_path / "no-model")
    misspelt["spec"]["decode"] = {"replica": 2}
    path.write_text(yaml.safe_dump(misspelt))
    done = home.baton("up", "-f", str(path), "--once")
    assert done.returncode == 1
    assert "spec.decode.replica" in done.stdout
    assert_nothing_left(home)


def test_detach_status_logs_down(home, checkpoints):
    done = home.baton("up", "-f", demo_file(home, checkpoints), "--detach")
    assert done.returncode == 0, done.stdout + home.component_logs()
    status = msgspec.json.decode(home.baton("status", "-o", "json").stdout)
    assert status["service"] == "demo"
    assert status["endpoint"].startswith("http://")
    assert {pod["role"] for pod in status["pods"]} == {"prefill", "decode", "gateway"}
    assert any(c["type"] == "Ready" and c["status"] == "True" for c in status["conditions"])
    assert "demo-decode-0" in home.baton("status").stdout
    assert home.baton("logs", "demo-decode-0", "--tail", "3").stdout
    assert "already running" in home.baton("up", "-f", demo_file(home, checkpoints), "--once").stdout
    assert home.baton("down").stdout.strip() == "stopped"
    assert_nothing_left(home)
    assert home.baton("status").returncode == 1


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_kill_9_leave_no_process(home, checkpoints, signum):
    supervisor = subprocess.Popen(
        [*BATON, "up", "-f", demo_file(home, checkpoints)],
        env=home.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually(
            lambda: '"demo-decode-0"' in home.baton("status", "-o", "json").stdout,
            timeout_s=90,
            what="a decode pod",
        )
        os.kill(supervisor.pid, signum)
        supervisor.wait(timeout=60)
    finally:
        supervisor.kill()
        supervisor.wait()
    assert_nothing_left(home)
