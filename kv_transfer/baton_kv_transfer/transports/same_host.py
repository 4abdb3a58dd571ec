"""The lane between processes of one host: each side writes to its own memory only, reading from the other's (`cross_memory`).

    READ    the reader copies, without the peer's help
    WRITE   a request to the peer, which checks every descriptor against what it registered, copies, and answers

Requests, answers and notifications go over a unix socket of the peer. Who connects says the cell of the peer, which comes with
its metadata; the kernel says which process it is. Both sides must share boot, pid and network namespace. One thread per lane
does all of it in turns of one batch (`lane_thread`), and what others ask for (`lane_clients`); a small read is done at once by
its caller.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.transports.base import Descriptors, Operation, Region, TransportError, XferState
from baton_kv_transfer.transports.cross_memory import BatchedCopy, Cell, CopyError, Process
from baton_kv_transfer.transports.framed_socket import MAX_PAYLOAD_BYTES, FramedSocket
from baton_kv_transfer.transports.lane_clients import LaneClients
from baton_kv_transfer.transports.lane_protocol import (
    ANSWER,
    HELLO,
    NOTIF,
    WRITE,
    Hello,
    LaneAddress,
    encode_write,
    get_location,
)
from baton_kv_transfer.transports.lane_thread import Job, LaneThread

logger = logging.getLogger(__name__)

INLINE_BYTES = 16 * 2**20
"""A read up to this size is done by its caller, in some milliseconds: no other thread has to wake up for it."""


class LaneOperation(Operation):
    def __init__(self, notif: bytes) -> None:
        self.notif = notif
        self._state = XferState.PROC

    @property
    def state(self) -> XferState:
        return self._state

    def end(self, error: str = "") -> None:
        if self._state is XferState.PROC:
            self.error = error
            self._state = XferState.ERR if error else XferState.DONE


class _Peer:
    """A process whose memory may be read, and to which requests go once the first was made."""

    def __init__(self, name: str, address: LaneAddress, process: Process, regions: list[Region]) -> None:
        self.name = name
        self.device_regions = [index for index, region in enumerate(regions) if region.mem_type != "DRAM"]
        self.address = address
        self.process = process
        self.error = ""
        self.link: FramedSocket | None = None
        self.cell = Cell()
        """Shown to the peer: requests are void once it is cleared."""
        self.lock = threading.RLock()  # of the link, and of what follows
        self.writes: dict[int, LaneOperation] = {}
        self.next_number = 0
        self.num_queued = 0
        """Frames that the thread is to send: later ones follow them."""


class SameHostLane:
    """Methods may be called from any thread, save where noted."""

    def __init__(self, name: str, deliver: Callable[[str, bytes], None], wakeup: Callable[[], None]) -> None:
        """
        Args:
            deliver: called by the lane's thread with (sender, notification).
            wakeup: called after an operation ended.
        """
        self._name = name
        self._wakeup = wakeup
        self._peers: dict[str, _Peer] = {}
        self._thread = LaneThread(name)
        self._clients = LaneClients(self._thread, deliver)
        self._clients.open()
        self._thread.start(lambda: self._cut_off("the transport was closed"))

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
            self._thread.mailbox.submit(
                lambda: self._thread.watch(peer.process.pidfd, lambda: self._give_up(peer, f"{name} died"))
            )
            self._peers[name] = peer

    def remove_peer(self, name: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is not None:
            peer.cell.clear()
            self._tell(lambda: self._give_up(peer, f"agent {name} was removed"))

    def post(
        self, op: str, name: str, local: Descriptors, remote: Descriptors, regions: NDArray[np.int64], notif: bytes
    ) -> Operation | None:
        """As Transport.post; None: not the lane's, the peer is not reached or its memory is none of the host's."""
        peer = self._peers.get(name)
        if peer is None or (peer.device_regions and np.isin(regions, peer.device_regions).any()):
            return None
        operation = LaneOperation(notif)
        if op == "WRITE":
            self._post_frame(peer, WRITE, encode_write(notif, local, remote), operation)
            return operation
        copy = BatchedCopy(peer.process, local, remote)
        if copy.nbytes > INLINE_BYTES or peer.error or peer.process.busy:
            self._thread.mailbox.submit(lambda: self._read(peer, operation, copy))
            return operation
        error = _copy_all(copy)
        if notif and not error:
            self._post_frame(peer, NOTIF, notif)
        operation.end(error and f"read from {name}: {error}")
        self._wakeup()
        return operation

    def send_notif(self, name: str, message: bytes) -> bool:
        """False: the peer is not reached."""
        peer = self._peers.get(name)
        if peer is not None:
            self._post_frame(peer, NOTIF, message)
        return peer is not None

    def fence(self) -> None:
        """See Transport.fence."""
        self._thread.mailbox.call(self._fence)

    def close(self) -> None:
        self._thread.close()

    # -- the lane's thread

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

    def _tell(self, command: Callable[[], None]) -> None:
        with contextlib.suppress(TransportError):  # closed: all peers are given up
            self._thread.mailbox.submit(command)

    # -- to peers

    def _reach(self, name: str, packed: bytes, regions: list[Region]) -> _Peer | None:
        if not packed:
            return None
        try:
            address = msgspec.msgpack.decode(packed, type=LaneAddress)
            if (address.boot_id, address.pid_namespace, address.network_namespace) != get_location():
                return None
            return _Peer(name, address, Process(address.pid, address.cell_address, address.cell), regions)
        except (msgspec.DecodeError, OSError, OverflowError, CopyError) as error:
            logger.info("no same-host lane to %s: %s", name, error)
            return None

    def _read(self, peer: _Peer, operation: LaneOperation, copy: BatchedCopy) -> None:
        def finish(error: str) -> None:
            if not error and operation.notif:
                self._post_frame(peer, NOTIF, operation.notif)
            operation.end(error and f"read from {peer.name}: {error}")
            self._wakeup()

        if peer.error:
            finish(peer.error)
        else:
            self._thread.jobs.append(Job(copy, finish, peer))

    def _post_frame(self, peer: _Peer, kind: int, payload: bytes, operation: LaneOperation | None = None) -> None:
        """From any thread: sent at once if nothing stands in the way, else by the thread."""
        with peer.lock:
            if peer.link is not None and not peer.num_queued and not peer.link.has_outgoing:
                self._send(peer, kind, payload, operation)
                return
            peer.num_queued += 1

        def send() -> None:
            with peer.lock:
                peer.num_queued -= 1
                self._send(peer, kind, payload, operation)
                if peer.link is not None:
                    self._watch_peer(peer)

        self._thread.mailbox.submit(send)

    def _send(self, peer: _Peer, kind: int, payload: bytes, operation: LaneOperation | None = None) -> str:
        """The error, or ""; connects with the first frame. `operation` ends with its answer. With the peer's lock."""
        error = peer.error
        if len(payload) > MAX_PAYLOAD_BYTES:
            error = f"{len(payload)} bytes are more than a frame's {MAX_PAYLOAD_BYTES}: make several smaller transfers"
        if not error:
            peer.next_number += 1
            if operation is not None:
                peer.writes[peer.next_number] = operation
            try:
                self._connect(peer).send(kind, peer.next_number, payload)
            except OSError as failure:  # ends all that was written
                peer.error = f"connection to {peer.name} lost: {failure}"
                self._tell(lambda: self._give_up(peer, peer.error))
                error = peer.error
            else:
                if peer.link is not None and peer.link.has_outgoing:
                    self._tell(lambda: self._watch_peer(peer))
        elif operation is not None:
            operation.end(error)
            self._wakeup()
        if error and kind == NOTIF:
            logger.warning("notification to %s was lost: %s", peer.name, error)
        return error

    def _connect(self, peer: _Peer) -> FramedSocket:
        if peer.link is None:
            end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            peer.link = FramedSocket(end)
            end.connect(peer.address.socket_name)
            hello = Hello(peer.address.cell, self._name, peer.cell.address, peer.cell.value)
            peer.link.send(HELLO, 0, msgspec.msgpack.encode(hello))
        return peer.link

    def _watch_peer(self, peer: _Peer) -> None:
        if peer.link is not None:
            self._thread.watch(peer.link.fileno(), lambda: self._serve_peer(peer), peer.link.has_outgoing)

    def _serve_peer(self, peer: _Peer) -> None:
        assert peer.link is not None
        try:
            with peer.lock:
                peer.link.flush()
                answers = [frame for frame in peer.link.receive() if frame[0] == ANSWER]
                ended = [(peer.writes.pop(number, None), payload) for _, number, payload in answers]
            for operation, payload in ended:
                if operation is not None:
                    error = payload.decode(errors="replace")
                    operation.end(error and f"write to {peer.name}: {error}")
                    self._wakeup()
            self._watch_peer(peer)
        except OSError as error:
            self._give_up(peer, f"connection to {peer.name} lost: {error}")

    def _give_up(self, peer: _Peer, reason: str) -> None:
        """Ends all that is under way with a peer."""
        peer.cell.clear()
        with peer.lock:
            peer.error = peer.error or reason
            writes, peer.writes = peer.writes, {}
            if peer.link is not None:
                self._thread.unwatch(peer.link.fileno())
                peer.link.close()
        self._thread.unwatch(peer.process.pidfd)
        peer.process.close()
        for job in self._thread.take_jobs(peer):
            job.finish(peer.error)
        for operation in writes.values():
            operation.end(peer.error)
        self._wakeup()


def _copy_all(copy: BatchedCopy) -> str:
    try:
        while not copy.done:
            copy.step()
    except CopyError as error:
        return str(error)
    return ""
