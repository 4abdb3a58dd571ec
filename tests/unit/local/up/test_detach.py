"""`baton up --detach`: the supervisor in the background ends if its service does not answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from baton_local.state_dir import StateDir
from baton_local.up import detach
from baton_local.up.detach import run_detached
from support.waiting import eventually

#: A supervisor that records its cluster if asked to, and then neither answers nor ends by SIGTERM.
SILENT = """
import os, signal, sys, time
from pathlib import Path
from baton_local.state_dir import ClusterInfo, StateDir
signal.signal(signal.SIGTERM, signal.SIG_IGN)
state = StateDir(Path(sys.argv[1])); state.acquire()
if sys.argv[2] == "applied":
    state.write_info(ClusterInfo(os.getpid(), "/k", "default", "demo", "/f"))
print("waiting", flush=True); time.sleep(600)
"""


@pytest.mark.parametrize(
    ("progress", "missing"),
    [("started", "the cluster has not started"), ("applied", "default/demo has not answered")],
)
def test_a_service_that_never_answers_ends_the_detached_start(
    tmp_path, monkeypatch, capsys, progress, missing
) -> None:
    state = StateDir(tmp_path / "home")
    is_waiting = False

    def clock() -> float:
        """Return a time after the deadline once the supervisor waits."""
        nonlocal is_waiting
        now = 100.0 if is_waiting else 0.0
        is_waiting = (state.logs / "supervisor.log").read_text() == "waiting\n"
        return now

    monkeypatch.setattr(detach, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    monkeypatch.setattr(detach, "STOP_TIMEOUT_S", 0.1)
    command = [sys.executable, "-c", SILENT, str(state.root), progress]
    assert run_detached(command, 5.0, state, Console(width=1000)) == 1
    assert capsys.readouterr().out == (
        f"baton up: {missing} within 5 s (see --timeout); `baton up` printed:\nwaiting\n\n"
    )
    assert state.supervisor() is None


def test_ctrl_c_during_a_detached_start_stops_the_supervisor(tmp_path) -> None:
    file = tmp_path / "demo.yaml"
    # A service that never becomes ready, so `up` still runs when the signal arrives.
    service = {
        "apiVersion": "serving.baton.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": "demo"},
    }
    file.write_text(json.dumps(service | {"spec": {"model": {"uri": "file:///nowhere"}}}))
    state = StateDir(tmp_path / "home")
    command = [sys.executable, "-m", "baton_local.cli", "up", "--detach", "-f", str(file)]
    env = {**os.environ, "BATON_HOME": str(state.root)}
    up = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, start_new_session=True)
    try:
        eventually(state.supervisor, timeout_s=60, what="a supervisor")
        up.send_signal(signal.SIGINT)
        assert up.wait(60) == 130
        assert state.supervisor() is None
    finally:
        up.kill()
        up.wait()
        state.stop_supervisor(20)
