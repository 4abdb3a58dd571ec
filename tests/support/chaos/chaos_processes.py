"""Process trees of chaos tests, and checks after a kill.

For the chaos tests of engines, of `baton serve` and of torchrun.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from pocketkube.ports import free_ports
from support.waiting import eventually

HOST = "127.0.0.1"
START_S = 180.0
#: A waiting client receives an error within this time after a death.
NOTICE_S = 5.0
ENDED_S = 30.0
LAYOUTS = {
    "uniproc": [],
    "tp2": ["--tensor-parallel-size", "2"],
    "pp2": ["--pipeline-parallel-size", "2"],
}
ENGINE_FLAGS = [
    "--device",
    "cpu",
    "--num-threads",
    "1",
    "--dtype",
    "float32",
    "--num-blocks",
    "512",
]


class Tree:
    """A process and its descendants."""

    def __init__(self, command: list[str], log: Path, **env: str) -> None:
        self.log = log
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "POD_IP": HOST, **env}
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
            )
        self._members: set[psutil.Process] = {psutil.Process(self.process.pid)}

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def members(self) -> set[psutil.Process]:
        """Return all processes of the tree that were seen so far."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._members |= set(psutil.Process(self.process.pid).children(recursive=True))
        return self._members

    def find(self, module: str) -> list[psutil.Process]:
        """Return the processes of `python -m module` in the order of their start."""
        return sorted(
            (p for p in self.members() if module in _command_line(p)), key=lambda p: p.create_time()
        )

    def wait_for(self, line: str) -> None:
        def is_logged() -> bool:
            assert self.process.poll() is None, self.text
            return line in self.text

        eventually(is_logged, timeout_s=START_S, what=f"{line!r} in the log")
        self.members()

    def assert_no_process_survives(self) -> None:
        self.process.poll()

        def all_ended() -> bool:
            self.process.poll()
            left = {p.pid: " ".join(_command_line(p)) for p in self._members if _is_alive(p)}
            assert not left, f"{left}\n{self.text[-4000:]}"
            return True

        eventually(all_ended, timeout_s=ENDED_S, what="no process survives")

    def kill(self) -> None:
        for process in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


@contextlib.contextmanager
def tree(command: list[str], log: Path, **env: str) -> Iterator[Tree]:
    started = Tree(command, log, **env)
    try:
        yield started
    finally:
        started.kill()


def engine_command(checkpoint: Path, layout: str, port: int, *flags: str) -> list[str]:
    return [
        *(
            "-m",
            "baton_engine.cli",
            "--model",
            str(checkpoint),
            "--engine-port",
            str(port),
            "--http-port",
            "0",
        ),
        *(*ENGINE_FLAGS, *LAYOUTS[layout], *flags),
    ]


def free_port() -> int:
    return free_ports(1, HOST)[0]


def assert_port_is_free(port: int) -> None:
    def can_bind() -> bool:
        try:
            socket.create_server((HOST, port)).close()
        except OSError as error:
            raise AssertionError(f"port {port}: {error}") from error
        return True

    eventually(can_bind, timeout_s=ENDED_S, what="the port is free again")


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _command_line(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return process.cmdline()
    return []
