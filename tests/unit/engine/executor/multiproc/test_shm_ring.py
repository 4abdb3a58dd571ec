"""The broadcast ring: every reader gets every message once and in order."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_engine.executor.multiproc.shm_ring import RingMemory, RingReader, RingWriter
from support.waiting import eventually

SLOT_NBYTES = 64
WAIT_S = 30.0


class Ring:
    """A ring whose readers map the memory again, as other processes do."""

    def __init__(self, num_readers: int, num_slots: int) -> None:
        self.memory = RingMemory.create(num_readers, num_slots, SLOT_NBYTES)
        pipes = [Pipe(duplex=True) for _ in range(num_readers)]
        self.writer_ends = [ours for ours, _ in pipes]
        self.writer = RingWriter(self.memory, self.writer_ends)
        self.mapped = [
            RingMemory(os.dup(self.memory.fd), num_readers, num_slots, SLOT_NBYTES) for _ in pipes
        ]
        self.readers = [
            RingReader(m, i, theirs)
            for i, (m, (_, theirs)) in enumerate(zip(self.mapped, pipes, strict=True))
        ]

    def close(self) -> None:
        for memory in (self.memory, *self.mapped):
            memory.close()
        for end in self.writer_ends:
            end.close()


MESSAGES = st.lists(
    st.integers(0, 4 * SLOT_NBYTES) | st.just(SLOT_NBYTES) | st.just(SLOT_NBYTES + 1), max_size=60
)


@given(sizes=MESSAGES, num_readers=st.integers(1, 3), num_slots=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_messages_of_any_sizes_arrive_in_order_at_all_readers(
    sizes: list[int], num_readers: int, num_slots: int
) -> None:
    ring = Ring(num_readers, num_slots)
    messages = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    with ThreadPoolExecutor(num_readers) as pool:
        received = [
            pool.submit(lambda r=reader: [r.get() for _ in messages]) for reader in ring.readers
        ]
        for message in messages:
            ring.writer.put(message, WAIT_S)
        assert [future.result(WAIT_S) for future in received] == [messages] * num_readers
    ring.close()


def test_a_waiting_reader_sleeps_and_is_woken_by_a_message() -> None:
    ring = Ring(1, 4)
    received: list[bytes] = []

    def read() -> None:
        while len(received) < 3:
            received.append(ring.readers[0].get())

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(3):
        eventually(
            lambda: ring.memory.sleeping(0),
            timeout_s=WAIT_S,
            what="the reader sleeps",
            every_s=0.001,
        )
        if number == 0:
            reader_thread = next(t for t in psutil.Process().threads() if t.id == thread.native_id)
            assert reader_thread.user_time + reader_thread.system_time < 0.1
        ring.writer.put(bytes([number]) * (SLOT_NBYTES * number), WAIT_S)
        eventually(
            lambda n=number: len(received) > n,
            timeout_s=WAIT_S,
            what=f"message {number}",
            every_s=0.001,
        )
    thread.join(WAIT_S)
    assert received == [bytes([n]) * (SLOT_NBYTES * n) for n in range(3)]
    ring.close()


def test_a_writer_of_a_full_ring_waits_for_its_slowest_reader_until_a_timeout() -> None:
    ring = Ring(2, 2)
    for number in range(2):
        ring.writer.put(bytes([number]), WAIT_S)
    ring.readers[0].get()
    with pytest.raises(TimeoutError, match="reader 1 has taken nothing"):
        ring.writer.put(b"x", 0.05)
    ring.readers[1].get()
    ring.writer.put(b"x", WAIT_S)
    assert [ring.readers[0].get() for _ in range(2)] == [b"\x01", b"x"]
    ring.close()


def test_a_waiting_writer_calls_its_check() -> None:
    ring = Ring(1, 1)
    ring.writer.put(b"x", WAIT_S)

    def check() -> None:
        raise ConnectionError("the reader died")

    with pytest.raises(ConnectionError):
        ring.writer.put(b"y", WAIT_S, check)
    ring.close()


def test_a_reader_gets_eof_after_the_last_message_of_a_closed_writer() -> None:
    ring = Ring(1, 2)
    ring.writer.put(b"last message", WAIT_S)
    ring.writer_ends[0].close()
    assert ring.readers[0].get() == b"last message"
    with pytest.raises(EOFError):
        ring.readers[0].get()
    ring.close()
