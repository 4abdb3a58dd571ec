"""Reads the memory of another process with process_vm_readv. Each call verifies the process.

A process id alone does not prove identity, because the kernel reuses ids. So each process has a
`ProcessNonce`: random bytes whose address and content the process sends to its peers. Each batch
reads the nonce of the other process last, in the same call. If the nonce has the expected content,
the process is the right one and had not withdrawn its memory. A process that dies during the call
keeps its memory until the end of the call. After a failed call, a pidfd shows whether the process
is dead.
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

NONCE_BYTES = 16
#: Maximum number of runs in a batch. IOV_MAX is 1024, and one run is the nonce.
MAX_RUNS = 1023
#: Maximum size of a batch, which one system call copies. A batch takes about a millisecond, after
#: which the thread does other work.
MAX_COPY_BYTES = 4 * 2**20


class ProcessNonce:
    """Random bytes at a fixed address, by which peers identify this process until `clear`."""

    def __init__(self) -> None:
        self.value = os.urandom(NONCE_BYTES)
        self._buffer = c.create_string_buffer(self.value, NONCE_BYTES)
        self.address = c.addressof(self._buffer)

    def clear(self) -> None:
        """Set the nonce to zeros, so that peers that check it cannot read this process's memory."""
        c.memset(self.address, 0, NONCE_BYTES)


class PeerProcess:
    """Another process whose memory may be read, identified by its nonce."""

    def __init__(self, pid: int, nonce_address: int, nonce: bytes) -> None:
        """Open the process and verify its nonce.

        Args:
            pid: id of the process.
            nonce_address: address of the process's nonce.
            nonce: expected content of the nonce.

        Raises:
            OSError: there is no such process, or the process is not visible.
            OverflowError: the process id or the address is out of range.
            CopyError: the nonce has another content, or the memory may not be read.
        """
        self.pid = pid
        self._nonce = nonce
        self._lock = threading.Lock()
        self._landing = c.create_string_buffer(NONCE_BYTES)
        self._landing_run = pack_run(c.addressof(self._landing), NONCE_BYTES)
        self._nonce_run = pack_run(nonce_address, NONCE_BYTES)
        self._readv = _load_process_vm_readv()
        self.pidfd = os.pidfd_open(pid)
        self._poller = select.poll()
        self._poller.register(self.pidfd, select.POLLIN)
        try:
            self.read(b"", b"", 0)  # only the nonce
        except CopyError:
            self.close()
            raise

    def read(self, local: bytes, remote: bytes, nbytes: int) -> None:
        """Copy runs of the other process's memory to local runs, in order.

        Args:
            local: iovec of up to MAX_RUNS local runs.
            remote: iovec of the other process's runs, of the same lengths.
            nbytes: sum of the lengths.

        Raises:
            CopyError: the read failed. The content of the local runs must not be used.
        """
        with self._lock:
            if self.pidfd < 0:
                raise CopyError(
                    f"process {self.pid} is not read any more: its peer was removed or lost"
                )
            count = len(local) // RUN_BYTES + 1
            copied = self._readv(
                self.pid, local + self._landing_run, count, remote + self._nonce_run, count, 0
            )
            if copied < 0 and c.get_errno() in (errno.EPERM, errno.ENOSYS):
                raise CopyError(
                    f"the memory of process {self.pid} may not be read: "
                    f"{os.strerror(c.get_errno())}"
                )
            if copied != nbytes + NONCE_BYTES:
                if (copied < 0 and c.get_errno() == errno.ESRCH) or not self.is_alive:
                    raise CopyError(f"process {self.pid} died")
                raise CopyError(f"process {self.pid} does not have all of that memory any more")
            if not hmac.compare_digest(self._landing.raw, self._nonce):
                raise CopyError(
                    f"process {self.pid} withdrew its memory, or is another process now"
                )

    @property
    def is_busy(self) -> bool:
        """Whether a read is in progress."""
        return self._lock.locked()

    @property
    def is_alive(self) -> bool:
        return not self._poller.poll(0)

    def close(self) -> None:
        """Stop reading the process. Wait for a read in progress, and make later reads fail."""
        with self._lock:
            if self.pidfd >= 0:
                os.close(self.pidfd)
                self.pidfd = -1


class BatchedCopy:
    """A read of any length from another process. Each `step` reads one batch."""

    def __init__(self, process: PeerProcess, local: bytes, remote: bytes) -> None:
        """Prepare the read.

        Args:
            process: the process to read from.
            local: iovec of local runs.
            remote: iovec of the process's runs, of the same lengths.
        """
        self._process = process
        #: The local runs as the caller gave them. Long runs are split in `_local`.
        self.target = local
        self.nbytes = total_bytes(local)
        if self.nbytes > MAX_COPY_BYTES:
            local, remote = split(local, MAX_COPY_BYTES), split(remote, MAX_COPY_BYTES)
        self._local, self._remote = local, remote
        self._count = len(local) // RUN_BYTES
        self._next = 0
        self._copied = 0

    @functools.cached_property
    def _ends(self) -> Sequence[int]:
        """Cumulative sums of the lengths of the local runs, in bytes."""
        return ends_of(self._local)

    @property
    def is_done(self) -> bool:
        return self._next == self._count

    def step(self) -> None:
        """Copy the next batch.

        Raises:
            CopyError: the batch cannot be read.
        """
        first, end, until = self._next, self._count, self.nbytes
        if end > MAX_RUNS or until > MAX_COPY_BYTES:
            end = min(bisect_right(self._ends, self._copied + MAX_COPY_BYTES), first + MAX_RUNS)
            until = int(self._ends[end - 1])
        part = slice(first * RUN_BYTES, end * RUN_BYTES)
        self._process.read(self._local[part], self._remote[part], until - self._copied)
        self._next, self._copied = end, until


@functools.cache
def _load_process_vm_readv() -> Any:
    """Return process_vm_readv of the C library. A call releases the GIL.

    The return type is Any, because ctypes functions have no useful type.
    """
    function = c.CDLL(None, use_errno=True).process_vm_readv
    function.restype = c.c_ssize_t
    function.argtypes = [c.c_int, c.c_void_p, c.c_ulong, c.c_void_p, c.c_ulong, c.c_ulong]
    return function
