"""Measures the machine's limits: copies without a transfer library, and UCX's performance test.

All functions return GB/s for one block size.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import socket
import statistics
import subprocess
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np

PERFTEST_PORT = 13_391
PERFTEST_TIMEOUT_S = 60


def _copy_blocks(source: np.ndarray, target: np.ndarray, repeats: int) -> float:
    """Return the GB/s of copying blocks one by one, in random order.

    Args:
        source: of shape [num_blocks, words].
        target: of shape [num_blocks, words].
        repeats: number of measurements. The result is their median.
    """
    order = np.random.default_rng(0).permutation(len(source)).tolist()

    def run() -> None:
        for index in order:
            target[index] = source[index]

    return _median_speed(run, source.nbytes, repeats)


def memcpy(block_bytes: int, num_bytes: int, repeats: int) -> float:
    """Return the GB/s of copying blocks within one process."""
    source, target = (
        np.ones((num_bytes // block_bytes, block_bytes // 8), dtype=np.int64) for _ in range(2)
    )
    return _copy_blocks(source, target, repeats)


def _fill(name: str) -> None:
    memory = SharedMemory(name)
    np.frombuffer(memory.buf, dtype=np.int64)[:] = 1
    memory._buf = None  # type: ignore[attr-defined]  # numpy holds it; the process ends here


def shared_memcpy(block_bytes: int, num_bytes: int, repeats: int) -> float:
    """Return the GB/s of copying blocks from shared memory that another process has filled."""
    memory = SharedMemory(create=True, size=num_bytes)
    try:
        filler = mp.get_context("spawn").Process(target=_fill, args=(memory.name,))
        filler.start()
        filler.join()
        source = np.frombuffer(memory.buf, dtype=np.int64).reshape(-1, block_bytes // 8)
        speed = _copy_blocks(source, np.ones_like(source), repeats)
        del source
        return speed
    finally:
        memory.unlink()
        memory.close()


def _send(pipe: Connection, port: int, block_bytes: int, num_bytes: int) -> None:
    source = memoryview(bytearray(num_bytes))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while pipe.recv():
            for first in range(0, num_bytes, block_bytes):
                connection.sendall(source[first : first + block_bytes])


def socket_copy(block_bytes: int, num_bytes: int, repeats: int) -> float:
    """Return the GB/s of sending blocks over one TCP connection of the loopback interface."""
    num_bytes -= num_bytes % block_bytes
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours, theirs = mp.get_context("spawn").Pipe()
        args = (theirs, server.getsockname()[1], block_bytes, num_bytes)
        sender = mp.get_context("spawn").Process(target=_send, args=args, daemon=True)
        sender.start()
        connection, _ = server.accept()
        target = memoryview(bytearray(num_bytes))

        def run() -> None:
            ours.send(True)
            received = 0
            while received < num_bytes:
                received += connection.recv_into(target[received:])

        with connection:
            speed = _median_speed(run, num_bytes, repeats)
            ours.send(False)
            sender.join(10)
    return speed


def perftest(op: str, tls: str, block_bytes: int, num_bytes: int) -> float | None:
    """Return the GB/s of ucx_perftest between two processes; None if the test fails.

    Args:
        op: get or put.
        tls: UCX_TLS; "" leaves UCX_TLS unset.
    """
    import libucx

    root = Path(libucx.__file__).parent
    environment = os.environ | {"LD_LIBRARY_PATH": str(root / "lib")}
    environment.pop("UCX_TLS", None)
    if tls:
        environment["UCX_TLS"] = tls
    command = [str(root / "bin" / "ucx_perftest"), "-p", str(PERFTEST_PORT)]
    test = [
        "-t",
        f"ucp_{op}" if op == "get" else "ucp_put_bw",
        "-s",
        str(block_bytes),
        "-O",
        "16",
        "-w",
        "10",
    ]
    test += ["-n", str(max(16, num_bytes // block_bytes)), "-f"]
    server = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + PERFTEST_TIMEOUT_S
        while time.monotonic() < deadline and server.poll() is None:  # until the server listens
            client = subprocess.run(
                [*command[:1], "127.0.0.1", *command[1:], *test],
                env=environment,
                capture_output=True,
                text=True,
                timeout=PERFTEST_TIMEOUT_S,
            )
            figures = (
                re.findall(r"[\d.]+", client.stdout.strip().splitlines()[-1])
                if client.stdout.strip()
                else []
            )
            if len(figures) == 8:  # iterations, 3 latencies, 2 bandwidths in MiB/s, 2 message rates
                return round(float(figures[5]) * 2**20 / 1e9, 2)
            time.sleep(0.05)
        return None
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None
    finally:
        server.kill()
        server.wait()


def _median_speed(run: Callable[[], None], num_bytes: int, repeats: int) -> float:
    speeds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        run()
        speeds.append(num_bytes / (time.perf_counter() - started) / 1e9)
    return round(statistics.median(speeds[1:]), 2)
