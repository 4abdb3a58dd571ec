"""Run a transport in this process, for the tests of each transport."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from baton_kv_transfer.transports.transfer import Region, Transfer, TransportError, XferState
from baton_kv_transfer.transports.transport import TransportContext
from baton_kv_transfer.transports.transport_thread import TransportThread
from support.waiting import eventually

HOST = "127.0.0.1"
WORDS = 2**20


def rows(words: NDArray[np.int64], *runs: tuple[int, int]) -> NDArray[np.int64]:
    """Return rows [n, 3] for runs of (first word, number of words)."""
    return np.array(
        [[words.ctypes.data + first * 8, count * 8, 0] for first, count in runs], dtype=np.int64
    )


def fail_to_accept(monkeypatch: pytest.MonkeyPatch, times: int) -> list[float]:
    """Let the next accepts fail for lack of a descriptor. Return the list of their times."""
    tries: list[float] = []
    accept = socket.socket.accept

    def fail(listener: socket.socket) -> Any:
        if len(tries) >= times:
            return accept(listener)
        tries.append(time.monotonic())
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(socket.socket, "accept", fail)
    return tries


def end(transfer: Transfer) -> tuple[XferState, str]:
    """Wait for the end of a transfer. Return its state and error."""
    eventually(lambda: transfer.state is not XferState.PROC, "end of the transfer")
    return transfer.state, transfer.error


class TransportHere:
    """A transport with registered memory and the notifications that it received."""

    transport_class: ClassVar[Callable[[TransportContext], Any]]
    address_class: ClassVar[type]
    num_words = WORDS

    def __init__(self, name: str, host: str = HOST) -> None:
        self.notifs: list[tuple[str, bytes]] = []
        self.thread = TransportThread(f"transport-{name}")
        self.context = TransportContext(
            self.thread,
            name,
            host,
            lambda sender, message: self.notifs.append((sender, message)),
            lambda: None,
        )
        self.transport = self.transport_class(self.context)
        self.thread.start(self.transport.close)
        self.words = np.arange(self.num_words, dtype=np.int64)
        self.region = Region(self.words.ctypes.data, self.words.nbytes)
        self.context.regions.append(self.region)

    @property
    def address(self) -> Any:
        return msgspec.msgpack.decode(self.transport.address, type=self.address_class)

    def on_thread(self, function: Callable[[], Any]) -> Any:
        return self.thread.commands.call(function)

    def deregister(self) -> None:
        """Deregister all memory."""
        self.context.regions.clear()
        self.on_thread(lambda: self.transport.forget_region(self.region))

    def post(
        self,
        op: str,
        peer: str,
        local: NDArray[np.int64],
        remote: NDArray[np.int64],
        notif: bytes = b"",
    ) -> Transfer:
        transfer = Transfer(op, peer, local, remote, notif)
        assert self.transport.begin(transfer)
        return transfer


def move_rows_of_all_sizes(one: TransportHere, owner: TransportHere, op: str) -> int:
    """Check that a transfer moves exactly the bytes of its rows. Return the number of bytes."""
    one.words[:] = -1 - one.words
    runs = [
        (0, 300_001),
        (300_002, 1),
        *[(300_004 + 3 * i, 2) for i in range(20_000)],
        (400_000, 262_144),
    ]
    local, remote = rows(one.words, *runs), rows(owner.words, *runs)
    source, target = (owner.words, one.words) if op == "READ" else (one.words, owner.words)
    expected = target.copy()
    for first, count in runs:
        expected[first : first + count] = source[first : first + count]
    assert end(one.post(op, "owner", local, remote, b"moved"))[0] is XferState.DONE
    np.testing.assert_array_equal(target, expected)
    eventually(lambda: owner.notifs == [("one", b"moved")], "the notification")
    return 8 * sum(count for _, count in runs)


def open_and_close(kind: type[TransportHere]) -> None:
    """Connect two transports, fence one and close both. Check that closed ones refuse calls."""
    one, other = kind("one"), kind("other")
    one.transport.add_peer("other", other.transport.address)
    one.transport.send_notif("other", b"hello")
    eventually(lambda: other.notifs, "the notification")
    other.on_thread(other.transport.fence)
    one.thread.close()
    other.thread.close()
    with pytest.raises(TransportError, match="closed"):
        one.on_thread(one.transport.fence)
