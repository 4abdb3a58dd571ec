"""Run the connectors of engines in processes, which a test controls over pipes and may kill.

For the tests of the TransferConnector.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing as mp
import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.connector import BlockSave, ConnectorMetadata, LoadRequest, LoadResult
from baton_kv_transfer.memory.layout import HeadRange, KVCacheLayout
from baton_kv_transfer.memory.slot_memory import HostMemory
from baton_kv_transfer.transfer_connector import TransferConnector
from baton_kv_transfer.transports.ucx import library
from baton_protocol.options.config import KVRole, KVTransferConfig
from support.waiting import eventually

# Loaded in the fork server, because loading takes longer than most tests. Each process creates its
# own UCX resources.
library.load()

HOST = "127.0.0.1"
DEADLINE_S = 60.0
LAYOUT = KVCacheLayout(
    num_blocks=64, num_kv_heads=2, num_layers=4, block_size=16, head_dim=64, dtype="float32"
)


@functools.cache
def _fork_server() -> ForkServerContext:
    """Start a fork server that has imported this module."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    # It does not get sys.path.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    return context


class _Process:
    """A child process that executes (method, args) from a pipe."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        context = _fork_server()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()
        self.hello = self._answer()

    def call(self, method: str, *args: Any) -> Any:
        self._pipe.send((method, args))
        return self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(60), f"process {self.process.pid} does not answer"
        value = self._pipe.recv()
        if isinstance(value, Exception):
            raise value
        return value

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)

    def stop(self) -> None:
        if self.process.is_alive():
            with contextlib.suppress(OSError, EOFError):
                self.call("stop")
            self.process.join(15)
        if self.process.is_alive():
            self.kill()
            raise AssertionError("the process did not end by itself")


def _serve(pipe: Connection, methods: Any, hello: Any) -> None:
    pipe.send(hello)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:  # the test has ended
            return
        if method == "stop":
            methods.stop()
            pipe.send(None)
            return
        try:
            pipe.send(getattr(methods, method)(*args))
        except Exception as error:
            pipe.send(error)


class _Memory(HostMemory):
    def __init__(self, base_address: int, layout: KVCacheLayout) -> None:
        super().__init__(base_address, layout)
        self.damaged: dict[int, NDArray[np.uint64]] = {}

    def block_sums(self, slots: Sequence[int], heads: HeadRange) -> NDArray[np.uint64]:
        sums = super().block_sums(slots, heads)
        for slot in set(slots) & self.damaged.keys():
            self.damaged.pop(slot)[100] ^= np.uint64(1 << 63)
        return sums


class _EngineMethods:
    def __init__(self, config: KVTransferConfig, instance_id: str, compatibility_hash: str) -> None:
        self.words = np.zeros((LAYOUT.num_blocks, LAYOUT.block_nbytes // 8), dtype=np.uint64)
        self.connector = TransferConnector(
            config, instance_id=instance_id, compatibility_hash=compatibility_hash, host=HOST
        )
        assert isinstance(self.connector, TransferConnector)
        self.memory = _Memory(self.words.ctypes.data, LAYOUT)
        self.connector.register_kv_cache(self.memory)
        self.finished_sending: set[str] = set()
        self.load_results: dict[str, LoadResult] = {}

    def start(self, metadata: ConnectorMetadata) -> None:
        self.connector.start(metadata)

    def save(self, *saves: BlockSave) -> None:
        self.connector.save(ConnectorMetadata(saves=list(saves)))

    def fill(self, block_id: int, value: int) -> None:
        self.words[block_id] = np.arange(self.words.shape[1], dtype=np.uint64) * np.uint64(value)

    def damage_once_summed(self, block_id: int) -> None:
        """Damage the block right after its next checksum is computed."""
        self.memory.damaged[block_id] = self.words[block_id]

    def holds(self, block_id: int, value: int) -> bool:
        return bool(
            (
                self.words[block_id]
                == np.arange(self.words.shape[1], dtype=np.uint64) * np.uint64(value)
            ).all()
        )

    def poll(self) -> tuple[set[str], dict[str, LoadResult]]:
        output = self.connector.get_finished()
        assert not output.load_results.keys() & self.load_results.keys(), "two results of one load"
        self.finished_sending |= output.finished_sending
        self.load_results |= output.load_results
        return self.finished_sending, self.load_results

    def stats(self) -> Any:
        return self.connector.stats()

    def num_open_files(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def stop(self) -> None:
        self.connector.shutdown()


def _run_engine(
    pipe: Connection, config: KVTransferConfig, instance_id: str, compatibility_hash: str
) -> None:
    logging.basicConfig(level=logging.INFO)
    methods = _EngineMethods(config, instance_id, compatibility_hash)
    _serve(pipe, methods, methods.connector.port)


class Engine(_Process):
    """A connector in its own process, with memory of LAYOUT."""

    def __init__(
        self,
        instance_id: str,
        role: KVRole,
        *,
        port: int = 0,
        lease_s: float = 15.0,
        load_timeout_s: float = 15.0,
        compatibility_hash: str = "same",
        mode: str = "pull",
        transport: str = "ucx",
    ) -> None:
        config = KVTransferConfig(
            role=role,
            port=port,
            lease_s=lease_s,
            load_timeout_s=load_timeout_s,
            mode=mode,
            transport=transport,
        )
        super().__init__(_run_engine, config, instance_id, compatibility_hash)
        self.instance_id = instance_id
        self.port: int = self.hello

    def offer(self, transfer_id: str, consumer: str) -> None:
        self.call("start", ConnectorMetadata(offers={transfer_id: consumer}))

    def load(
        self, transfer_id: str, producer: Engine, block_ids: list[int], first: int = 0, of: str = ""
    ) -> None:
        """Start a load of the blocks of a transfer.

        Args:
            first: index of the first block to load.
            of: transfer id whose chain hashes are requested, to simulate a load of other tokens;
                empty for `transfer_id`.
        """
        hashes = [chain_hash(of or transfer_id, first + i) for i in range(len(block_ids))]
        load = LoadRequest(
            transfer_id, HOST, producer.port, producer.instance_id, first, block_ids, hashes
        )
        self.call("start", ConnectorMetadata(loads=[load]))

    def cancel(self, transfer_id: str) -> None:
        self.call("start", ConnectorMetadata(cancels=[transfer_id]))

    def save(self, transfer_id: str, first: int, block_ids: list[int], last: bool) -> None:
        """Fill blocks with content that depends on their index, and save the blocks."""
        for offset, block_id in enumerate(block_ids):
            self.call("fill", block_id, first + offset + 1)
        hashes = [chain_hash(transfer_id, first + i) for i in range(len(block_ids))]
        tokens = (first + len(block_ids)) * LAYOUT.block_size
        self.call("save", BlockSave(transfer_id, first, block_ids, hashes, tokens, last))

    def result(self, transfer_id: str, timeout_s: float = DEADLINE_S) -> LoadResult:
        eventually(
            lambda: transfer_id in self.call("poll")[1], f"result of {transfer_id}", timeout_s
        )
        return self.call("poll")[1][transfer_id]

    def wait_sent(self, transfer_id: str) -> None:
        eventually(
            lambda: transfer_id in self.call("poll")[0],
            f"finished_sending of {transfer_id}",
            DEADLINE_S,
        )

    def sent(self, transfer_id: str) -> bool:
        return transfer_id in self.call("poll")[0]


def chain_hash(transfer_id: str, index: int) -> bytes:
    return f"{transfer_id[:8]}/{index}".encode().ljust(16, b".")
