"""The lane between processes of one host: each side writes to its own memory only, reading from the other's (`cross_memory`).

    READ    the reader copies, without the peer's help
    WRITE   a request to the peer, which checks every descriptor against what it registered, copies, and answers

Requests, answers and notifications go over a unix socket of the peer. The side that connects sends the cell of the peer, which
comes with its metadata; the kernel tells which process it is. Both sides must share boot, pid and network namespace. A small read
is done at once by its caller.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable

import msgspec

from baton_kv_transfer.transports.base import Region, TransportError
from baton_kv_transfer.transports.framed_socket import FramedSocket
from baton_kv_transfer.transports.iovec import pack
from baton_kv_transfer.transports.lane_link import Link
from baton_kv_transfer.transports.lane_protocol import HELLO, NOTIF, WRITE
from baton_kv_transfer.transports.lane_thread import Job, LaneThread
from baton_kv_transfer.transports.lanes import Lane
from baton_kv_transfer.transports.shm.clients import SHMClients
from baton_kv_transfer.transports.shm.cross_memory import BatchedCopy, Cell, CopyError, Process
from baton_kv_transfer.transports.shm.messages import Hello, HostAddress, encode_write, get_location
from baton_kv_transfer.transports.transfer import Transfer

logger = logging.getLogger(__name__)

INLINE_BYTES = 16 * 2**20
"""A read up to this size is done by its caller, in some milliseconds: no other thread has to wake up for it."""


class _Peer:
    """A process whose memory may be read, and to which requests go once the first was made."""

    link: Link

    def __init__(self, name: str, address: HostAddress, process: Process) -> None:
        self.name = name
        self.address = address
        self.process = process
        self.error = ""
        self.cell = Cell()
        """Shown to the peer: requests are void once it is cleared."""


class SHMLane(Lane):
    def __init__(
        self,
        thread: LaneThread,
        name: str,
        host: str,
        deliver: Callable[[str, bytes], None],
        wakeup: Callable[[], None],
    ) -> None:
        """See Lane; `host` is not used."""
        self._name = name
        self._wakeup = wakeup
        self._peers: dict[str, _Peer] = {}
        self._thread = thread
        self._clients = SHMClients(thread, deliver)
        self._clients.open()

    @property
    def num_refused(self) -> int:
        return self._clients.num_refused

    @property
    def bytes_moved(self) -> dict[str, int]:
        return {"shm process_vm_readv": self._clients.num_copied}

    def address(self) -> bytes:
        return self._clients.address

    def register(self, region: Region) -> None:
        self._thread.mailbox.call(lambda: self._clients.add_region(region))

    def deregister(self, region: Region) -> None:
        self._thread.mailbox.call(lambda: self._clients.forget_region(region))

    def add_peer(self, name: str, address: bytes) -> None:
        """One read of a few bytes of its memory tells whether the lane reaches it."""
        self.remove_peer(name)
        peer = self._reach(name, address)
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
        peer = self._peers.get(transfer.peer)
        if peer is None:
            return False
        if transfer.op == "WRITE":
            peer.link.post(WRITE, encode_write(transfer.notif, pack(transfer.local), pack(transfer.remote)), transfer)
            return True
        copy = BatchedCopy(peer.process, pack(transfer.local), pack(transfer.remote))
        if copy.nbytes > INLINE_BYTES or peer.error or peer.process.busy:
            self._thread.mailbox.submit(lambda: self._read(peer, transfer, copy))
        else:
            self._end_read(peer, transfer, copy, _copy_all(copy))
        return True

    def send_notif(self, name: str, message: bytes) -> bool:
        peer = self._peers.get(name)
        if peer is not None:
            peer.link.post(NOTIF, message)
        return peer is not None

    def fence(self) -> None:
        self._thread.mailbox.call(self._fence)

    # -- the lane's thread

    def end(self) -> None:
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

    def _reach(self, name: str, packed: bytes) -> _Peer | None:
        try:
            address = msgspec.msgpack.decode(packed, type=HostAddress)
            if (address.boot_id, address.pid_namespace, address.network_namespace) != get_location():
                return None
            return _Peer(name, address, Process(address.pid, address.cell_address, address.cell))
        except (msgspec.DecodeError, OSError, OverflowError, RecursionError, CopyError) as error:
            logger.info("no same-host lane to %s: %s", name, error)
            return None

    def _read(self, peer: _Peer, transfer: Transfer, copy: BatchedCopy) -> None:
        def finish(error: str) -> None:
            self._end_read(peer, transfer, copy, error)

        if peer.error:
            finish(peer.error)
        else:
            self._thread.jobs.append(Job(copy, finish, peer))

    def _end_read(self, peer: _Peer, transfer: Transfer, copy: BatchedCopy, error: str) -> None:
        self._clients.num_copied += 0 if error else copy.nbytes
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
