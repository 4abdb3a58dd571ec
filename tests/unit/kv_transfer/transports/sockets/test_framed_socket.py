"""Frames of messages and data over one connection, from memory to memory."""

from __future__ import annotations

import itertools
import os
import socket
import struct
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from baton_kv_transfer.transports.iovec import pack_run
from baton_kv_transfer.transports.sockets.framed_socket import (
    DATA,
    MAX_PAYLOAD_BYTES,
    FramedSocket,
)
from baton_kv_transfer.transports.sockets.row_io import FRAME_BYTES, Rows

MESSAGE = 7
Runs = list[tuple[int, int]]


def rows_of(memory: NDArray[np.uint8], runs: Runs) -> Rows:
    """Return rows for `runs` of (first byte, number of bytes)."""
    return Rows(b"".join(pack_run(memory.ctypes.data + first, count) for first, count in runs))


def random_bytes(count: int) -> NDArray[np.uint8]:
    return np.frombuffer(os.urandom(count), dtype=np.uint8).copy()


@pytest.fixture
def ends() -> Iterator[tuple[FramedSocket, FramedSocket]]:
    """Return a sender and a receiver with small buffers, so that sends stop within frames."""
    left, right = socket.socketpair()
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 20_000)
    both = FramedSocket(left, takes_data=True), FramedSocket(right, takes_data=True)
    yield both
    for end in both:
        end.close()


def deliver(sender: FramedSocket, receiver: FramedSocket) -> list[tuple[int, int, bytes]]:
    """Send everything that the sender has. Return the received frames."""
    received: list[tuple[int, int, bytes]] = []
    while sender.has_outgoing:
        sender.flush()
        received += receiver.receive()
    while more := list(receiver.receive()):
        received += more
    return received


@pytest.mark.parametrize(
    "lengths",
    [
        [1],
        [FRAME_BYTES],
        [FRAME_BYTES + 1],
        [3 * FRAME_BYTES + 5, 1, FRAME_BYTES - 1, 2],
        [*range(1, 3000)],
        [100] * 30_000,
    ],
    ids=["a byte", "a frame", "more than a frame", "long and short", "growing", "many"],
)
def test_rows_arrive_unchanged_and_only_in_their_place(
    ends: tuple[FramedSocket, FramedSocket], lengths: list[int]
) -> None:
    starts = np.cumsum([0, *[length + 3 for length in lengths]]).tolist()  # a gap after each
    source, target = random_bytes(starts[-1]), np.zeros(starts[-1], dtype=np.uint8)
    forwards = list(zip(starts, lengths, strict=False))
    sender, receiver = ends
    receiver.expect(5, rows_of(target, forwards))
    sender.send(MESSAGE, 5, b"the bytes follow", rows_of(source, forwards))
    assert deliver(sender, receiver) == [(MESSAGE, 5, b"the bytes follow"), (DATA, 5, b"")]
    expected = np.zeros_like(source)
    for start, length in forwards:
        expected[start : start + length] = source[start : start + length]
    np.testing.assert_array_equal(target, expected)
    assert not receiver.transfers
    assert not sender.transfers


def test_transfers_share_the_connection_and_messages_go_first(
    ends: tuple[FramedSocket, FramedSocket],
) -> None:
    sender, receiver = ends
    source, target = random_bytes(12 * FRAME_BYTES), np.zeros(12 * FRAME_BYTES, dtype=np.uint8)
    runs = {
        1: (0, 8 * FRAME_BYTES),
        2: (8 * FRAME_BYTES, 2 * FRAME_BYTES),
        3: (10 * FRAME_BYTES, 2 * FRAME_BYTES),
    }
    for number, run in runs.items():
        receiver.expect(number, rows_of(target, [run]))
        sender.send_rows(number, rows_of(source, [run]))
    sender.send(MESSAGE, 9, b"quick")
    received = deliver(sender, receiver)
    assert received == [(MESSAGE, 9, b"quick"), (DATA, 2, b""), (DATA, 3, b""), (DATA, 1, b"")]
    np.testing.assert_array_equal(target, source)


def test_a_stopped_transfer_reads_and_stores_nothing_and_others_continue(
    ends: tuple[FramedSocket, FramedSocket],
) -> None:
    sender, receiver = ends
    source, target = random_bytes(6 * FRAME_BYTES), np.zeros(6 * FRAME_BYTES, dtype=np.uint8)
    half = 3 * FRAME_BYTES
    for number, first in ((1, 0), (2, half)):
        receiver.expect(number, rows_of(target, [(first, half)]))
        sender.send_rows(number, rows_of(source, [(first, half)]))
    assert list(receiver.receive()) == []
    assert target.any()  # the first has begun
    assert receiver.stop(1)
    target[:half] = 0
    assert sender.stop(1)
    sent = source[half:].copy()
    source[:half] = 0xFF
    assert deliver(sender, receiver) == [(DATA, 2, b"")]
    assert not target[:half].any()
    np.testing.assert_array_equal(target[half:], sent)
    assert not receiver.stop(1)
    assert not sender.stop(1)


def test_a_stopped_sender_ends_its_frame_without_reading_its_memory(
    ends: tuple[FramedSocket, FramedSocket],
) -> None:
    sender, receiver = ends
    source = np.full(4 * FRAME_BYTES, 0xEE, dtype=np.uint8)
    target = np.full(4 * FRAME_BYTES, 0x11, dtype=np.uint8)
    receiver.expect(1, rows_of(target, [(0, target.size)]))
    sender.send_rows(1, rows_of(source, [(0, source.size)]))
    sender.stop(1)
    source[:] = 0xDD
    sender.send(MESSAGE, 1, b"stopped")
    assert deliver(sender, receiver) == [(MESSAGE, 1, b"stopped")]
    assert not (target == 0xDD).any()
    assert (target[:FRAME_BYTES] != 0x11).all()
    assert (target[FRAME_BYTES:] == 0x11).all()
    assert (target == 0).any()


def test_unexpected_data_is_discarded(ends: tuple[FramedSocket, FramedSocket]) -> None:
    sender, receiver = ends
    sender.send_rows(4, rows_of(random_bytes(3 * FRAME_BYTES), [(0, 3 * FRAME_BYTES)]))
    assert deliver(sender, receiver) == []
    sender.send(MESSAGE, 1, b"and then")
    assert deliver(sender, receiver) == [(MESSAGE, 1, b"and then")]


@pytest.mark.parametrize(
    ("sent", "expected"), [([10], [9]), ([10], [11]), ([10, 10], [20, 5]), ([5, 15], [10, 10])]
)
def test_frames_that_do_not_fit_the_rows_end_the_connection(
    ends: tuple[FramedSocket, FramedSocket], sent: list[int], expected: list[int]
) -> None:
    sender, receiver = ends
    memory = np.zeros(100, dtype=np.uint8)
    receiver.expect(1, rows_of(memory, [(40 * i, count) for i, count in enumerate(expected)]))
    for count in sent:
        sender.send_rows(1, rows_of(np.full(100, 1, dtype=np.uint8), [(0, count)]))
        while sender.has_outgoing:
            sender.flush()

    def receive_all() -> None:
        while True:
            list(receiver.receive())

    with pytest.raises(ConnectionError, match="does not fit"):
        receive_all()
    assert memory.sum() <= sent[0]


def test_unrequested_and_empty_data_end_the_connection(
    ends: tuple[FramedSocket, FramedSocket],
) -> None:
    sender, receiver = ends
    receiver.takes_data = False
    sender.send(DATA, 1, b"x")
    with pytest.raises(ConnectionError, match="not requested"):
        list(receiver.receive())
    left, right = socket.socketpair()
    empty, other = FramedSocket(left), FramedSocket(right, takes_data=True)
    empty.send(DATA, 1, b"")
    with pytest.raises(ConnectionError, match="not requested"):
        list(other.receive())
    empty.close()
    other.close()


@given(
    st.lists(
        st.one_of(
            st.integers(0, 9000),  # a message
            st.lists(st.integers(1, 3000), min_size=1, max_size=5),  # rows
        ),
        max_size=12,
    ),
    st.lists(st.integers(1, 6000), min_size=1, max_size=8),
)
def test_frames_are_the_same_for_any_split_of_the_bytes(
    frames: list[int | list[int]], pieces: list[int]
) -> None:
    left, right = socket.socketpair()
    left.setblocking(True)
    receiver = FramedSocket(right, takes_data=True)
    memory = np.zeros(200_000, dtype=np.uint8)
    wire, expected, stored = bytearray(), [], np.zeros_like(memory)
    first = 0
    for number, frame in enumerate(frames):
        size = frame if isinstance(frame, int) else sum(frame)
        content = os.urandom(size)
        wire += (
            struct.pack("<IIQ", size, MESSAGE if isinstance(frame, int) else DATA, number) + content
        )
        expected.append(
            (MESSAGE, number, content) if isinstance(frame, int) else (DATA, number, b"")
        )
        if not isinstance(frame, int):
            runs, start = [], 0
            for count in frame:
                runs.append((first, count))
                stored[first : first + count] = np.frombuffer(
                    content[start : start + count], dtype=np.uint8
                )
                first, start = first + count + 3, start + count
            receiver.expect(number, rows_of(memory, runs))
    received = []
    for size in itertools.cycle(pieces):
        if not wire:
            break
        left.sendall(wire[:size])
        del wire[:size]
        received += receiver.receive()
    while more := list(receiver.receive()):
        received += more
    assert received == expected
    np.testing.assert_array_equal(memory, stored)
    left.close()
    with pytest.raises(ConnectionError, match="closed"):
        list(receiver.receive())
    receiver.close()


def test_a_partial_header_is_kept_over_repeated_receives() -> None:
    left, right = socket.socketpair()
    receiver = FramedSocket(right)
    first, second = (struct.pack("<IIQ", 5, MESSAGE, number) + b"words" for number in (1, 2))
    cut = len(first) - 3
    left.sendall(first[:cut])
    assert list(receiver.receive()) == []
    left.sendall(first[cut:] + second[:10])
    assert list(receiver.receive()) == [(MESSAGE, 1, b"words")]
    for _ in range(3):  # e.g. when the socket becomes writable
        assert list(receiver.receive()) == []
    left.sendall(second[10:])
    assert list(receiver.receive()) == [(MESSAGE, 2, b"words")]
    left.close()
    receiver.close()


def test_an_announced_message_takes_no_memory_before_its_bytes_arrive(
    ends: tuple[FramedSocket, FramedSocket],
) -> None:
    announced = struct.pack("<IIQ", MAX_PAYLOAD_BYTES, MESSAGE, 1) + b"x" * 10
    os.write(ends[0].fileno(), announced)
    tracemalloc.start()
    try:
        assert list(ends[1].receive()) == []
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_frames_arrive_complete_for_any_split() -> None:
    left, right = socket.socketpair()
    sender, receiver = FramedSocket(left), FramedSocket(right)
    payloads = [b"", b"a", os.urandom(3_000_000)]
    for number, payload in enumerate(payloads):
        sender.send(7, number, payload)
    assert sender.has_outgoing
    received: list[tuple[int, int, bytes]] = []
    while len(received) < len(payloads):
        received += receiver.receive()
        sender.flush()
    assert received == [(7, number, payload) for number, payload in enumerate(payloads)]
    assert list(receiver.receive()) == []
    sender.close()
    with pytest.raises(ConnectionError):
        list(receiver.receive())
    receiver.close()


def test_a_frame_longer_than_allowed_ends_the_connection() -> None:
    left, right = socket.socketpair()
    sender, receiver = FramedSocket(left), FramedSocket(right, max_payload_bytes=10)
    sender.send(1, 1, b"0123456789")
    sender.send(1, 2, b"0123456789a")
    frames = receiver.receive()
    assert next(frames) == (1, 1, b"0123456789")
    with pytest.raises(ConnectionError, match="11 bytes"):
        next(frames)
    sender.close()
    receiver.close()
