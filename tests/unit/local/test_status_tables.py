"""The tables of pods and conditions."""

from __future__ import annotations

import io
import os
import subprocess

import pytest
from rich.console import Console

from baton_local.service_status import PodStatus, ServiceCondition, ServiceStatus, with_pids
from baton_local.status_tables import print_status, service_tables
from pocketkube.containers.process import CONTAINER_MARKER
from support.waiting import eventually


def test_tables_print_brackets_literally_and_do_not_truncate_names() -> None:
    name, message = "demo-gateway-" + "x" * 40, "unready: [engine] see [/var/log]"
    pods = [PodStatus(name, "gateway", "127.77.0.2", "Running", False, 1, message)]
    conditions = [ServiceCondition("Ready", "False", "PodsNotReady", message)]
    status = ServiceStatus("demo", "default", "", "demo", conditions, pods, "", "/k")
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(service_tables(status))
    assert console.export_text().count(message) == 2
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(service_tables(status))
    assert "…" not in console.export_text()


def test_a_long_message_does_not_widen_the_other_rows(capsys: pytest.CaptureFixture[str]) -> None:
    conditions = [ServiceCondition("Ready", "False", "ModelNotFound", "x" * 400)]
    conditions.append(ServiceCondition("Available", "True", "Available", "y"))
    status = ServiceStatus("demo", "default", "http://e", "demo", conditions, [], "", "/k")
    print_status(status, "/m")
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith("y")]
    assert not [line for line in lines if line != line.rstrip()]


def test_status_shows_the_pid_of_a_pods_container() -> None:
    sleeper = ["sleep", "60"]
    process = subprocess.Popen(
        sleeper, env={**os.environ, CONTAINER_MARKER: "a1"}, start_new_session=True
    )
    try:
        pods = [
            PodStatus(
                "demo-decode-0",
                "decode",
                "127.77.0.2",
                "Running",
                True,
                0,
                "",
                container_id="process://a1",
            ),
            PodStatus("demo-decode-1", "decode", "", "Pending", False, 0, ""),
        ]
        status = ServiceStatus("demo", "default", "", "demo", [], pods, "", "/k")
        found = eventually(
            lambda: [pod.pid for pod in with_pids(status).pods if pod.pid],
            timeout_s=30,
            what="the container's process",
        )
        assert found == [process.pid]
        console = Console(width=200, record=True, file=io.StringIO())
        console.print(service_tables(with_pids(status)))
        assert str(process.pid) in console.export_text()
    finally:
        process.kill()
        process.wait()
