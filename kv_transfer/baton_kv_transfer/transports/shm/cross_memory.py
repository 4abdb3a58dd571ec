"""Reading another process's memory: process_vm_readv, in batches, with proof of whose memory it was.

A process id alone proves nothing: it is used again once its process died. So the other side keeps a `Cell`, random bytes at an
address it told us. Every batch reads the cell last, in the same call: if it still holds those bytes, the process was the right
one, and had not withdrawn its memory, when all that came before was read; one that dies meanwhile keeps its memory for as long as
the call takes. A pidfd tells who died from who lost memory.
"""

from __future__ import annotations

import ctypes as c
import errno
import functools
import hmac
import os
import select
import threading
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from baton_kv_transfer.transports.iovec import RUN_BYTES, ends_of, pack_run, split, total_bytes
from baton_kv_transfer.transports.transfer import CopyError

CELL_BYTES = 16
MAX_RUNS = 1023
"""Runs of a batch; IOV_MAX is 1024, one is the cell's."""
BATCH_BYTES = 4 * 2**20
"""About a millisecond: the thread that reads has other work, too."""


class Cell:
    """Random bytes at a fixed address of this process, until cleared."""

    def __init__(self) -> None:
        self.value = os.urandom(CELL_BYTES)
        self._buffer = c.create_string_buffer(self.value, CELL_BYTES)
        self.address = c.addressof(self._buffer)

    def clear(self) -> None:
        """From here on, whatever others read from this process under this cell fails."""
        c.memset(self.address, 0, CELL_BYTES)


class Process:
    """Another process whose memory may be read, known by its cell."""

    def __init__(self, pid: int, cell_address: int, cell: bytes) -> None:
        """
        Raises:
            OSError: there is no such process, or no right to see it.
            OverflowError: the numbers cannot be of a process.
            CopyError: it is another process, or its memory may not be read.
        """
        self.pid = pid
        self._cell = cell
        self._lock = threading.Lock()
        self._landing = c.create_string_buffer(CELL_BYTES)
        self._landing_run = pack_run(c.addressof(self._landing), CELL_BYTES)
        self._cell_run = pack_run(cell_address, CELL_BYTES)
        self._readv = _load_process_vm_readv()
        self.pidfd = os.pidfd_open(pid)
        self._poller = select.poll()
        self._poller.register(self.pidfd, select.POLLIN)
        try:
            self.check()
        except CopyError:
            self.close()
            raise

    def check(self) -> None:
        """Raises CopyError if its memory may not be read (any more)."""
        self.read(b"", b"", 0)

    def read(self, local: bytes, remote: bytes, nbytes: int) -> None:
        """Copies runs of the process to runs here, pairwise.

        Args:
            local, remote: iovecs of as many runs, MAX_RUNS at most.
            nbytes: of all runs.

        Raises:
            CopyError: nothing of what arrived may be used.
        """
        with self._lock:
            self._read(local, remote, nbytes)

    @property
    def busy(self) -> bool:
        """A read is under way."""
        return self._lock.locked()

    @property
    def alive(self) -> bool:
        return not self._poller.poll(0)

    def close(self) -> None:
        """After a read under way; later ones fail."""
        with self._lock:
            if self.pidfd >= 0:
                os.close(self.pidfd)
                self.pidfd = -1

    def _read(self, local: bytes, remote: bytes, nbytes: int) -> None:
        if self.pidfd < 0:
            raise CopyError(f"process {self.pid} was given up")
        count = len(local) // RUN_BYTES + 1
        copied = self._readv(
            self.pid, local + self._landing_run, count, remote + self._cell_run, count, 0
        )
        if copied < 0 and c.get_errno() in (errno.EPERM, errno.ENOSYS):
            raise CopyError(
                f"the memory of process {self.pid} may not be read: {os.strerror(c.get_errno())}"
            )
        if copied != nbytes + CELL_BYTES:
            if (copied < 0 and c.get_errno() == errno.ESRCH) or not self.alive:
                raise CopyError(f"process {self.pid} died")
            raise CopyError(f"process {self.pid} does not have all of that memory (any more)")
        if not hmac.compare_digest(self._landing.raw, self._cell):
            raise CopyError(f"process {self.pid} withdrew its memory, or is another process now")


class BatchedCopy:
    """A long read in steps of one batch."""

    def __init__(self, process: Process, local: bytes, remote: bytes) -> None:
        """
        Args:
            local, remote: iovecs of runs of equal lengths.
        """
        self._process = process
        self.target = local
        """The runs here, as they were given."""
        self.nbytes = total_bytes(local)
        if self.nbytes > BATCH_BYTES:
            local, remote = split(local, BATCH_BYTES), split(remote, BATCH_BYTES)
        self._local, self._remote = local, remote
        self._count = len(local) // RUN_BYTES
        self._next = 0
        self._copied = 0

    @functools.cached_property
    def _ends(self) -> Sequence[int]:
        """Bytes up to and with each run."""
        return ends_of(self._local)

    @property
    def done(self) -> bool:
        return self._next == self._count

    def step(self) -> None:
        """Copies the next batch. Raises CopyError."""
        first, end, until = self._next, self._count, self.nbytes
        if end > MAX_RUNS or until > BATCH_BYTES:
            end = min(bisect_right(self._ends, self._copied + BATCH_BYTES), first + MAX_RUNS)
            until = int(self._ends[end - 1])
        part = slice(first * RUN_BYTES, end * RUN_BYTES)
        self._process.read(self._local[part], self._remote[part], until - self._copied)
        self._next, self._copied = end, until


@functools.cache
def _load_process_vm_readv() -> Any:
    """The function of the C library, called without the GIL. `Any`: ctypes functions have no useful type."""
    function = c.CDLL(None, use_errno=True).process_vm_readv
    function.restype = c.c_ssize_t
    function.argtypes = [c.c_int, c.c_void_p, c.c_ulong, c.c_void_p, c.c_ulong, c.c_ulong]
    return function
