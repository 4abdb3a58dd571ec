"""SIGKILL of a rank under torchrun: the other rank reports the reason, and no process survives."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from support import chaos
from support.chaos.chaos_processes import NOTICE_S, START_S, tree
from support.waiting import eventually

pytestmark = pytest.mark.chaos


@pytest.mark.parametrize("victim", [0, 1])
def test_the_other_rank_reports_a_killed_rank(
    checkpoint: Path, tmp_path: Path, victim: int
) -> None:
    command = [
        *(
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:0",
        ),
        *(
            "--local-addr=127.0.0.1",
            str(Path(chaos.__file__).with_name("torchrun_rank.py")),
            str(checkpoint),
            str(tmp_path),
        ),
    ]
    with tree(command, tmp_path / "log") as launcher:

        def all_generate() -> bool:
            assert launcher.process.poll() is None, launcher.text
            launcher.members()
            return all((tmp_path / f"{rank}.pid").exists() for rank in (0, 1))

        eventually(all_generate, timeout_s=START_S, what="tokens on both ranks")
        os.kill(int((tmp_path / f"{victim}.pid").read_text()), signal.SIGKILL)
        report = tmp_path / f"{1 - victim}.error"
        reason = eventually(
            lambda: report.exists() and report.read_text(),
            timeout_s=NOTICE_S,
            what="the error of the other rank",
        )
        assert f"a member is gone (rank {victim} has died)" in str(reason)
        assert launcher.process.wait(60) != 0
        launcher.assert_no_process_survives()
