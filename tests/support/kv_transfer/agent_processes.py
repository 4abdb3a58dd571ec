"""The agents under test: an agent in this process, and an agent that owns memory (the owner).

For the tests of agents and transports.

The owner runs in another process if the transport connects processes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.agent.agent import INIT_AGENT, DlistHandle, XferHandle
from baton_kv_transfer.agent.agent_factory import create_agent
from support.kv_transfer.kv_processes import _Process, _serve
from support.waiting import eventually, suspend

NUM_BLOCKS, BLOCK_NBYTES = 32, 65536
BLOCK_WORDS = BLOCK_NBYTES // 8

OURS = ("ucx", "tcp", "shm", "auto")
KINDS = ("inproc", *OURS, "nixl")
BETWEEN_PROCESSES = (*OURS, "nixl")
#: NIXL is one-sided: the network card, or UCX, writes wherever the writer's key allows.
CHECKS_WRITES_AT_THE_TARGET = ("inproc", *OURS)
#: Reads stall while the owner is frozen. With shm the reader copies without the owner.
ANSWERED_BY_THE_OWNER = ("ucx", "tcp", "nixl")
#: A defect of UCX 1.21: the owner aborts when it answers a read whose connection was lost.
ABORTS_ANSWERING_A_LOST_CONNECTION = ("nixl",)
#: Contrary to its documentation, NIXL connects when it loads metadata, and refuses dead peers.
CONNECTS_WHEN_ADDED = ("nixl",)

Rows = list[tuple[int, int, int]]


def block_rows(base: int) -> Rows:
    return [(base + i * BLOCK_NBYTES, BLOCK_NBYTES, 0) for i in range(NUM_BLOCKS)]


def counting(index: int) -> NDArray[np.int64]:
    """Return the initial content of block `index` of the owner's memory."""
    return np.arange(index * BLOCK_WORDS, (index + 1) * BLOCK_WORDS)


class OwnerMethods:
    """The agent "owner", whose memory contains consecutive numbers."""

    def __init__(self, transport: str, name: str = "owner") -> None:
        self.words = np.arange(NUM_BLOCKS * BLOCK_WORDS, dtype=np.int64)
        self.spare = np.arange(BLOCK_WORDS, dtype=np.int64)
        self.agent = create_agent(name, transport)
        self.registered = self.agent.register_memory(
            [(self.words.ctypes.data, self.words.nbytes, 0, "kv")]
        )
        self.spare_registered = False
        self.posted: XferHandle | None = None

    def hello(self) -> tuple[bytes, int]:
        return self.agent.get_agent_metadata(), self.words.ctypes.data

    def refill(self) -> None:
        self.words[:] = np.arange(self.words.size)

    def content(self) -> NDArray[np.int64]:
        return self.words

    def new_notifs(self) -> dict[str, list[bytes]]:
        return self.agent.get_new_notifs()

    def on_notif(self, notif: bytes) -> tuple[int, int]:
        """Wait for a notification to the owner. Return the smallest and greatest word of memory."""
        eventually(lambda: notif in self.new_notifs().get("me", []), f"notification {notif!r}")
        return int(self.words.min()), int(self.words.max())

    def register_spare(self) -> tuple[bytes, int]:
        """Register one more block. Return the agent's new metadata and the block's address."""
        self.agent.register_memory([(self.spare.ctypes.data, self.spare.nbytes, 0, "spare")])
        return self.agent.get_agent_metadata(), self.spare.ctypes.data

    def deregister(self) -> None:
        self.agent.deregister_memory(self.registered)

    def fence(self) -> bytes:
        self.agent.fence()
        return self.agent.get_agent_metadata()

    def num_refused(self) -> int:
        return self.agent.num_refused

    def failure(self) -> str:
        return self.agent.failure

    def add_peer(self, metadata: bytes) -> str:
        return self.agent.add_remote_agent(metadata)

    def post(self, op: str, peer: str, ours: list[int], base: int, theirs: list[int]) -> str:
        """Post a transfer between the owner's blocks `ours` and the peer's blocks `theirs`.

        Args:
            base: address of the peer's first block.
        """
        local = self.agent.prep_xfer_dlist(INIT_AGENT, block_rows(self.words.ctypes.data))
        remote = self.agent.prep_xfer_dlist(peer, block_rows(base))
        self.posted = self.agent.make_prepped_xfer(op, local, ours, remote, theirs)
        return self.agent.transfer(self.posted)

    def send_notifs(self, peer: str, number: int) -> None:
        for _ in range(number):
            self.agent.send_notif(peer, b"x" * 4000)

    def state(self) -> str:
        assert self.posted is not None
        return self.agent.check_xfer_state(self.posted)

    def stop(self) -> None:
        self.agent.close()


def _run_owner(pipe: Connection, transport: str, name: str) -> None:
    methods = OwnerMethods(transport, name)
    _serve(pipe, methods, methods.hello())


class OwnerProcess(_Process):
    def __init__(self, transport: str, name: str = "owner") -> None:
        super().__init__(_run_owner, transport, name)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        assert self.process.pid is not None
        try:
            suspend(self.process.pid)
            yield
        finally:
            with suppress(ProcessLookupError):  # killed at the same time
                os.kill(self.process.pid, signal.SIGCONT)


class OwnerHere:
    """An owner that runs in this process."""

    def __init__(self) -> None:
        self._methods = OwnerMethods("inproc")
        self.hello = self._methods.hello()

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._methods, method)(*args)

    def stop(self) -> None:
        self._methods.stop()

    kill = stop


Owner = OwnerProcess | OwnerHere


class Side:
    """An agent with zeroed memory that has added an owner as a remote agent."""

    def __init__(self, transport: str, owner: Owner) -> None:
        self.agent = create_agent("me", transport)
        self.owner = owner
        self.words = np.zeros(NUM_BLOCKS * BLOCK_WORDS, dtype=np.int64)
        self.agent.register_memory([(self.words.ctypes.data, self.words.nbytes, 0, "kv")])
        self.meet(owner)

    def meet(self, owner: Owner) -> None:
        self.owner = owner
        self.metadata, self.base = owner.hello
        assert self.agent.add_remote_agent(self.metadata) == "owner"
        self.local, self.remote = self.dlists()

    def dlists(self) -> tuple[DlistHandle, DlistHandle]:
        local = self.agent.prep_xfer_dlist(INIT_AGENT, block_rows(self.words.ctypes.data))
        return local, self.agent.prep_xfer_dlist("owner", block_rows(self.base))

    def make(
        self, op: str, ours: Sequence[int], theirs: Sequence[int], notif: bytes = b""
    ) -> XferHandle:
        return self.agent.make_prepped_xfer(op, self.local, ours, self.remote, theirs, notif)

    def make_everything(self, op: str, times: int = 1) -> XferHandle:
        """Make a transfer of all blocks. The order of the blocks prevents merging them."""
        order = list(range(NUM_BLOCKS)) * times
        return self.make(op, order[::-1], order)

    def end(self, handle: XferHandle) -> str:
        eventually(lambda: self.agent.check_xfer_state(handle) != "PROC", "end of the transfer")
        return self.agent.check_xfer_state(handle)

    def run(self, handle: XferHandle) -> str:
        self.agent.transfer(handle)
        return self.end(handle)

    def block(self, index: int) -> NDArray[np.int64]:
        return self.words[index * BLOCK_WORDS : (index + 1) * BLOCK_WORDS]

    def owners_notifs(self, number: int) -> list[bytes]:
        """Wait until the owner has received `number` notifications, and return them."""
        received: list[bytes] = []

        def all_there() -> bool:
            received.extend(self.owner.call("new_notifs").get("me", []))
            return len(received) >= number

        eventually(all_there, f"{number} notifications")
        return received


def new_owner(kind: str) -> Owner:
    return OwnerHere() if kind == "inproc" else OwnerProcess(kind)


def own_side(kind: str) -> Iterator[Side]:
    """Yield a side with its own owner, which may be killed."""
    side = Side(kind, new_owner(kind))
    yield side
    side.agent.close()
    side.owner.stop()
