"""Why reads on one host are not messages: the same reads as active messages over ucxx, with its progress thread, beside ours.

    python benchmarks/kv_transfer/ucxx_active_messages.py [--repeats 7]

A piece of some MiB is one message: the owner gathers its blocks, sends, and the reader scatters what arrived; blocks are taken in
random order. The two alternate within every repeat. GB/s, medians.

ucxx runs without peer error handling, which ours has: with it, messages of this size ended in "Connection reset by remote peer".
Not with UCX_TLS=tcp: there ucxx 0.52 does not end messages of 4 MiB, whatever the rendezvous scheme, and of those of 256 KiB and
1 MiB the first bytes arrived as those of freed memory. Over tcp ours uses no UCX (`transports.tcp_lane`).
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from agent_pair import AgentPair

BLOCK_KIB = (64, 1024)
NUM_BYTES = 64 * 2**20
PIECE_BYTES = 4 * 2**20
WINDOW = 8
POLL_S = 0.0001
DEADLINE_S = 60.0


class Side:
    def __init__(self, pipe: Connection) -> None:
        from ucxx._lib import libucxx as ucxx

        features = (ucxx.Feature.WAKEUP, ucxx.Feature.AM)
        self._worker = ucxx.UCXWorker(ucxx.UCXContext({}, feature_flags=features))
        self._worker.init_blocking_progress_mode()
        self._worker.start_progress_thread(polling_mode=False, epoll_timeout=1)
        pipe.send(bytes(ucxx.UCXAddress.create_from_worker(self._worker).tobytes()))
        address = ucxx.UCXAddress.create_from_buffer(pipe.recv())
        self._endpoint = ucxx.UCXEndpoint.create_from_worker_address(
            self._worker, address, endpoint_error_handling=False
        )
        self._words = np.arange(NUM_BYTES // 8, dtype=np.int64)

    def send(self, block_bytes: int) -> None:
        blocks = self._words.reshape(-1, block_bytes // 8)
        sent: deque[tuple[Any, Any]] = deque()
        for piece in self._pieces(block_bytes):
            message = blocks[piece].reshape(-1)  # a copy: active messages are contiguous
            sent.append((self._endpoint.am_send(_wrap(message)), message))
            if len(sent) == WINDOW:
                self._finish(sent.popleft()[0])
        while sent:
            self._finish(sent.popleft()[0])

    def receive(self, block_bytes: int) -> float:
        """Seconds."""
        self._words[:] = 0
        blocks = self._words.reshape(-1, block_bytes // 8)
        started = time.perf_counter()
        pieces = self._pieces(block_bytes)
        requests = deque(self._endpoint.am_recv() for _ in pieces)
        for piece in pieces:
            request = requests.popleft()
            self._finish(request)
            blocks[piece] = np.frombuffer(request.recv_buffer, dtype=np.int64).reshape(len(piece), -1)
        seconds = time.perf_counter() - started
        if not np.array_equal(self._words, np.arange(len(self._words))):
            raise RuntimeError("wrong bytes arrived")
        return seconds

    def _pieces(self, block_bytes: int) -> list[np.ndarray]:
        order = np.random.default_rng(0).permutation(NUM_BYTES // block_bytes)
        return np.array_split(order, NUM_BYTES // PIECE_BYTES)

    def _finish(self, request: Any) -> None:
        deadline = time.perf_counter() + DEADLINE_S
        while not request.completed:
            if time.perf_counter() > deadline:
                raise TimeoutError(f"no end within {DEADLINE_S:g} s")
            time.sleep(POLL_S)
        request.check_error()


def _wrap(message: np.ndarray) -> Any:
    from ucxx._lib.arr import Array

    return Array(message)


def _run(pipe: Connection) -> None:
    side = Side(pipe)
    while (command := pipe.recv()) is not None:
        method, *args = command
        pipe.send(getattr(side, method)(*args))
    os._exit(0)  # the progress thread outlives nothing worth waiting for


class Pair:
    def __init__(self) -> None:
        """With UCX_TLS as it is in the environment."""
        context = mp.get_context("spawn")
        self._pipes = []
        for _ in range(2):
            ours, theirs = context.Pipe()
            context.Process(target=_run, args=(theirs,), daemon=True).start()
            self._pipes.append(ours)
        hellos = [pipe.recv() for pipe in self._pipes]
        for pipe, hello in zip(self._pipes, reversed(hellos), strict=True):
            pipe.send(hello)

    def seconds(self, block_bytes: int) -> float:
        self._pipes[0].send(("receive", block_bytes))
        self._pipes[1].send(("send", block_bytes))
        seconds: float = self._pipes[0].recv()
        self._pipes[1].recv()
        return seconds

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)


def main() -> None:
    parser = argparse.ArgumentParser(description="Active messages of ucxx beside put and get of our transport.")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tls", nargs="+", default=[""], help='values of UCX_TLS; "": not set')
    args = parser.parse_args()
    for tls in args.tls:
        ours = AgentPair("ours", tls, NUM_BYTES)
        if tls:
            os.environ["UCX_TLS"] = tls
        messages = Pair()
        os.environ.pop("UCX_TLS", None)
        for kib in BLOCK_KIB:
            ours.prepare(NUM_BYTES // (kib * 1024), kib * 1024)
            seconds: dict[str, list[float]] = {"get": [], "active messages": []}
            for _ in range(args.repeats + 1):
                seconds["get"].append(ours.seconds("READ", proved=False))
                seconds["active messages"].append(messages.seconds(kib * 1024))
            speeds = {
                name: round(NUM_BYTES / statistics.median(values[1:]) / 1e9, 2) for name, values in seconds.items()
            }
            ratio = statistics.median(am / get for get, am in list(zip(*seconds.values(), strict=True))[1:])
            print(f"UCX_TLS={tls or 'not set'}, blocks of {kib} KiB: {speeds} GB/s, get is {ratio:.2f} times as fast")
        ours.close()
        messages.close()


if __name__ == "__main__":
    main()
