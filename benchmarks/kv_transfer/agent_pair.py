"""A pair of processes that move blocks, each with a transfer agent of Baton or of NIXL.

bench.py measures two modes:

    plain       The initiator posts all blocks as one transfer, READ or WRITE, and waits for DONE.
    verified    Blocks move in overlapping pieces of a few MiB. The producer computes the checksums
                of each piece. The consumer computes them again and compares. Control messages are
                notifications of the same library. The checksums of a WRITE travel with the
                transfer. The exchange ends when the initiator knows that all blocks are verified.

A pair is stopped with SIGSTOP while another pair is measured. NIXL's progress thread never sleeps.
A NIXL process that is not stopped would therefore take a whole core from the measured pair.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import resource
import select
import signal
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton_kernels.block_checksum import sum_runs

DEADLINE_S = 60.0
PIECE_BYTES = 4 * 2**20
#: Poll interval of each NIXL pair, in seconds. NIXL does not wake its caller, and polling without
#: sleeping would use a whole core.
NIXL_POLL_S = {"nixl": 0.0001, "nixl 20 us": 0.00002}
#: Settings of both libraries. With UCX's defaults, NIXL is half as fast.
UCX_SETTINGS = {"UCX_TCP_TX_SEG_SIZE": "256K", "UCX_TCP_RX_SEG_SIZE": "513K"}
NAMES = ("initiator", "owner")
_PIECE = struct.Struct("<II")  # first block, number of blocks; the blocks' checksums follow
_GO, _VERIFIED = b"go", b"verified"


def make_agent(library: str, name: str) -> Any:
    """Return a transfer agent of Baton or of NIXL. Both have the same methods.

    Args:
        library: a key of NIXL_POLL_S for NIXL, or the name of a transport of Baton.
        name: the agent's name.
    """
    if library not in NIXL_POLL_S:
        from baton_kv_transfer.agent.agent_factory import create_agent

        return create_agent(name, library)
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


class Side:
    """One of the two processes of a pair.

    `source` has the blocks that this process provides. Blocks of the other process arrive in
    `target`.
    """

    def __init__(self, library: str, name: str, pipe: Connection, max_bytes: int) -> None:
        self.peer = NAMES[1 - NAMES.index(name)]
        self._agent = make_agent(library, name)
        self._woken_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._inbox: list[bytes] = []
        self._poll_s = NIXL_POLL_S.get(library)
        if self._poll_s is None:
            self._agent.set_wakeup(lambda: os.eventfd_write(self._woken_fd, 1))
        self.source = np.arange(max_bytes // 8, dtype=np.int64) * (1 + NAMES.index(name))
        self.target = np.zeros(max_bytes // 8, dtype=np.int64)
        memory = (self.source, self.target)
        self._agent.register_memory(
            [(words.ctypes.data, max_bytes, 0, "") for words in memory], "DRAM"
        )
        pipe.send(
            (self._agent.get_agent_metadata(), self.source.ctypes.data, self.target.ctypes.data)
        )
        metadata, *self._theirs = pipe.recv()
        self._agent.add_remote_agent(metadata)

    def next_command(self, pipe: Connection) -> Any:
        """Wait for the next command and return it.

        With Baton's agent, the process waits in `_sleep`, as the thread of a KV connector does.
        """
        while self._poll_s is None and not pipe.poll(0):
            self._sleep(pipe.fileno())
        return pipe.recv()

    def prepare(self, num_blocks: int, block_bytes: int) -> None:
        """Draw a random order of the blocks in `source` and in `target`.

        The random order prevents a library from merging adjacent blocks into one copy.
        """
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        random = np.random.default_rng(num_blocks)
        self._from, self._to = random.permutation(num_blocks), random.permutation(num_blocks)

        def prepare(agent: str, base: int) -> Any:
            descs = np.zeros((num_blocks, 3), dtype=np.int64)
            descs[:, 0], descs[:, 1] = base + np.arange(num_blocks) * block_bytes, block_bytes
            return self._agent.prep_xfer_dlist(agent, descs, "DRAM")

        self._lists = {
            "READ": (
                prepare("NIXL_INIT_AGENT", self.target.ctypes.data),
                prepare(self.peer, self._theirs[0]),
            ),
            "WRITE": (
                prepare("NIXL_INIT_AGENT", self.source.ctypes.data),
                prepare(self.peer, self._theirs[1]),
            ),
        }

    def plain(self, op: str) -> float:
        """Transfer all blocks by `op`, READ or WRITE. Return the seconds until DONE."""
        started = time.perf_counter()
        handle = self._post(op, slice(None))
        self._wait(lambda: self._ended(handle))
        return time.perf_counter() - started

    def verified(self, op: str) -> float:
        """Run the initiator's side of the mode `verified`.

        Returns:
            The seconds until all blocks are verified.
        """
        started = time.perf_counter()
        self._agent.send_notif(self.peer, _GO)
        if op == "READ":
            self._pull()
        else:
            posted: list[Any] = []
            for rows in self._pieces():
                posted.append(self._post("WRITE", rows, self._describe(rows)))
                posted = self._drop_ended(posted)
            self._wait(lambda: not self._drop_ended(posted))
            self._wait(lambda: self._received(_VERIFIED))
        return time.perf_counter() - started

    def serve(self, op: str) -> None:
        """Run the side of the mode `verified` that does not initiate the transfers."""
        self._wait(lambda: self._received(_GO))
        if op == "READ":
            for rows in self._pieces():
                self._agent.send_notif(self.peer, self._describe(rows))
            return
        missing = self.num_blocks
        while missing:
            for message in self._wait(self._messages):
                missing -= self._verify(message)
        self._agent.send_notif(self.peer, _VERIFIED)

    def clear(self) -> None:
        self.target[: self.num_blocks * self.block_bytes // 8] = 0

    def usage(self) -> tuple[float, int]:
        """Return this process's CPU seconds and number of voluntary context switches so far."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime, used.ru_nvcsw

    def _pull(self) -> None:
        reading: deque[tuple[Any, bytes]] = deque()
        missing = self.num_blocks
        while missing:

            def is_piece_complete() -> bool:
                for message in self._messages():
                    first, count = _PIECE.unpack_from(message)
                    reading.append((self._post("READ", slice(first, first + count)), message))
                return bool(reading) and self._ended(reading[0][0])

            self._wait(is_piece_complete)
            missing -= self._verify(reading.popleft()[1])

    def _pieces(self) -> list[slice]:
        step = max(1, PIECE_BYTES // self.block_bytes)
        return [
            slice(first, min(first + step, self.num_blocks))
            for first in range(0, self.num_blocks, step)
        ]

    def _describe(self, rows: slice) -> bytes:
        addresses = self.source.ctypes.data + self._from[rows] * self.block_bytes
        sums: NDArray[np.uint64] = sum_runs(addresses, self.block_bytes)
        return _PIECE.pack(rows.start, len(sums)) + sums.tobytes()

    def _verify(self, message: bytes) -> int:
        """Compare the checksums in `message` with those of the received blocks.

        Returns:
            The number of blocks.

        Raises:
            RuntimeError: a checksum differs.
        """
        first, count = _PIECE.unpack_from(message)
        addresses = self.target.ctypes.data + self._to[first : first + count] * self.block_bytes
        if not np.array_equal(
            sum_runs(addresses, self.block_bytes),
            np.frombuffer(message, np.uint64, offset=_PIECE.size),
        ):
            raise RuntimeError(f"wrong bytes arrived in blocks {first} to {first + count}")
        return int(count)

    def _post(self, op: str, rows: slice, notif: bytes = b"") -> Any:
        ours, theirs = (self._to, self._from) if op == "READ" else (self._from, self._to)
        local, remote = self._lists[op]
        handle = self._agent.make_prepped_xfer(op, local, ours[rows], remote, theirs[rows], notif)
        self._agent.transfer(handle)
        return handle

    def _drop_ended(self, handles: list[Any]) -> list[Any]:
        """Return the transfers that have not ended.

        NIXL sends a transfer's notification only when the state of the transfer is read.
        """
        return [handle for handle in handles if not self._ended(handle)]

    def _ended(self, handle: Any) -> bool:
        state = self._agent.check_xfer_state(handle)
        if state == "ERR":
            raise RuntimeError("a transfer ended in ERR")
        return bool(state == "DONE")

    def _messages(self) -> list[bytes]:
        """Remove and return all messages that have arrived."""
        messages, self._inbox = self._inbox, []
        return messages + [
            message for messages in self._agent.get_new_notifs().values() for message in messages
        ]

    def _received(self, word: bytes) -> bool:
        """Return whether the message `word` has arrived, and remove the message."""
        self._inbox = self._messages()
        has_arrived = word in self._inbox
        if has_arrived:
            self._inbox.remove(word)
        return has_arrived

    def _wait(self, condition: Callable[[], Any]) -> Any:
        """Wait until `condition()` returns a true value, and return the value.

        Baton's agent wakes the waiting process. NIXL's agent is polled.

        Raises:
            TimeoutError: DEADLINE_S have passed.
        """
        deadline = time.perf_counter() + DEADLINE_S
        while not (value := condition()):
            if time.perf_counter() > deadline:
                raise TimeoutError(f"no end within {DEADLINE_S:g} s")
            if self._poll_s is not None:
                time.sleep(self._poll_s)
            else:
                self._sleep(self._woken_fd)
        return value

    def _sleep(self, fd: int) -> None:
        """Sleep until `fd` is readable or the agent has made progress, for at most 100 ms."""
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        with self._agent.waiting() as agent_fd:
            if agent_fd is not None:
                poller.register(agent_fd, select.POLLIN)
            ready = poller.poll(100)
        if any(waited == self._woken_fd for waited, _ in ready):
            os.eventfd_read(self._woken_fd)


def _run(pipe: Connection, library: str, name: str, max_bytes: int) -> None:
    side = Side(library, name, pipe, max_bytes)
    while (command := side.next_command(pipe)) is not None:
        method, *args = command
        pipe.send(getattr(side, method)(*args))


@dataclass(frozen=True)
class Sample:
    """The measurements of one transfer of all blocks.

    CPU seconds and wake-ups are sums over both processes.
    """

    seconds: float
    cpu_seconds: float
    wakeups: int


class AgentPair:
    def __init__(self, library: str, tls: str, max_bytes: int) -> None:
        """Start both processes, with UCX_SETTINGS in their environment.

        Args:
            library: see `make_agent`.
            tls: UCX_TLS of both processes; "" leaves UCX_TLS unset.
            max_bytes: upper bound of the bytes of one transfer.
        """
        context = mp.get_context("spawn")
        before = {key: os.environ.pop(key, None) for key in ("UCX_TLS", *UCX_SETTINGS)}
        os.environ.update(UCX_SETTINGS | ({"UCX_TLS": tls} if tls else {}))
        self._pipes, self._processes = [], []
        for name in NAMES:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_run, args=(theirs, library, name, max_bytes), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for key, value in before.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value
        hellos = [pipe.recv() for pipe in self._pipes]
        for pipe, hello in zip(self._pipes, reversed(hellos), strict=True):
            pipe.send(hello)
        self._both("prepare", 1, 4096)  # returns when the sides are connected
        self._signal(signal.SIGSTOP)

    def prepare(self, num_blocks: int, block_bytes: int) -> None:
        with self._awake():
            self._both("prepare", num_blocks, block_bytes)

    def measure(self, op: str, verify: bool) -> Sample:
        with self._awake():
            self._both("clear")
            before = self._both("usage")
            if verify:
                self._pipes[1].send(("serve", op))
            self._pipes[0].send(("verified" if verify else "plain", op))
            seconds: float = self._answer(0)
            if verify:
                self._answer(1)
            cpu, wakeups = np.subtract(self._both("usage"), before).sum(axis=0)
        return Sample(seconds, float(cpu), int(wakeups))

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join(10)
            if process.is_alive():
                process.kill()

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    def _both(self, *command: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(command)
        return [self._answer(index) for index in range(2)]

    def _answer(self, index: int) -> Any:
        if not self._pipes[index].poll(2 * DEADLINE_S):
            raise TimeoutError(f"the {NAMES[index]} does not answer")
        return self._pipes[index].recv()
