"""CPU time and memory of containers, read from /proc."""

from __future__ import annotations

import os
import subprocess
import sys

from pocketkube.containers.process import CONTAINER_MARKER
from pocketkube.containers.usage import container_usage, machine_usage
from support.waiting import eventually

HOLD_MEMORY = "data = bytearray(50 * 2**20)\nwhile True: pass"


def test_the_usage_of_a_container_is_that_of_all_its_processes() -> None:
    environment = {**os.environ, CONTAINER_MARKER: "a1"}
    commands = [[sys.executable, "-c", HOLD_MEMORY], ["sleep", "600"]]
    busy, idle = (subprocess.Popen(command, env=environment) for command in commands)
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, CONTAINER_MARKER: "b2"})
    try:
        first = machine_usage().cpu_s

        def is_measured() -> bool:
            usage, machine = container_usage(), machine_usage()
            assert usage["process://a1"].memory_bytes > 50 * 2**20
            assert usage["process://a1"].cpu_s > 0.2
            assert usage["process://b2"].memory_bytes < 50 * 2**20
            assert usage["process://b2"].cpu_s < 0.2
            assert machine.cpu_s > first
            assert machine.memory_bytes > 50 * 2**20
            return True

        eventually(is_measured, timeout_s=60, what="the CPU time of the busy process")
        with_idle = container_usage()["process://a1"].memory_bytes
        idle.kill()
        idle.wait()
        assert 0 < container_usage()["process://a1"].memory_bytes < with_idle
    finally:
        for process in (busy, idle, other):
            process.kill()
            process.wait()
    assert not {"process://a1", "process://b2"} & container_usage().keys()
