"""The embedded control plane as a process, and errors of its start."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pocketkube.child_processes import ComponentError
from pocketkube.control_plane.embedded import EmbeddedControlPlane


def test_the_control_plane_runs_as_a_process_and_ends_on_sigterm(tmp_path) -> None:
    command = [
        sys.executable,
        "-m",
        "pocketkube.control_plane.embedded",
        "--state-dir",
        str(tmp_path),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        kubeconfig = Path(process.stdout.readline().strip())
        assert kubeconfig == tmp_path / "kubeconfig"
        assert kubeconfig.stat().st_mode & 0o777 == 0o600
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0


def test_a_taken_port_is_reported(plane, tmp_path) -> None:
    port = int(plane.server.rpartition(":")[2])
    with pytest.raises(ComponentError, match="did not start"):
        EmbeddedControlPlane(tmp_path, port=port).start(10)
