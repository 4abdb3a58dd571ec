"""Fences: no connection opens during one. It waits for the network, not for a frozen peer."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from baton_kv_transfer.transports.ucx import ucx_transport as transport_module
from baton_kv_transfer.transports.ucx import ucx_worker
from baton_kv_transfer.transports.ucx.connection import UCXConnection
from baton_kv_transfer.transports.ucx.library import UCXError
from support.kv_transfer.agent_processes import Side
from support.kv_transfer.ucx_rig import Raw, UCXTransportHere
from support.waiting import eventually


def test_no_connection_is_opened_during_a_fence(
    connections: list[UCXConnection],
    pair: tuple[UCXTransportHere, UCXTransportHere],
    raw: Raw,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The receive of HELLO ends while another connection is cut."""
    one, owner = pair
    one.transport.send_notif("owner", b"me")
    eventually(lambda: owner.notifs, "the connection to cut")
    take, cut = ucx_worker.UCXWorker.take, UCXConnection.cut
    hello: list[Callable[[], None]] = []

    def take_later(
        self: ucx_worker.UCXWorker,
        message: int,
        buffer: ucx_worker.Buffer,
        on_end: Callable[[str], None],
    ) -> ucx_worker.UCXRequest:
        return take(self, message, buffer, lambda error: hello.append(lambda: on_end(error)))

    def cut_and_receive_hello(self: UCXConnection) -> None:
        cut(self)
        hello.pop()()

    monkeypatch.setattr(ucx_worker.UCXWorker, "take", take_later)
    monkeypatch.setattr(UCXConnection, "cut", cut_and_receive_hello)
    raw.send_hello(owner)
    raw.wait("HELLO", lambda: hello)
    owner.on_thread(owner.transport.fence)
    assert not hello
    assert raw.worker.address not in [connection.address for connection in connections]


def test_a_fence_does_not_wait_for_half_a_message_of_a_frozen_peer(side: Side) -> None:
    side.owner.call("add_peer", side.agent.get_agent_metadata())
    everything = list(range(32)) * 100
    side.owner.call("post", "WRITE", "me", everything[::-1], side.words.ctypes.data, everything)
    eventually(side.words.any, "first bytes")
    with side.owner.frozen():
        began = time.monotonic()
        side.agent.fence()
        side.words[:] = 0
        assert time.monotonic() - began < 5
    eventually(lambda: side.owner.call("state") != "PROC", "the end of the write")
    assert not side.words.any()


@pytest.fixture
def lose_network(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that makes the creation of this many workers fail."""

    def lose(num_failures: float) -> None:
        create = ucx_worker.UCXContext.create_worker

        def create_worker(self: ucx_worker.UCXContext) -> ucx_worker.UCXWorker:
            nonlocal num_failures
            if num_failures > 0:
                num_failures -= 1
                raise UCXError("UCX cannot create a worker: No such device")
            return create(self)

        monkeypatch.setattr(ucx_worker.UCXContext, "create_worker", create_worker)

    return lose


def test_a_fence_waits_for_the_network(
    side: Side, lose_network: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    lose_network(1)
    side.agent.fence()
    assert "No such device" in caplog.text
    side.meet(side.owner)
    assert side.run(side.make("READ", [0], [1])) == "DONE"


def test_a_fence_without_a_network_is_an_error(
    side: Side, lose_network: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_module, "NETWORK_TIMEOUT_S", 0.0)
    lose_network(float("inf"))
    with pytest.raises(UCXError, match="No such device"):
        side.agent.fence()
    side.meet(side.owner)
    handle = side.make("READ", [0], [1])
    assert side.run(handle) == "ERR"
    assert "lost its network" in handle.error
