"""The lane over TCP: rows of memory as streams, read from and stored into registered memory by its owner only.

    READ    a request to the owner, which checks every row against what it registered and sends their bytes
    WRITE   a request to the owner and the bytes; it checks the rows, stores, delivers the notification and answers

Who asks connects, and all about what it asked for goes over that connection (`lane_link`, `tcp_clients`). It says the secret that
comes with the peer's metadata. Bytes go straight from and into the rows (`rows`), in frames that take turns (`framed_socket`); what
arrives for no transfer under way is thrown away. One thread per lane; small things are sent by their caller at once.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Callable

import msgspec

from baton_kv_transfer.transports.base import Region, TransportError
from baton_kv_transfer.transports.framed_socket import FramedSocket
from baton_kv_transfer.transports.iovec import pack
from baton_kv_transfer.transports.lane_link import Link
from baton_kv_transfer.transports.lane_protocol import HELLO, NOTIF, READ, WRITE, TCPAddress, TCPHello, encode_request
from baton_kv_transfer.transports.lane_thread import LaneThread
from baton_kv_transfer.transports.rows import Rows
from baton_kv_transfer.transports.tcp_clients import TCPClients, set_options
from baton_kv_transfer.transports.transfer import Transfer


class TCPLane:
    """Methods may be called from any thread, save where noted."""

    def __init__(
        self,
        thread: LaneThread,
        name: str,
        host: str,
        deliver: Callable[[str, bytes], None],
        wakeup: Callable[[], None],
    ) -> None:
        """Before the thread starts.

        Args:
            host: address to listen at, and to be reached at.
            deliver: called by the lane's thread with (sender, notification).
            wakeup: called after a transfer ended.

        Raises:
            OSError: `host` is no address of this machine.
        """
        self._name = name
        self._wakeup = wakeup
        self._links: dict[str, Link] = {}
        self._thread = thread
        self._clients = TCPClients(thread, host, deliver)

    @property
    def num_refused(self) -> int:
        return self._clients.num_refused

    def address(self) -> bytes:
        return self._clients.address

    def register(self, region: Region) -> None:
        """Peers may read and write it from here on."""
        self._thread.mailbox.call(lambda: self._clients.add_region(region))

    def deregister(self, region: Region) -> None:
        """When this returns, nothing of a peer reaches it any more."""
        self._thread.mailbox.call(lambda: self._clients.forget_region(region))

    def add_peer(self, name: str, address: bytes) -> None:
        """Raises ValueError: not an address."""
        self.remove_peer(name)
        where = msgspec.msgpack.decode(address, type=TCPAddress)
        ipaddress.ip_address(where.host)  # a name would have to be looked up, which takes its time
        if not 0 < where.port < 2**16:
            raise ValueError(f"agent {name} says that it listens at port {where.port}")
        self._links[name] = Link(self._thread, name, lambda: self._connect(where), self._wakeup)

    def remove_peer(self, name: str) -> None:
        link = self._links.get(name)
        if link is not None:
            with contextlib.suppress(TransportError):  # closed: all are given up
                self._thread.mailbox.submit(lambda: link.give_up(f"agent {name} was removed"))
                del self._links[name]

    def begin(self, transfer: Transfer) -> None:
        link = self._links.get(transfer.peer)
        if link is None:
            transfer.end(f"agent {transfer.peer} is not known: add_remote_agent first")
            self._wakeup()
        elif transfer.op == "READ":
            request = encode_request(b"", pack(transfer.remote))
            link.post(READ, request, transfer, incoming=Rows(pack(transfer.local)))
        else:
            request = encode_request(transfer.notif, pack(transfer.remote))
            link.post(WRITE, request, transfer, outgoing=Rows(pack(transfer.local)))

    def send_notif(self, name: str, message: bytes) -> None:
        """Raises TransportError: no such peer."""
        link = self._links.get(name)
        if link is None:
            raise TransportError(f"agent {name} is not known: add_remote_agent first")
        link.post(NOTIF, message)

    def fence(self) -> None:
        """See Transport.fence."""
        self._thread.mailbox.call(self._fence)

    # -- the lane's thread

    def _fence(self) -> None:
        self._give_up_all("this agent cut all its peers off")
        self._clients.cut_off()

    def end(self) -> None:
        """When the thread does."""
        self._give_up_all("the transport was closed")
        self._clients.close()

    def _give_up_all(self, reason: str) -> None:
        for name in list(self._links):
            link = self._links.pop(name, None)
            if link is not None:
                link.give_up(reason)

    def _connect(self, where: TCPAddress) -> FramedSocket:
        family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
        end = socket.socket(family, socket.SOCK_STREAM)
        try:
            set_options(end)
            link = FramedSocket(end, takes_data=True)
            error = end.connect_ex((where.host, where.port))
            if error not in (0, errno.EINPROGRESS):
                raise OSError(error, os.strerror(error))
            link.send(HELLO, 0, msgspec.msgpack.encode(TCPHello(where.secret, self._name)))
        except OSError:
            end.close()
            raise
        return link
