"""A broadcast ring in shared memory: one writer sends every message to all readers, in order.

The memory is anonymous (memfd), so the kernel frees it when the last process ends. Layout, in
64-bit words:

    [published]                      messages written so far
    n x [taken, sleeping]            per reader: messages taken so far; 1 while the reader sleeps
    [length of slot 0] ...           then the slots' bytes

Message k is in slot k % num_slots. The writer may write message k once every reader has taken
message k - num_slots. Only one process writes each word.

A reader without a message spins for a moment. Then the reader sets its sleeping word and waits on
its side channel, a connection from the writer. The writer sends an empty frame to every reader that
sleeps.

A message larger than a slot is sent through the side channels, as a non-empty frame. The slot of
such a message stays empty and keeps the message's place in the order.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

WORD = 8  # bytes
HEADER_WORDS = 1
READER_WORDS = 2
#: Set in a slot's length if the message is in the side channel.
OVERFLOW = 2**63
#: How long a reader spins before it sleeps: about as long as a wake-up takes.
SPIN_S = 50e-6


class RingMemory:
    """The shared memory of the ring: 64-bit counters, flags and message lengths, then the slots.

    The writer and all readers map the same file descriptor.
    """

    def __init__(self, fd: int, num_readers: int, num_slots: int, slot_nbytes: int) -> None:
        self.fd = fd
        self.num_readers = num_readers
        self.num_slots = num_slots
        self.slot_nbytes = slot_nbytes
        num_words = HEADER_WORDS + READER_WORDS * num_readers + num_slots
        self._first_slot = num_words * WORD
        nbytes = self._first_slot + num_slots * slot_nbytes
        if os.fstat(fd).st_size < nbytes:
            os.ftruncate(fd, nbytes)
        self._map = mmap.mmap(fd, nbytes)
        self._bytes = memoryview(self._map)
        self._words = self._bytes[: self._first_slot].cast("Q")
        self._first_length = HEADER_WORDS + READER_WORDS * num_readers
        self._fence_lock = threading.Lock()

    @classmethod
    def create(cls, num_readers: int, num_slots: int, slot_nbytes: int) -> RingMemory:
        return cls(
            os.memfd_create("baton-ring", os.MFD_CLOEXEC), num_readers, num_slots, slot_nbytes
        )

    @property
    def published(self) -> int:
        return self._words[0]

    @published.setter
    def published(self, count: int) -> None:
        self.fence()  # the message must be visible before the count
        self._words[0] = count
        self.fence()

    def taken(self, reader: int) -> int:
        return self._words[HEADER_WORDS + READER_WORDS * reader]

    def set_taken(self, reader: int, count: int) -> None:
        self._words[HEADER_WORDS + READER_WORDS * reader] = count

    def sleeping(self, reader: int) -> bool:
        return bool(self._words[HEADER_WORDS + READER_WORDS * reader + 1])

    def set_sleeping(self, reader: int, sleeping: bool) -> None:
        self._words[HEADER_WORDS + READER_WORDS * reader + 1] = int(sleeping)
        self.fence()

    def length(self, index: int) -> int:
        return self._words[self._first_length + index % self.num_slots]

    def set_length(self, index: int, length: int) -> None:
        self._words[self._first_length + index % self.num_slots] = length

    def slot(self, index: int, length: int) -> memoryview:
        start = self._first_slot + index % self.num_slots * self.slot_nbytes
        return self._bytes[start : start + length]

    def fence(self) -> None:
        """Act as a memory barrier: no read or write is reordered across this call.

        Taking a lock is a barrier on every architecture.
        """
        with self._fence_lock:
            pass

    def close(self) -> None:
        """Unmap the memory and close the file descriptor. Idempotent.

        The kernel frees the memory when no process uses it.
        """
        if self.fd >= 0:
            self._words.release()
            self._bytes.release()
            self._map.close()
            os.close(self.fd)
            self.fd = -1


class RingWriter:
    """The writing side of the ring. Not thread-safe."""

    def __init__(self, memory: RingMemory, side_channels: Sequence[Connection]) -> None:
        """Create a writer that continues after the last message in the memory.

        Args:
            side_channels: the sending ends of one connection per reader. The connections wake
                readers and carry messages that are larger than a slot.
        """
        self._memory = memory
        self._side_channels = side_channels
        self._written = memory.published

    def put(
        self, message: bytes, timeout_s: float, check: Callable[[], None] = lambda: None
    ) -> None:
        """Send a message to all readers. Waits while the ring is full.

        Args:
            timeout_s: limit of the wait.
            check: called repeatedly during the wait. If `check` raises an exception, for example
                because a reader has died, the wait ends with this exception.

        Raises:
            TimeoutError: the ring was full for `timeout_s`.
            OSError: a reader has closed its side channel.
        """
        memory, index = self._memory, self._written
        self._wait_for_slot(index, timeout_s, check)
        overflow = len(message) > memory.slot_nbytes
        if not overflow:
            memory.slot(index, len(message))[:] = message
        memory.set_length(index, len(message) | (OVERFLOW if overflow else 0))
        self._written = index + 1
        memory.published = self._written
        for reader, channel in enumerate(self._side_channels):
            if overflow:
                channel.send_bytes(message)  # also wakes the reader
            elif memory.sleeping(reader):
                channel.send_bytes(b"")

    def _wait_for_slot(self, index: int, timeout_s: float, check: Callable[[], None]) -> None:
        memory = self._memory
        deadline = time.monotonic() + timeout_s
        pause_s = 50e-6
        while late := [
            r for r in range(memory.num_readers) if memory.taken(r) + memory.num_slots <= index
        ]:
            check()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"reader {late[0]} has taken nothing from the full ring for {timeout_s:.0f} s; "
                    "the worker hangs or is very slow"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5e-3)


class RingReader:
    """The reading side of the ring, for one reader. Not thread-safe."""

    def __init__(self, memory: RingMemory, index: int, side_channel: Connection) -> None:
        self._memory = memory
        self._index = index
        self._side_channel = side_channel
        self._taken = memory.taken(index)
        self._overflow: deque[bytes] = deque()

    def get(self) -> bytes:
        """Wait for the next message and return it.

        Raises:
            EOFError: the writer has closed the side channel.
        """
        memory = self._memory
        self._wait_for_message()
        memory.fence()
        length = memory.length(self._taken)
        if length & OVERFLOW:
            while not self._overflow:
                self._take_frame()
            message = self._overflow.popleft()
        else:
            message = bytes(memory.slot(self._taken, length))
        memory.fence()  # the copy must end before the slot is reused
        self._taken += 1
        memory.set_taken(self._index, self._taken)
        return message

    def _wait_for_message(self) -> None:
        memory = self._memory
        spin_until = time.monotonic() + SPIN_S
        while memory.published == self._taken:
            if time.monotonic() < spin_until:
                os.sched_yield()
                continue
            memory.set_sleeping(self._index, True)
            try:
                # Check again, because the writer may have missed the sleeping word.
                if memory.published == self._taken:
                    self._take_frame()
            finally:
                memory.set_sleeping(self._index, False)
            spin_until = time.monotonic() + SPIN_S

    def _take_frame(self) -> None:
        """Receive one frame of the side channel, and queue it as a message unless it is empty.

        An empty frame only wakes the reader.
        """
        if frame := self._side_channel.recv_bytes():
            self._overflow.append(frame)
