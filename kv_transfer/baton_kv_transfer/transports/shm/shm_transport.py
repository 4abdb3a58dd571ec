"""Transfers between processes of one host.

Each side writes only to its own memory, and reads the memory of the other side (`cross_memory`).

    READ    this side copies from the peer's memory, without a request
    WRITE   a request to the peer. The peer checks that every descriptor is in the peer's registered
            memory, copies from the memory of this side, and answers.

Requests, replies and notifications are sent over a unix socket of the peer. The side that connects
sends the peer's nonce, which is in the peer's metadata. The kernel reports the process id of the
side that connects (SO_PEERCRED). Both sides must have the same boot id, pid namespace and network
namespace.
"""

from __future__ import annotations

import logging
import socket

import msgspec

from baton_kv_transfer.transports.iovec import pack
from baton_kv_transfer.transports.shm.cross_memory import BatchedCopy, PeerProcess, ProcessNonce
from baton_kv_transfer.transports.shm.shm_server import (
    SOCKET_PREFIX,
    HostAddress,
    SHMHello,
    SHMServer,
    encode_write,
    get_location,
)
from baton_kv_transfer.transports.sockets.framed_socket import FramedSocket
from baton_kv_transfer.transports.sockets.peer_link import HELLO, NOTIF, WRITE, PeerLink
from baton_kv_transfer.transports.sockets.socket_transport import SocketTransport
from baton_kv_transfer.transports.transfer import CopyError, Transfer
from baton_kv_transfer.transports.transport import TransportContext
from baton_kv_transfer.transports.transport_thread import CopyJob

logger = logging.getLogger(__name__)

#: The thread that starts a READ of up to this size copies the bytes itself, in some milliseconds.
#: No other thread has to wake up.
INLINE_BYTES = 16 * 2**20


class _SHMLink(PeerLink):
    """A link to a peer process whose memory this process may read.

    Sending the first message opens the connection.
    """

    def __init__(self, context: TransportContext, peer: str, address: HostAddress) -> None:
        """Check that this process may read the peer's memory. Do not connect yet.

        Raises:
            OSError: the peer process does not exist.
            OverflowError: the address is invalid.
            CopyError: this process may not read the peer's memory.
        """
        super().__init__(context, peer)
        self.process = PeerProcess(address.pid, address.nonce_address, address.nonce)
        self._address = address
        #: Nonce of this process for this peer. After the nonce is cleared, the peer can no longer
        #: read this process's memory.
        self._nonce = ProcessNonce()

    def connect(self) -> FramedSocket:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection = FramedSocket(end)
            end.connect(self._address.socket_name)
            hello = SHMHello(
                self._address.nonce, self._context.name, self._nonce.address, self._nonce.value
            )
            connection.send(HELLO, 0, msgspec.msgpack.encode(hello))
        except OSError:
            end.close()
            raise
        return connection

    def withdraw(self) -> None:
        self._nonce.clear()

    def abort(self, reason: str) -> None:
        self.withdraw()
        self.error = self.error or reason
        self._thread.unwatch(self.process.pidfd)
        self.process.close()
        for job in self._thread.take_jobs(self):
            job.finish(self.error)
        super().abort(reason)

    def on_lost(self, reason: str) -> None:
        self.abort(reason)

    def end_read(self, transfer: Transfer, copy: BatchedCopy, error: str) -> None:
        if not error:
            self._context.bytes_moved["process_vm_readv"] += copy.nbytes
            if transfer.notif:
                self.post(NOTIF, transfer.notif)
        transfer.end(error and f"READ of {self.peer}'s memory: {error}")
        self._context.wakeup()


class SHMTransport(SocketTransport[_SHMLink]):
    """The transport `shm`, between processes of one host."""

    _server: SHMServer

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._server = SHMServer(context)
        self._server.open()

    def add_peer(self, name: str, address: bytes) -> None:
        """Add the peer if this process can read the peer's memory.

        Otherwise the peer cannot be reached over this transport.

        Raises:
            ValueError: the address is not of a server of this transport.
        """
        self.remove_peer(name)
        try:
            decoded = msgspec.msgpack.decode(address, type=HostAddress)
            if (
                decoded.boot_id,
                decoded.pid_namespace,
                decoded.network_namespace,
            ) != get_location():
                return
            if not decoded.socket_name.startswith(SOCKET_PREFIX):
                raise ValueError(f"agent {name} names a socket that is not of this transport")
            link = _SHMLink(self._context, name, decoded)
        except (msgspec.DecodeError, OSError, OverflowError, RecursionError, CopyError) as error:
            logger.info("KV transfers with %s cannot use the transport shm: %s", name, error)
            return
        self._thread.commands.submit(
            lambda: self._thread.watch(link.process.pidfd, lambda: link.abort(f"{name} died"))
        )
        self._links[name] = link

    def begin(self, transfer: Transfer) -> bool:
        link = self._links.get(transfer.peer)
        if link is None:
            return False
        if transfer.op == "WRITE":
            link.post(
                WRITE,
                encode_write(transfer.notif, pack(transfer.local), pack(transfer.remote)),
                transfer,
            )
            return True
        copy = BatchedCopy(link.process, pack(transfer.local), pack(transfer.remote))
        if copy.nbytes > INLINE_BYTES or link.error or link.process.is_busy:
            self._thread.commands.submit(lambda: self._read(link, transfer, copy))
        else:
            link.end_read(transfer, copy, _copy_all(copy))
        return True

    def fence(self) -> None:
        self._cut_off("this agent cut all its peers off")
        self._server.open()

    def close(self) -> None:
        self._cut_off("the transport was closed")

    def _cut_off(self, reason: str) -> None:
        self._server.close()
        self.remove_all_peers(reason)
        while self._thread.jobs:
            self._thread.jobs.popleft().finish(reason)

    def _read(self, link: _SHMLink, transfer: Transfer, copy: BatchedCopy) -> None:
        if link.error:
            link.end_read(transfer, copy, link.error)
        else:
            self._thread.jobs.append(
                CopyJob(copy, lambda error: link.end_read(transfer, copy, error), link)
            )


def _copy_all(copy: BatchedCopy) -> str:
    try:
        while not copy.is_done:
            copy.step()
    except CopyError as error:
        return str(error)
    return ""
