"""Clients of UCX's TCP port that do not use its protocol affect no transfer.

For clients that use it see docs/decisions/ucx-carries-the-kv.md.
"""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import struct

import numpy as np
import psutil

from support.kv_transfer.agent_processes import OwnerProcess, Side, counting
from support.waiting import eventually

NUM_STRANGERS = 600
NUM_ROUNDS = 3
FLOOD_BYTES = 2**20
MARGIN_FDS = 4
MARGIN_BYTES = 4 * 2**20
RESET = struct.pack("ii", 1, 0)


class UntrustedClients:
    """Connections to one port: silent, with a few bytes, with a flood, or reset, in turn."""

    def __init__(self, port: int, seed: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._silent: list[socket.socket] = []
        rng = random.Random(seed)
        for index in range(NUM_STRANGERS):
            stranger = socket.create_connection(("127.0.0.1", port))
            if index % 4 == 0:
                self._silent.append(stranger)
            elif index % 4 == 3:
                stranger.send(rng.randbytes(rng.randrange(1, 64)))
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                stranger.close()
            else:
                stranger.setblocking(False)
                rest = bytearray(
                    rng.randbytes(rng.randrange(8, 200) if index % 4 == 1 else FLOOD_BYTES)
                )
                self._selector.register(
                    stranger, selectors.EVENT_READ | selectors.EVENT_WRITE, rest
                )

    def work(self) -> bool:
        """Send without blocking. Return whether all clients that sent bytes were disconnected."""
        for key, events in self._selector.select(0):
            stranger, rest = key.fileobj, key.data
            assert isinstance(stranger, socket.socket)
            try:
                if events & selectors.EVENT_WRITE:
                    del rest[: stranger.send(rest)]
                if not rest:
                    self._selector.modify(stranger, selectors.EVENT_READ, rest)
                if events & selectors.EVENT_READ and not stranger.recv(1):
                    raise ConnectionResetError
            except (ConnectionResetError, BrokenPipeError):
                self._selector.unregister(stranger)
                stranger.close()
        return not self._selector.get_map()

    def leave(self) -> None:
        for stranger in self._silent:
            stranger.close()
        self._selector.close()


def move_all(side: Side) -> None:
    """Write all blocks to the owner in another order and read them back, over a new connection."""
    side.agent.remove_remote_agent("owner")
    side.meet(side.owner)
    side.words[:] = np.random.default_rng().integers(2**60, size=side.words.size)
    expected = side.words.copy()
    assert side.run(side.make_everything("WRITE")) == "DONE"
    side.words[:] = 0
    assert side.run(side.make_everything("READ")) == "DONE"
    np.testing.assert_array_equal(side.words, expected)


def find_port(owner: psutil.Process) -> int:
    sockets = owner.net_connections("tcp")
    (port,) = {one.laddr.port for one in sockets if one.status == psutil.CONN_LISTEN}
    return port


def test_600_untrusted_clients_affect_no_transfer_and_leave_no_resources(side: Side) -> None:
    assert side.run(side.make("READ", [0], [1])) == "DONE"
    np.testing.assert_array_equal(side.block(0), counting(1))
    owner = psutil.Process(side.owner.process.pid)
    port = find_port(owner)
    num_fds = owner.num_fds() + MARGIN_FDS
    used = []
    for seed in range(NUM_ROUNDS):
        clients = UntrustedClients(port, seed)
        is_over, num_transfers = False, 0
        while not is_over or num_transfers < 20:
            is_over = clients.work()  # the silent ones stay until they leave
            move_all(side)
            num_transfers += 2
        clients.leave()
        eventually(lambda: owner.num_fds() <= num_fds, "the clients' descriptors are closed")
        used.append(owner.memory_info().rss)
    assert used[-1] <= used[0] + MARGIN_BYTES, used


def test_an_agent_that_ucx_stopped_listening_for_reports_the_failure_and_serves_known_peers(
    side: Side,
) -> None:
    """UCX closes its listening socket when no descriptor is left for a new connection."""
    assert isinstance(side.owner, OwnerProcess)
    assert side.run(side.make("READ", [0], [1])) == "DONE"
    assert side.owner.call("failure") == ""
    owner = psutil.Process(side.owner.process.pid)
    limit = owner.num_fds() + MARGIN_FDS
    owner.rlimit(psutil.RLIMIT_NOFILE, (limit, limit))
    port = find_port(owner)
    with contextlib.ExitStack() as stack:
        for _ in range(limit):
            with contextlib.suppress(ConnectionError):  # UCX stopped listening already
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        eventually(lambda: side.owner.call("failure"), "the failure is reported")
    assert "Restart the engine" in side.owner.call("failure")
    assert side.run(side.make("READ", [2], [3])) == "DONE"
    np.testing.assert_array_equal(side.block(2), counting(3))
