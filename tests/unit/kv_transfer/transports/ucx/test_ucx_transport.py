"""The UCX transport: data, untrusted peers, lost peers and networks."""

from __future__ import annotations

import ctypes as c
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from baton_kv_transfer.agent import transport_agent
from baton_kv_transfer.agent.agent import INIT_AGENT
from baton_kv_transfer.agent.agent_factory import create_agent
from baton_kv_transfer.transports.iovec import pack
from baton_kv_transfer.transports.transfer import XferState
from baton_kv_transfer.transports.transport_selection import LOADERS
from baton_kv_transfer.transports.transport_thread import TransportThread
from baton_kv_transfer.transports.ucx import library, messages, ucx_worker
from baton_kv_transfer.transports.ucx import ucx_transport as transport_module
from baton_kv_transfer.transports.ucx.connection import UCXConnection
from baton_kv_transfer.transports.ucx.data_messages import PIECE_BYTES, Pieces
from baton_kv_transfer.transports.ucx.library import UCXError
from support.kv_transfer.agent_processes import Side, counting, own_side
from support.kv_transfer.transport_rig import (
    HOST,
    WORDS,
    end,
    move_rows_of_all_sizes,
    open_and_close,
    rows,
)
from support.kv_transfer.ucx_rig import Raw, UCXTransportHere
from support.waiting import eventually

MIB_WORDS = 2**17


@pytest.fixture
def make(made: Callable[[Any], Any]) -> Callable[[str], UCXTransportHere]:
    def new(name: str) -> UCXTransportHere:
        transport = UCXTransportHere(name)
        made(transport.thread)
        return transport

    return new


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[UCXConnection]:
    """Return a list that gets every connection that a transport of this process opens."""
    opened: list[UCXConnection] = []

    class Recorded(UCXConnection):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            opened.append(self)

    monkeypatch.setattr(transport_module, "UCXConnection", Recorded)
    return opened


@pytest.fixture
def pair(make: Callable[[str], UCXTransportHere]) -> tuple[UCXTransportHere, UCXTransportHere]:
    """Return a transport that has added the owner as a peer, and the owner."""
    one, owner = make("one"), make("owner")
    one.transport.add_peer("owner", owner.transport.address)
    return one, owner


@pytest.fixture
def raw(made: Callable[[Any], Any], pair: tuple[UCXTransportHere, UCXTransportHere]) -> Raw:
    """A UCX worker that is connected to the owner."""
    return made(Raw(pair[1]))


def ignore_a_disconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the worker keep its UCX endpoint when the next connection is cut."""
    disconnect = ucx_worker.UCXWorker.disconnect

    def ignore(self: ucx_worker.UCXWorker, endpoint: Any, on_end: Callable[[str], None]) -> None:
        monkeypatch.setattr(ucx_worker.UCXWorker, "disconnect", disconnect)

    monkeypatch.setattr(ucx_worker.UCXWorker, "disconnect", ignore)


@pytest.fixture
def side() -> Iterator[Side]:
    yield from own_side("ucx")


# Bytes


def test_rows_of_equal_lengths_are_split_equally_into_pieces_of_at_most_512_kib() -> None:
    words = np.zeros(8 * MIB_WORDS, dtype=np.int64)
    runs = [
        (0, 3 * MIB_WORDS + 5),
        *[(3 * MIB_WORDS + 10 + 2 * i, 1) for i in range(3000)],
        (4 * MIB_WORDS, MIB_WORDS),
    ]
    pieces = Pieces(pack(rows(words, *runs)))
    sizes = [pieces[i].nbytes for i in range(len(pieces))]
    assert sum(sizes) == 8 * sum(count for _, count in runs)
    assert max(sizes) == PIECE_BYTES
    elsewhere = Pieces(pack(rows(np.zeros(8 * MIB_WORDS, dtype=np.int64), *runs)))
    assert [elsewhere[i].nbytes for i in range(len(elsewhere))] == sizes


@pytest.mark.parametrize("op", ["READ", "WRITE"])
def test_rows_of_all_sizes_are_moved_and_nothing_else(
    pair: tuple[UCXTransportHere, UCXTransportHere], op: str
) -> None:
    one, owner = pair
    nbytes = move_rows_of_all_sizes(one, owner, op)
    assert one.context.bytes_moved == owner.context.bytes_moved == {"tcp/lo": nbytes}


def test_messages_of_any_length_arrive_in_order(
    pair: tuple[UCXTransportHere, UCXTransportHere],
) -> None:
    one, owner = pair
    sent = [bytes([i]) * (10 if i % 2 else 300_000) for i in range(20)]
    for message in sent:
        one.transport.send_notif("owner", message)
    eventually(lambda: len(owner.notifs) == len(sent), "all messages")
    assert [message for _, message in owner.notifs] == sent


def test_a_threshold_of_the_environment_keeps_the_order_of_a_write_and_its_data(
    make: Callable[[str], UCXTransportHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A WRITE that UCX itself sends as a rendezvous may arrive after its data, so it awaits GO."""
    monkeypatch.setenv("UCX_RNDV_THRESH", "256")
    one, owner = make("one"), make("owner")
    one.transport.add_peer("owner", owner.transport.address)
    one.words[:] = -1
    for _ in range(20):
        owner.words[:] = 0
        everything = (0, MIB_WORDS)
        local, remote = rows(one.words, everything), rows(owner.words, everything)
        assert end(one.post("WRITE", "owner", local, remote, b"n" * 2000))[0] is XferState.DONE
        assert (owner.words[:MIB_WORDS] == -1).all()


def test_gpu_memory_is_moved_if_ucx_has_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test uses host memory, because UCX detects the type of memory."""
    monkeypatch.setattr(ucx_worker.UCXContext, "has_cuda", True)
    agent = create_agent("gpu", "ucx")
    words = np.arange(16, dtype=np.int64)
    agent.register_memory([(words.ctypes.data, words.nbytes, 3, "")], "VRAM")
    source, target = (
        agent.get_xfer_descs([(words.ctypes.data + offset, 64, 3)], "VRAM") for offset in (0, 64)
    )
    handle = agent.initialize_xfer("READ", target, source, "gpu")
    agent.transfer(handle)
    eventually(lambda: agent.check_xfer_state(handle) == "DONE", "the end")
    assert words[8:].tolist() == words[:8].tolist()
    agent.close()


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize(
    ("ours", "theirs", "transport"),
    [("DRAM", "DRAM", "shm"), ("VRAM", "DRAM", "ucx"), ("DRAM", "VRAM", "ucx")],
)
def test_gpu_memory_on_either_side_is_not_moved_by_shm(
    ours: str, theirs: str, transport: str, prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test uses host memory, because UCX detects the type of memory."""
    monkeypatch.setattr(ucx_worker.UCXContext, "has_cuda", True)
    both = {kind: LOADERS[kind]() for kind in ("shm", "ucx")}
    monkeypatch.setattr(transport_agent, "choose_transports", lambda kind: both)
    agent = create_agent("gpu", "auto")
    target, source = np.zeros(8, dtype=np.int64), np.arange(8, dtype=np.int64)
    for words, mem_type in ((target, ours), (source, theirs)):
        agent.register_memory([(words.ctypes.data, words.nbytes, 0, "")], mem_type)
    local, remote = (
        agent.get_xfer_descs([(words.ctypes.data, words.nbytes, 0)], mem_type)
        for words, mem_type in ((target, ours), (source, theirs))
    )
    if prepared:
        lists = agent.prep_xfer_dlist(INIT_AGENT, local), agent.prep_xfer_dlist("gpu", remote)
        handle = agent.make_prepped_xfer("READ", lists[0], [0], lists[1], [0])
    else:
        handle = agent.initialize_xfer("READ", local, remote, "gpu")
    agent.transfer(handle)
    eventually(lambda: agent.check_xfer_state(handle) == "DONE", "the end")
    assert target.tolist() == source.tolist()
    assert {lane.split()[0] for lane, nbytes in agent.bytes_moved.items() if nbytes} == {transport}
    agent.close()


def test_gpu_memory_is_refused_if_ucx_has_no_cuda() -> None:
    agent = create_agent("cpu", "ucx")
    with pytest.raises(ValueError, match="a UCX with CUDA"):
        agent.register_memory([(2**40, 4096, 0, "")], "VRAM")
    agent.close()


# Requests to the owner


def test_a_request_with_an_invalid_row_is_refused_and_leaves_no_receive(
    pair: tuple[UCXTransportHere, UCXTransportHere],
) -> None:
    one, owner = pair
    elsewhere = np.zeros(MIB_WORDS, dtype=np.int64)
    for op in ("READ", "WRITE"):
        remote = np.concatenate(
            [rows(owner.words, (0, MIB_WORDS)), rows(elsewhere, (0, MIB_WORDS))]
        )
        state, error = end(
            one.post(
                op, "owner", rows(one.words, (0, MIB_WORDS), (MIB_WORDS, MIB_WORDS)), remote, b"n"
            )
        )
        assert state is XferState.ERR
        assert "1 of 2 descriptors are outside the memory registered there" in error
    assert owner.context.num_refused == 2
    assert not elsewhere.any()
    assert not owner.notifs
    eventually(lambda: not one.num_held() and not owner.num_held(), "nothing is held")
    some = rows(one.words, (0, 8))
    assert end(one.post("READ", "owner", some, rows(owner.words, (8, 8))))[0] is XferState.DONE


@pytest.mark.parametrize("num_words", [8, 8000, MIB_WORDS])
def test_a_refused_write_of_any_length_ends_while_others_go_on(
    pair: tuple[UCXTransportHere, UCXTransportHere], num_words: int
) -> None:
    one, owner = pair
    elsewhere = np.zeros(num_words, dtype=np.int64)
    write = one.post(
        "WRITE", "owner", rows(one.words, (0, num_words)), rows(elsewhere, (0, num_words))
    )

    def ended() -> bool:
        some = one.post("READ", "owner", rows(one.words, (0, 8)), rows(owner.words, (8, 8)))
        assert end(some)[0] is XferState.DONE
        return write.state is not XferState.PROC

    eventually(ended, "the refusal", timeout_s=5)
    assert "outside the memory registered there" in end(write)[1]


@pytest.mark.parametrize(
    "hello", ["none", "wrong secret", "garbage", "invalid UTF-8", "deep", "no message"]
)
def test_a_peer_without_the_secret_is_ignored(
    connections: list[UCXConnection],
    pair: tuple[UCXTransportHere, UCXTransportHere],
    raw: Raw,
    hello: str,
) -> None:
    one, owner = pair
    if hello == "wrong secret":
        raw.send_message(messages.UCXHello(b"0" * 16, raw.session, "raw", raw.worker.address))
    elif hello == "garbage":
        raw.send(messages.CONTROL_TAG, b"\xc1" * 100_000)
    elif hello == "invalid UTF-8":
        no_text = messages.UCXHello(owner.address.secret, raw.session, "raw", raw.worker.address)
        raw.send(messages.CONTROL_TAG, messages.encode(no_text).replace(b"raw", b"\xff\xfe\xfd"))
    elif hello == "deep":
        raw.send(messages.CONTROL_TAG, b"\x91" * 60_000 + b"\xc0")
    elif hello == "no message":
        raw.send(messages.CONTROL_TAG + 1, b"x" * 1000)
    raw.send_message(messages.Write(raw.session, 7, pack(rows(owner.words, (0, 8))), b"n", True))
    raw.send_message(messages.Notif(raw.session, b"hello"))
    raw.wait("all was sent", lambda: len(raw.sent) >= 2)
    one.transport.send_notif("owner", b"me")
    eventually(lambda: owner.notifs, "a message of a real peer")
    assert owner.notifs == [("one", b"me")]
    assert raw.worker.address not in [connection.address for connection in connections]
    np.testing.assert_array_equal(owner.words, np.arange(WORDS))


def test_unexpected_data_is_discarded(
    pair: tuple[UCXTransportHere, UCXTransportHere], raw: Raw
) -> None:
    one, owner = pair
    for piece in range(50):
        raw.send(messages.data_tag(1, piece), b"x" * (PIECE_BYTES if piece % 2 else 100))
    raw.wait("all was taken", lambda: len(raw.sent) == 50)
    eventually(lambda: not owner.num_held(), "nothing is held")
    assert (
        end(one.post("READ", "owner", rows(one.words, (0, 8)), rows(owner.words, (8, 8))))[0]
        is XferState.DONE
    )


def test_data_that_arrives_while_an_earlier_message_is_handled_is_kept(
    pair: tuple[UCXTransportHere, UCXTransportHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, owner = pair

    class SlowConnection(UCXConnection):
        """Progresses UCX while HELLO is handled, as the close of an earlier connection does."""

        def __init__(self, ucx: ucx_worker.UCXWorker, address: bytes, *args: Any) -> None:
            super().__init__(ucx, address, *args)
            bit, info = messages.DATA_BIT, library.TagInfo()

            def has_data() -> bool:
                ucx._worker.progress()  # without the callbacks of requests
                probe = library.load().ucp_tag_probe_nb
                return bool(probe(ucx._handle, bit, bit, 0, c.byref(info)))

            if address == one.address.worker:
                eventually(has_data, "the data of the WRITE")

    monkeypatch.setattr(transport_module, "UCXConnection", SlowConnection)
    one.words[:8] = -1
    write = one.post("WRITE", "owner", rows(one.words, (0, 8)), rows(owner.words, (8, 8)))
    assert end(write) == (XferState.DONE, "")
    assert (owner.words[8:16] == -1).all()


def test_invalid_requests_are_refused_or_ignored(
    pair: tuple[UCXTransportHere, UCXTransportHere], raw: Raw
) -> None:
    owner = pair[1]
    raw.send_hello(owner)
    for iovec in (
        b"",
        b"x" * 15,
        pack(np.array([[8, -1, 0]])),
        pack(np.array([[2**62, 2**61, 0]])),
    ):
        raw.send_message(messages.Read(raw.session, 1, iovec))
    raw.wait("all were refused", lambda: len(raw.received) == 4)
    assert all(isinstance(answer, messages.UCXRefused) for answer in raw.received)
    for message in (
        messages.Go(raw.session, 1),
        messages.Done(raw.session, 1),
        messages.UCXRefused(raw.session, 1, "no"),
    ):
        raw.send_message(message)
    raw.send(
        messages.CONTROL_TAG,
        messages.encode(messages.Read(raw.session, -1, pack(rows(owner.words, (0, 8))))),
    )
    raw.send_message(messages.Notif(raw.session, b"still here"))
    raw.wait("the notification", lambda: owner.notifs == [("raw", b"still here")])


def test_a_piece_of_another_length_ends_the_connection(
    connections: list[UCXConnection], pair: tuple[UCXTransportHere, UCXTransportHere], raw: Raw
) -> None:
    owner = pair[1]
    raw.send_hello(owner)
    raw.send_message(messages.Write(raw.session, 5, pack(rows(owner.words, (0, 100))), b"n", True))
    raw.wait("the owner's receives", lambda: raw.received == [messages.Go(raw.session, 5)])
    raw.send(messages.data_tag(5, 0), b"x" * 400)
    raw.wait("the end of the connection", lambda: connections[0].error)
    assert not owner.notifs


# Ends


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


def test_workers_that_start_together_know_their_own_listening_sockets() -> None:
    start = threading.Barrier(2)
    contexts = [ucx_worker.UCXContext(HOST) for _ in range(2)]

    def create(context: ucx_worker.UCXContext) -> ucx_worker.UCXWorker:
        start.wait()
        return context.create_worker()

    with ThreadPoolExecutor(2) as pool:
        for _ in range(10):
            first, second = pool.map(create, contexts)
            first.destroy()
            assert second.is_listening
            second.destroy()
            assert not second.is_listening


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


def test_a_closed_transport_leaves_no_file_open() -> None:
    num_open = 0
    for attempt in range(4):
        open_and_close(UCXTransportHere)
        # UCX keeps some files open for the process.
        num_open = num_open or len(os.listdir("/proc/self/fd"))
        assert len(os.listdir("/proc/self/fd")) <= num_open, attempt


def test_ucx_listens_only_on_the_hosts_device() -> None:
    assert ucx_worker.find_devices("127.0.0.1").split(",")[0] == "lo"
    with pytest.raises(OSError, match=r"cannot be served at 203\.0\.113\.7"):
        create_agent("me", "ucx", "203.0.113.7")


def test_a_host_may_be_a_secondary_address_of_a_device() -> None:
    script = f"""ip link set lo up && ip addr add 198.18.0.2/32 dev lo && {sys.executable} -c '
from baton_kv_transfer.agent import transport_agent
from baton_kv_transfer.agent.agent import INIT_AGENT
from baton_kv_transfer.agent.agent_factory import create_agent
create_agent("me", "ucx", "198.18.0.2").close()
print("served")'"""
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", script], capture_output=True, text=True, timeout=60
    )
    if "Operation not permitted" in done.stderr:
        pytest.skip("needs the right to make a network namespace")
    assert done.stdout == "served\n", done.stderr
