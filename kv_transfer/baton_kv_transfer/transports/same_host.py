"""The lane between processes of one host: each side writes to its own memory only, reading from the other's (`cross_memory`).

    READ    the reader copies, without the peer's help
    WRITE   a request to the peer, which checks every descriptor against what it registered, copies, and answers

Requests, answers and notifications go over a unix socket of the peer. Who connects says the cell of the peer, which comes with
its metadata; the kernel says which process it is. Both sides must share boot, pid and network namespace. One thread per lane
does all of it in turns of one batch (`lane_thread`), and what others ask for (`same_host_clients`); a small read is done at once by
its caller.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable

import msgspec
import numpy as np

from baton_kv_transfer.transports.base import Region, TransportError
from baton_kv_transfer.transports.cross_memory import BatchedCopy, Cell, CopyError, Process
from baton_kv_transfer.transports.framed_socket import FramedSocket
from baton_kv_transfer.transports.iovec import pack
from baton_kv_transfer.transports.lane_link import Link
from baton_kv_transfer.transports.lane_protocol import (
    HELLO,
    NOTIF,
    WRITE,
    Hello,
    LaneAddress,
    encode_write,
    get_location,
)
from baton_kv_transfer.transports.lane_thread import Job, LaneThread
from baton_kv_transfer.transports.same_host_clients import SameHostClients
from baton_kv_transfer.transports.transfer import Transfer

logger = logging.getLogger(__name__)

INLINE_BYTES = 16 * 2**20
"""A read up to this size is done by its caller, in some milliseconds: no other thread has to wake up for it."""


class _Peer:
    """A process whose memory may be read, and to which requests go once the first was made."""

    link: Link

    def __init__(self, name: str, address: LaneAddress, process: Process, regions: list[Region]) -> None:
        self.name = name
        self.device_regions = [index for index, region in enumerate(regions) if region.mem_type != "DRAM"]
        self.address = address
        self.process = process
        self.error = ""
        self.cell = Cell()
        """Shown to the peer: requests are void once it is cleared."""


class SameHostLane:
    """Methods may be called from any thread, save where noted."""

    def __init__(
        self, thread: LaneThread, name: str, deliver: Callable[[str, bytes], None], wakeup: Callable[[], None]
    ) -> None:
        """Before the thread starts.

        Args:
            deliver: called by the lane's thread with (sender, notification).
            wakeup: called after a transfer ended.
        """
        self._name = name
        self._wakeup = wakeup
        self._peers: dict[str, _Peer] = {}
        self._thread = thread
        self._clients = SameHostClients(thread, deliver)
        self._clients.open()

    @property
    def num_refused(self) -> int:
        return self._clients.num_refused

    def address(self) -> bytes:
        return self._clients.address

    def register(self, region: Region) -> None:
        """Peers may write to it from here on."""
        self._thread.mailbox.call(lambda: self._clients.add_region(region))

    def deregister(self, region: Region) -> None:
        """When this returns, no peer's write reaches it any more."""
        self._thread.mailbox.call(lambda: self._clients.forget_region(region))

    def add_peer(self, name: str, address: bytes, regions: list[Region]) -> None:
        """Makes a peer known if the lane reaches it. One read of a few bytes; no word to the peer."""
        self.remove_peer(name)
        peer = self._reach(name, address, regions)
        if peer is not None:
            peer.link = Link(
                self._thread,
                name,
                lambda: self._connect(peer),
                self._wakeup,
                lambda reason: self._give_up(peer, reason),
            )
            self._thread.mailbox.submit(
                lambda: self._thread.watch(peer.process.pidfd, lambda: self._give_up(peer, f"{name} died"))
            )
            self._peers[name] = peer

    def remove_peer(self, name: str) -> None:
        peer = self._peers.get(name)
        if peer is not None:
            peer.cell.clear()
            with contextlib.suppress(TransportError):  # closed: all peers are given up
                self._thread.mailbox.submit(lambda: self._give_up(peer, f"agent {name} was removed"))
                del self._peers[name]

    def begin(self, transfer: Transfer) -> bool:
        """False: not the lane's, the peer is not reached or its memory is none of the host's."""
        peer = self._peers.get(transfer.peer)
        if peer is None or (peer.device_regions and np.isin(transfer.regions, peer.device_regions).any()):
            return False
        if transfer.op == "WRITE":
            peer.link.post(WRITE, encode_write(transfer.notif, pack(transfer.local), pack(transfer.remote)), transfer)
            return True
        copy = BatchedCopy(peer.process, pack(transfer.local), pack(transfer.remote))
        if copy.nbytes > INLINE_BYTES or peer.error or peer.process.busy:
            self._thread.mailbox.submit(lambda: self._read(peer, transfer, copy))
        else:
            self._end_read(peer, transfer, _copy_all(copy))
        return True

    def send_notif(self, name: str, message: bytes) -> bool:
        """False: the peer is not reached."""
        peer = self._peers.get(name)
        if peer is not None:
            peer.link.post(NOTIF, message)
        return peer is not None

    def fence(self) -> None:
        """See Transport.fence."""
        self._thread.mailbox.call(self._fence)

    # -- the lane's thread

    def end(self) -> None:
        """When the thread does."""
        self._cut_off("the transport was closed")

    def _fence(self) -> None:
        self._cut_off("this agent cut all its peers off")
        self._clients.open()

    def _cut_off(self, reason: str) -> None:
        self._clients.close()
        for name in list(self._peers):
            peer = self._peers.pop(name, None)
            if peer is not None:
                peer.cell.clear()
                self._give_up(peer, reason)
        while self._thread.jobs:
            self._thread.jobs.popleft().finish(reason)

    # -- to peers

    def _reach(self, name: str, packed: bytes, regions: list[Region]) -> _Peer | None:
        if not packed:
            return None
        try:
            address = msgspec.msgpack.decode(packed, type=LaneAddress)
            if (address.boot_id, address.pid_namespace, address.network_namespace) != get_location():
                return None
            return _Peer(name, address, Process(address.pid, address.cell_address, address.cell), regions)
        except (msgspec.DecodeError, OSError, OverflowError, RecursionError, CopyError) as error:
            logger.info("no same-host lane to %s: %s", name, error)
            return None

    def _read(self, peer: _Peer, transfer: Transfer, copy: BatchedCopy) -> None:
        def finish(error: str) -> None:
            self._end_read(peer, transfer, error)

        if peer.error:
            finish(peer.error)
        else:
            self._thread.jobs.append(Job(copy, finish, peer))

    def _end_read(self, peer: _Peer, transfer: Transfer, error: str) -> None:
        if transfer.notif and not error:
            peer.link.post(NOTIF, transfer.notif)
        transfer.end(error and f"READ of {peer.name}'s memory: {error}")
        self._wakeup()

    def _connect(self, peer: _Peer) -> FramedSocket:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link = FramedSocket(end)
            end.connect(peer.address.socket_name)
            hello = Hello(peer.address.cell, self._name, peer.cell.address, peer.cell.value)
            link.send(HELLO, 0, msgspec.msgpack.encode(hello))
        except OSError:
            end.close()
            raise
        return link

    def _give_up(self, peer: _Peer, reason: str) -> None:
        """Ends all that is under way with a peer."""
        peer.cell.clear()
        peer.error = peer.error or reason
        self._thread.unwatch(peer.process.pidfd)
        peer.process.close()
        for job in self._thread.take_jobs(peer):
            job.finish(peer.error)
        peer.link.give_up(peer.error)


def _copy_all(copy: BatchedCopy) -> str:
    try:
        while not copy.done:
            copy.step()
    except CopyError as error:
        return str(error)
    return ""
