"""The data that the UCX transport moves: rows, messages and GPU memory."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from baton_kv_transfer.agent import transport_agent
from baton_kv_transfer.agent.agent import INIT_AGENT
from baton_kv_transfer.agent.agent_factory import create_agent
from baton_kv_transfer.transports.transfer import XferState
from baton_kv_transfer.transports.transport_selection import LOADERS
from baton_kv_transfer.transports.ucx import library, messages, ucx_worker
from baton_kv_transfer.transports.ucx import ucx_transport as transport_module
from baton_kv_transfer.transports.ucx.connection import UCXConnection
from support.kv_transfer.transport_rig import end, move_rows_of_all_sizes, rows
from support.kv_transfer.ucx_rig import UCXTransportHere
from support.waiting import eventually

MIB_WORDS = 2**17


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
