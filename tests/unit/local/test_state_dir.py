"""The state folder of the `baton` command, and the lock of its supervisor."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_local.state_dir import ClusterInfo, ClusterRunningError, StateDir, StateDirError
from support.waiting import eventually

HOLDER = """
import sys, time
from pathlib import Path
from baton_local.state_dir import StateDir
state = StateDir(Path(sys.argv[1])); state.acquire(); print("held", flush=True); time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()


def info(pid: int) -> ClusterInfo:
    return ClusterInfo(pid, "/k", "default", "demo", "/f")


def test_a_second_supervisor_is_refused_while_the_first_one_runs(holder, tmp_path) -> None:
    state = StateDir(tmp_path)
    assert state.supervisor() == holder.pid
    with pytest.raises(ClusterRunningError, match="baton down"):
        state.acquire()
    holder.send_signal(signal.SIGKILL)
    eventually(
        lambda: state.supervisor() is None,
        timeout_s=60,
        what="the lock of a killed supervisor free",
    )
    state.acquire()


def test_a_process_that_looks_up_the_supervisor_is_not_mistaken_for_it(holder, tmp_path) -> None:
    state = StateDir(tmp_path)
    holder.kill()
    holder.wait()
    with open(tmp_path / "lock") as lock:  # it still contains the pid of the dead supervisor
        fcntl.flock(lock, fcntl.LOCK_SH)  # another process looks up the supervisor
        assert state.supervisor() is None


def test_the_info_of_a_dead_supervisor_is_ignored(holder, tmp_path) -> None:
    state = StateDir(tmp_path)
    state.write_info(info(holder.pid))
    assert state.read_info() == info(holder.pid)
    holder.kill()
    eventually(
        lambda: state.read_info() is None, timeout_s=60, what="the info of a killed supervisor gone"
    )


def test_stop_ends_the_supervisor_and_returns_whether_one_ran(holder, tmp_path) -> None:
    state = StateDir(tmp_path)
    assert state.stop_supervisor(10)
    assert not state.stop_supervisor(10)


def test_a_process_named_in_a_folder_that_others_can_write_is_not_killed(
    holder: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """Another user could have written the lock with the pid of any process."""
    tmp_path.chmod(0o777)
    with pytest.raises(StateDirError, match="other users may write"):
        StateDir(tmp_path).stop_supervisor(timeout_s=1.0)
    assert holder.poll() is None


def test_info_of_another_version_is_an_error_only_if_its_supervisor_runs(holder, tmp_path) -> None:
    (tmp_path / "cluster.json").write_text(json.dumps({"supervisor_pid": holder.pid}))
    with pytest.raises(StateDirError, match="another version of baton"):
        StateDir(tmp_path).read_info()
    (tmp_path / "cluster.json").write_text(json.dumps({"supervisor_pid": holder.pid + 1}))
    assert StateDir(tmp_path).read_info() is None, "the info is of a killed supervisor"


def test_the_state_folder_is_absolute_private_and_independent_of_home(
    monkeypatch, tmp_path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATON_HOME", "state")
    monkeypatch.setattr(
        "pathlib.Path.home", lambda: pytest.fail("no HOME is needed where BATON_HOME is set")
    )
    state = StateDir()
    state.acquire()
    assert state.root == tmp_path / "state"
    assert state.root.stat().st_mode & 0o077 == 0, "others can read the pods' tokens"


def test_a_supervisor_ignores_the_info_of_the_previous_one(tmp_path) -> None:
    state = StateDir(tmp_path)
    state.acquire()
    state.write_info(ClusterInfo(1, "/k", "default", "demo", "/f"))
    assert state.read_info() is None
