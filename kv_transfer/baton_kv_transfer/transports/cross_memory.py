"""Reading another process's memory: process_vm_readv, in batches, with proof of whose memory it was.

A process id alone proves nothing: it is used again once its process died. So the other side keeps a `Cell`, random bytes at an
address it told us. Every batch reads the cell last, in the same call: if it still holds those bytes, the process was the right
one, and had not withdrawn its memory, when all that came before was read. A pidfd tells whether it lived until then.
"""

from __future__ import annotations

import ctypes as c
import errno
import functools
import hmac
import os
import select
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.transports.base import Descriptors
from baton_kv_transfer.transports.rows import split

CELL_BYTES = 16
MAX_ROWS = 1023
"""Runs of a batch; IOV_MAX is 1024, one is the cell's."""
BATCH_BYTES = 4 * 2**20
"""About a millisecond: the thread that reads has other work, too."""

_NOTHING = np.zeros((0, 2), dtype=np.int64)


class CopyError(RuntimeError):
    """The other process's memory could not be read; the text says why."""


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
        self._local = np.zeros((MAX_ROWS + 1, 2), dtype=np.int64)  # struct iovec: address, length
        self._remote = np.zeros((MAX_ROWS + 1, 2), dtype=np.int64)
        self._local_address, self._remote_address = self._local.ctypes.data, self._remote.ctypes.data
        self._cell_rows = np.array(
            [[c.addressof(self._landing), CELL_BYTES], [cell_address, CELL_BYTES]], dtype=np.int64
        )
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
        self.read(_NOTHING, _NOTHING, 0)

    def read(self, local: NDArray[np.int64], remote: NDArray[np.int64], nbytes: int) -> None:
        """Copies runs of the process to runs here, pairwise.

        Args:
            local, remote: [n, 2], n <= MAX_ROWS: address, length.
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

    def _read(self, local: NDArray[np.int64], remote: NDArray[np.int64], nbytes: int) -> None:
        if self.pidfd < 0:
            raise CopyError(f"process {self.pid} was given up")
        count = len(local)
        self._local[:count], self._remote[:count] = local, remote
        self._local[count], self._remote[count] = self._cell_rows
        copied = self._readv(self.pid, self._local_address, count + 1, self._remote_address, count + 1, 0)
        if copied < 0 and c.get_errno() in (errno.EPERM, errno.ENOSYS):
            raise CopyError(f"the memory of process {self.pid} may not be read: {os.strerror(c.get_errno())}")
        if not self.alive or (copied < 0 and c.get_errno() == errno.ESRCH):
            raise CopyError(f"process {self.pid} died")
        if copied != nbytes + CELL_BYTES:
            raise CopyError(f"process {self.pid} does not have all of that memory (any more)")
        if not hmac.compare_digest(self._landing.raw, self._cell):
            raise CopyError(f"process {self.pid} withdrew its memory, or is another process now")


class BatchedCopy:
    """A long read in steps of one batch."""

    def __init__(self, process: Process, local: Descriptors, remote: Descriptors) -> None:
        """
        Args:
            local, remote: [n, 2 or more]: address and length of each run; lengths are equal.
        """
        self._process = process
        self.target = local[:, :2]
        """The runs here, as they were given."""
        self.nbytes = int(local[:, 1].sum())
        self._local, self._remote = self.target, remote[:, :2]
        if self.nbytes > BATCH_BYTES:
            self._local, self._remote = split(self._local, BATCH_BYTES), split(self._remote, BATCH_BYTES)
        self._next = 0
        self._copied = 0
        self._single = len(self._local) <= MAX_ROWS and self.nbytes <= BATCH_BYTES
        self._ends = (
            np.empty(0, np.int64) if self._single else np.cumsum(self._local[:, 1])
        )  # bytes up to and with a row

    @property
    def done(self) -> bool:
        return self._next == len(self._local)

    def step(self) -> None:
        """Copies the next batch. Raises CopyError."""
        first = self._next
        if self._single:
            self._process.read(self._local, self._remote, self.nbytes)
            self._next = len(self._local)
            return
        end = min(int(np.searchsorted(self._ends, self._copied + BATCH_BYTES, "right")), first + MAX_ROWS)
        until = int(self._ends[end - 1])
        self._process.read(self._local[first:end], self._remote[first:end], until - self._copied)
        self._next, self._copied = end, until


@functools.cache
def _load_process_vm_readv() -> Any:
    """The function of the C library, called without the GIL. `Any`: ctypes functions have no useful type."""
    function = c.CDLL(None, use_errno=True).process_vm_readv
    function.restype = c.c_ssize_t
    function.argtypes = [c.c_int, c.c_void_p, c.c_ulong, c.c_void_p, c.c_ulong, c.c_ulong]
    return function
