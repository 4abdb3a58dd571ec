"""Peers that freeze, leave or connect again, and workers that are replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from baton_kv_transfer.agent.agent_factory import create_agent
from baton_kv_transfer.transports.iovec import pack
from baton_kv_transfer.transports.transfer import XferState
from baton_kv_transfer.transports.transport_thread import TransportThread
from baton_kv_transfer.transports.ucx import messages, ucx_worker
from baton_kv_transfer.transports.ucx import ucx_transport as transport_module
from baton_kv_transfer.transports.ucx.connection import UCXConnection
from baton_kv_transfer.transports.ucx.data_messages import PIECE_BYTES
from support.kv_transfer.agent_processes import Side, counting
from support.kv_transfer.transport_rig import WORDS, end, rows
from support.kv_transfer.ucx_rig import Raw, UCXTransportHere
from support.waiting import eventually

MIB_WORDS = 2**17


def ignore_a_disconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the worker keep its UCX endpoint when the next connection is cut."""
    disconnect = ucx_worker.UCXWorker.disconnect

    def ignore(self: ucx_worker.UCXWorker, endpoint: Any, on_end: Callable[[str], None]) -> None:
        monkeypatch.setattr(ucx_worker.UCXWorker, "disconnect", disconnect)

    monkeypatch.setattr(ucx_worker.UCXWorker, "disconnect", ignore)


def test_a_frozen_peer_times_out(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "SILENT_TICKS", 2)
    assert side.run(side.make("READ", [0], [1])) == "DONE"
    read, write = side.make_everything("READ", times=8), side.make_everything("WRITE", times=8)
    with side.owner.frozen():
        side.agent.transfer(read)
        side.agent.transfer(write)
        assert side.end(read) == side.end(write) == "ERR"
        assert "nothing arrived from owner" in read.error
        side.words[:] = 0
    assert side.run(side.make("READ", [5], [6])) == "DONE"
    np.testing.assert_array_equal(side.block(5), counting(6))
    side.block(5)[:] = 0
    assert not side.words.any()


def test_a_connection_that_is_idle_between_ticks_is_not_silent(
    connections: list[UCXConnection],
    make: Callable[[str], UCXTransportHere],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks: dict[TransportThread, Callable[[], None]] = {}
    monkeypatch.setattr(
        TransportThread, "call_later", lambda self, delay_s, tick: ticks.update({self: tick})
    )
    monkeypatch.setattr(transport_module, "SILENT_TICKS", 2)
    one, owner = make("one"), make("owner")
    one.transport.add_peer("owner", owner.transport.address)
    one.transport.send_notif("owner", b"first")
    eventually(lambda: owner.notifs, "the first notification")
    connection = connections[0]
    assert connection.address == owner.address.worker
    for is_busy in (True, False, True, False):
        monkeypatch.setattr(UCXConnection, "is_busy", is_busy)
        one.on_thread(ticks[one.thread])
    assert not connection.error
    monkeypatch.setattr(UCXConnection, "is_busy", True)
    for _ in range(2):
        one.on_thread(ticks[one.thread])
    assert "nothing arrived from owner" in connection.error


def test_a_peer_that_stops_during_a_transfer_times_out_at_the_owner(
    connections: list[UCXConnection],
    pair: tuple[UCXTransportHere, UCXTransportHere],
    raw: Raw,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport_module, "SILENT_TICKS", 2)
    owner = pair[1]
    raw.send_hello(owner)
    raw.send_message(
        messages.Write(raw.session, 5, pack(rows(owner.words, (0, 4 * MIB_WORDS))), b"n", True)
    )
    raw.wait("the owner's receives", lambda: raw.received)
    raw.send(messages.data_tag(5, 0), b"\xff" * PIECE_BYTES)
    eventually(lambda: connections[0].error and not owner.num_held(), "the connection was cut")
    assert not owner.notifs


def test_ucx_does_not_hold_memory_after_its_deregistration(
    connections: list[UCXConnection], pair: tuple[UCXTransportHere, UCXTransportHere]
) -> None:
    one, owner = pair
    everything = [(0, WORDS)] * 64
    for op in ("READ", "WRITE"):
        transfer = one.post(
            op, "owner", rows(one.words, *everything), rows(owner.words, *everything)
        )
        eventually(lambda: any(connection.incoming for connection in connections), "it began")
        owner.deregister()
        is_held = any(
            connection.is_busy
            for connection in connections
            if connection.address == one.address.worker
        )
        owner.words[:] = 7
        assert not is_held
        assert end(transfer)[0] is XferState.ERR
        assert (owner.words == 7).all()
        owner.context.regions.append(owner.region)
    some = rows(one.words, (0, 8))
    assert end(one.post("WRITE", "owner", some, rows(owner.words, (0, 8))))[0] is XferState.DONE


def test_removing_a_peer_ends_our_transfers_but_not_those_of_the_peer(
    pair: tuple[UCXTransportHere, UCXTransportHere],
) -> None:
    one, owner = pair
    owner.transport.add_peer("one", one.transport.address)
    everything = [(0, WORDS)] * 16
    assert (
        end(owner.post("READ", "one", rows(owner.words, (0, 8)), rows(one.words, (0, 8))))[0]
        is XferState.DONE
    )
    read = one.post("READ", "owner", rows(one.words, *everything), rows(owner.words, *everything))
    owner.transport.remove_peer("one")
    assert end(read)[0] is XferState.DONE
    read = one.post("READ", "owner", rows(one.words, *everything), rows(owner.words, *everything))
    one.transport.remove_peer("owner")
    state, error = end(read)
    assert state is XferState.ERR
    assert "removed" in error
    one.words[:] = 5
    one.transport.add_peer("owner", owner.transport.address)
    assert (
        end(one.post("WRITE", "owner", rows(one.words, (0, 8)), rows(owner.words, (0, 8))))[0]
        is XferState.DONE
    )
    assert (one.words == 5).all()


def test_a_peer_that_connects_again_replaces_its_connection(
    connections: list[UCXConnection], pair: tuple[UCXTransportHere, UCXTransportHere]
) -> None:
    one, owner = pair
    some, theirs = rows(one.words, (0, 8)), rows(owner.words, (8, 8))
    for _ in range(5):
        assert end(one.post("READ", "owner", some, theirs))[0] is XferState.DONE
        one.transport.remove_peer("owner")
        one.transport.add_peer("owner", owner.transport.address)
    assert end(one.post("READ", "owner", some, theirs))[0] is XferState.DONE
    here = one.address.worker
    at_owner = [connection for connection in connections if connection.address == here]
    assert len(at_owner) == 6
    eventually(
        lambda: all(connection.error for connection in at_owner[:-1]) and not owner.num_held(),
        "one connection is left",
    )
    assert not at_owner[-1].error


def test_a_worker_that_does_not_release_memory_is_replaced(
    connections: list[UCXConnection],
    pair: tuple[UCXTransportHere, UCXTransportHere],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, owner = pair
    before = one.transport.address
    assert (
        end(one.post("READ", "owner", rows(one.words, (0, 8)), rows(owner.words, (8, 8))))[0]
        is XferState.DONE
    )
    ignore_a_disconnect(monkeypatch)
    connections[0].fail("a test")
    eventually(lambda: one.transport.address != before, "another worker")
    assert (
        end(one.post("READ", "owner", rows(one.words, (0, 8)), rows(owner.words, (8, 8))))[0]
        is XferState.DONE
    )


def test_an_agent_reaches_its_own_memory_with_another_worker(
    connections: list[UCXConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = np.arange(16, dtype=np.int64)
    agent = create_agent("me", "ucx")
    agent.register_memory([(words.ctypes.data, words.nbytes, 0, "")])

    def move() -> str:
        ours, theirs = (
            agent.get_xfer_descs([(words.ctypes.data + offset, 64, 0)]) for offset in (0, 64)
        )
        handle = agent.initialize_xfer("READ", ours, theirs, "me")
        agent.transfer(handle)
        eventually(lambda: agent.check_xfer_state(handle) != "PROC", "the end of the transfer")
        return agent.check_xfer_state(handle)

    assert move() == "DONE"
    before = agent.get_agent_metadata()
    ignore_a_disconnect(monkeypatch)
    connections[0].fail("a test")
    eventually(lambda: agent.get_agent_metadata() != before, "another worker")
    assert move() == "DONE"
    agent.close()
