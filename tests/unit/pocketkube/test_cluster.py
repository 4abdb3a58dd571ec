"""Tests for the supervision of the cluster's components."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pocketkube import cluster
from pocketkube.cluster import Component, LocalCluster
from support.waiting import eventually


def test_the_delay_before_a_restart_counts_from_the_end_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=lambda: now))
    local = LocalCluster(tmp_path, control_plane="embedded", ingress_port=0, node_name="node")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    # Each run ends as soon as the test opens the other end of the pipe.
    command = [sys.executable, "-c", f"open({str(fifo)!r}).read()"]
    local.start(Component("worker", command, {}))

    def end_run() -> None:
        fifo.write_text("")
        eventually(local._children.ended, "the component ends")

    end_run()
    assert local.heal() == ["worker"], "the first restart is immediate"
    for delay_s in (1.0, 2.0):
        now += 20.0  # longer than the delay
        end_run()
        assert local.heal() == []
        now += delay_s - 0.1
        assert local.heal() == []
        now += 0.2
        assert local.heal() == ["worker"]
    now += 60.0
    end_run()
    assert local.heal() == []
    now += 1.1
    assert local.heal() == ["worker"], "a run of a minute resets the delay"
    local.stop()
