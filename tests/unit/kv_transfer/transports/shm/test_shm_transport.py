"""The shared-memory transport: copies, trust between processes, and lost peers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from baton_kv_transfer.transports.transfer import XferState
from support.kv_transfer.agent_processes import (
    NUM_BLOCKS,
    OwnerProcess,
    Side,
    counting,
    own_side,
)
from support.kv_transfer.shm_rig import WORDS, SHMTransportHere
from support.kv_transfer.transport_rig import end, rows
from support.waiting import eventually


@pytest.fixture
def side() -> Iterator[Side]:
    yield from own_side("shm")


def test_the_transport_is_chosen_for_processes_of_this_host_that_prove_their_nonce(
    transports: Callable[[str], SHMTransportHere],
) -> None:
    one, other = transports("one"), transports("other")
    address = other.address
    assert one.knows(address)
    eventually(lambda: other.notifs == [("one", b"hello")], "the notification")
    replace = msgspec.structs.replace
    for wrong in (
        replace(address, boot_id="another boot"),
        replace(address, pid_namespace=address.pid_namespace + 1),
        replace(address, network_namespace=address.network_namespace + 1),
        replace(address, pid=2**22 + 1),
        replace(address, pid=-1),
        replace(address, nonce=b"0" * 16),
        replace(address, nonce=b""),
        replace(address, nonce_address=8),
        replace(address, nonce_address=2**64 - 1),
    ):
        assert not one.knows(wrong), wrong
    with pytest.raises(ValueError, match="not of this transport"):
        one.knows(replace(address, socket_name=b"/run/other.sock"))
    one.transport.add_peer("x", b"no address")
    assert not one.transport.send_notif("x", b"hello")


def test_a_frozen_peer_can_be_read_and_writes_to_it_time_out(side: Side) -> None:
    with side.owner.frozen():
        assert side.run(side.make("READ", [0], [1])) == "DONE"
        np.testing.assert_array_equal(side.block(0), counting(1))
        write = side.make("WRITE", [0], [2])
        side.agent.transfer(write)
        assert side.agent.check_xfer_state(write) == "PROC"
        side.agent.remove_remote_agent("owner")
        assert side.end(write) == "ERR"
        assert "removed" in write.error
    side.meet(side.owner)
    assert side.run(side.make("WRITE", [0], [3])) == "DONE"  # earlier requests have been processed
    content = side.owner.call("content").reshape(NUM_BLOCKS, -1)
    np.testing.assert_array_equal(content[2], counting(2))
    np.testing.assert_array_equal(content[3], counting(1))


def test_a_peer_killed_while_frozen_ends_its_transfers(side: Side) -> None:
    assert side.owner.process.pid is not None
    assert side.run(side.make("WRITE", [0], [0])) == "DONE"
    with side.owner.frozen():
        write = side.make("WRITE", [0], [1])
        side.agent.transfer(write)
        os.kill(side.owner.process.pid, signal.SIGKILL)
        assert side.end(write) == "ERR"
    assert side.run(side.make("READ", [0], [0])) == "ERR"
    side.meet(OwnerProcess("shm"))
    assert side.run(side.make("READ", [0], [4])) == "DONE"
    np.testing.assert_array_equal(side.block(0), counting(4))


def test_after_a_fence_earlier_writes_are_not_executed(
    transports: Callable[[str], SHMTransportHere],
) -> None:
    writer, owner = transports("writer"), transports("owner")
    writer.transport.add_peer("owner", owner.transport.address)
    local, remote = (
        rows(writer.words, *[(0, 1)] * WORDS),
        rows(owner.words, *[(i, 1) for i in range(WORDS)]),
    )
    writes = [writer.post("WRITE", "owner", local, remote) for _ in range(50)]
    owner.thread.commands.call(owner.transport.fence)
    owner.words[:] = -5
    for write in writes:
        end(write)
    assert end(writes[-1])[0] is XferState.ERR
    read = writer.post("READ", "owner", local[:1], remote[:1])
    assert end(read)[0] is XferState.ERR
    assert (owner.words == -5).all()
    writer.transport.add_peer("owner", owner.transport.address)
    assert end(writer.post("WRITE", "owner", local, remote))[0] is XferState.DONE
    assert (owner.words == 0).all()


def test_a_closed_transport_leaves_no_file_open(
    transports: Callable[[str], SHMTransportHere],
) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        one, other = SHMTransportHere("one"), SHMTransportHere("other")
        assert one.knows(other.address)
        eventually(lambda other=other: other.notifs, "the notification")
        other.thread.commands.call(other.transport.fence)
        one.thread.close()
        other.thread.close()
    assert len(os.listdir("/proc/self/fd")) == num_open
