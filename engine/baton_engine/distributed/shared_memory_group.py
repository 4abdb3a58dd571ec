"""All-reduce and all-gather through shared memory, for CPU ranks of one host: some 50 us, where sockets take a millisecond.

The memory is anonymous (memfd): rank 0 creates it, the others open it through /proc, and nothing is left behind. Every rank has a
word and two buffers in it. In its k-th operation a rank copies its data into its buffer k % 2, sets its word to k + 1, waits until
all words are there, and reads all buffers. Two buffers are enough: who has begun operation k + 2 has seen all words at k + 2, and a
rank sets that only after it has read everything of operation k.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import threading
import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from baton_engine.distributed.group import Group

BUFFER_NBYTES = 2**20
"""Larger tensors go in pieces."""
WORD_NBYTES = 64
"""A cache line each: a rank that waits does not slow down the one it waits for."""
TOKEN_NBYTES = 64
SPIN_S = 1e-3
LONGEST_ROUND_S = 1.0
"""A round of waiting that takes longer was spent stopped, perhaps together with the one waited for: it counts as this much."""
LEFT = 2**63
"""Set in the word of a rank that has closed the group. What it did before still counts."""


def over_shared_memory(group: Group, name: str, store: Store, timeout_s: float) -> Group:
    """`group`, with all_reduce and all_gather through shared memory if all its members are on one host. Collective.

    Args:
        group: what is used for everything else, and between hosts.
        store: the group's own part of the store.
    """
    memory, pids = _share(group.rank, group.size, store)
    if memory is None:
        return group
    return SharedMemoryGroup(group, name, memory, pids, timeout_s)


class SharedMemoryGroup:
    """A `Group` of CPU ranks on one host. See `over_shared_memory`."""

    def __init__(self, group: Group, name: str, memory: mmap.mmap, pids: list[int], timeout_s: float) -> None:
        self.name = name
        self.rank = group.rank
        self.size = group.size
        self._group = group
        self._timeout_s = timeout_s
        shared = torch.frombuffer(memory, dtype=torch.uint8)
        start = TOKEN_NBYTES + self.size * WORD_NBYTES
        self._buffers = shared[start:].view(self.size, 2, BUFFER_NBYTES)
        self._words = memoryview(memory)[TOKEN_NBYTES:start].cast("Q")
        self._operation = 0
        self._fence_lock = threading.Lock()
        self._pidfds = {os.pidfd_open(pid): rank for rank, pid in enumerate(pids) if rank != self.rank}
        self._deaths = select.poll()
        for fd in self._pidfds:
            self._deaths.register(fd, select.POLLIN)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        dense = tensor.contiguous()
        for piece in _pieces(dense):
            first, *others = self._exchange(piece, "all_reduce")
            piece.copy_(first)
            for other in others:  # in rank order, so that every rank gets the same bits
                piece += other
        if dense is not tensor:
            tensor.copy_(dense)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        dense = tensor.contiguous()
        parts = dense.new_empty((self.size, *dense.shape))
        targets = [_pieces(part) for part in parts]
        for piece in _pieces(dense):
            for target, source in zip(targets, self._exchange(piece, "all_gather"), strict=True):
                next(target).copy_(source)
        return torch.cat(parts.unbind(0), dim)

    def send(self, tensor: Tensor, target: int) -> None:
        self._group.send(tensor, target)

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        return self._group.recv(tensor, source)

    def close(self) -> None:
        if self._pidfds:
            self._words[self.rank * WORD_NBYTES // 8] = self._operation | LEFT
            for fd in self._pidfds:
                os.close(fd)
            self._pidfds.clear()
        self._group.close()

    def _exchange(self, piece: Tensor, operation: str) -> list[Tensor]:
        """All ranks' pieces, in rank order, valid until the next exchange but one."""
        if not self._pidfds:
            raise RuntimeError(f"{self._where(operation)}: the group is closed")
        half = self._operation % 2
        self._operation += 1

        def view(rank: int) -> Tensor:
            return self._buffers[rank, half, : piece.nbytes].view(piece.dtype)

        view(self.rank).copy_(piece)
        self._fence()  # the data before the word that announces it
        self._words[self.rank * WORD_NBYTES // 8] = self._operation
        self._fence()
        for rank in range(self.size):
            if rank != self.rank:
                self._wait_for(rank, operation)
        self._fence()
        return [view(rank) for rank in range(self.size)]

    def _wait_for(self, rank: int, operation: str) -> None:
        """Spins, giving way to others; after a while looks whether everybody still lives."""
        wanted, waited_s, before = self._operation, 0.0, time.monotonic()
        while self._done(rank) < wanted:
            now = time.monotonic()
            waited_s += min(now - before, LONGEST_ROUND_S)
            before = now
            if self._words[rank * WORD_NBYTES // 8] & LEFT and self._done(rank) < wanted:
                raise RuntimeError(f"{self._where(operation)}: a member is gone (rank {rank} has left)")
            if waited_s < SPIN_S:
                os.sched_yield()
                continue
            dead = [self._pidfds[fd] for fd, _ in self._deaths.poll(1)]
            for other in dead:
                if self._done(other) < wanted:  # else it ended later, and does not matter yet
                    raise RuntimeError(f"{self._where(operation)}: a member is gone (rank {other} has died)")
            if waited_s > self._timeout_s:
                raise TimeoutError(f"{self._where(operation)}: no answer of rank {rank} within {self._timeout_s:.0f} s")

    def _done(self, rank: int) -> int:
        """Operations for which its data is there."""
        return self._words[rank * WORD_NBYTES // 8] & ~LEFT

    def _where(self, operation: str) -> str:
        return f"{operation} in group {self.name}, rank {self.rank} of {self.size}"

    def _fence(self) -> None:
        """Memory writes before it are seen before those after it: taking a lock is a barrier on every architecture."""
        with self._fence_lock:
            pass


def _pieces(dense: Tensor) -> Iterator[Tensor]:
    """Flat views of at most BUFFER_NBYTES."""
    return iter(dense.view(-1).split(BUFFER_NBYTES // dense.element_size()))


def _share(rank: int, size: int, store: Store) -> tuple[mmap.mmap | None, list[int]]:
    """The memory, mapped by every rank, and the ranks' process ids; None if one cannot map it."""
    nbytes = TOKEN_NBYTES + size * (WORD_NBYTES + 2 * BUFFER_NBYTES)
    fd = -1
    if rank == 0:
        fd = os.memfd_create("baton-group", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        token = secrets.token_bytes(TOKEN_NBYTES)
        os.pwrite(fd, token, 0)
        store.set("memory", f"/proc/{os.getpid()}/fd/{fd} {token.hex()}")
    path, token_hex = store.get("memory").decode().split()
    memory = None if rank > 0 and not _on_this_host(path, token_hex) else _map(path, nbytes)
    store.set(f"mapped-{rank}", f"{os.getpid() if memory is not None else 0}")
    pids = [int(store.get(f"mapped-{other}")) for other in range(size)]
    if fd >= 0:
        os.close(fd)  # everybody who can has mapped it
    return (memory if all(pids) else None), pids


def _on_this_host(path: str, token_hex: str) -> bool:
    """Whether `path` is rank 0's memory, and not what another host has under the same name."""
    try:
        with open(path, "rb") as file:
            return file.read(TOKEN_NBYTES).hex() == token_hex
    except OSError:
        return False


def _map(path: str, nbytes: int) -> mmap.mmap:
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), nbytes)
