"""The lane over TCP: rows of memory as streams, read from and stored into registered memory by its owner only.

    READ    a request to the owner, which checks every row against what it registered and sends their bytes
    WRITE   a request to the owner and the bytes; it checks the rows, stores, delivers the notification and answers

The side that asks connects, and everything about its requests goes over that connection (`lane_link`, `clients`). It sends the
secret that comes with the peer's metadata. Bytes go straight from and into the rows (`rows`), in frames that take turns
(`framed_socket`); what arrives for no transfer under way is thrown away.
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
from baton_kv_transfer.transports.lane_protocol import HELLO, NOTIF, READ, WRITE, encode_request
from baton_kv_transfer.transports.lane_thread import LaneThread
from baton_kv_transfer.transports.lanes import Lane
from baton_kv_transfer.transports.rows import Rows
from baton_kv_transfer.transports.tcp.clients import Address, Hello, TCPClients, set_options
from baton_kv_transfer.transports.transfer import Transfer


class TCPLane(Lane):
    def __init__(
        self,
        thread: LaneThread,
        name: str,
        host: str,
        deliver: Callable[[str, bytes], None],
        wakeup: Callable[[], None],
    ) -> None:
        """See Lane.

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

    @property
    def bytes_moved(self) -> dict[str, int]:
        return {"tcp sockets": self._clients.moved["data"]}

    def address(self) -> bytes:
        return self._clients.address

    def register(self, region: Region) -> None:
        self._thread.mailbox.call(lambda: self._clients.add_region(region))

    def deregister(self, region: Region) -> None:
        self._thread.mailbox.call(lambda: self._clients.forget_region(region))

    def add_peer(self, name: str, address: bytes) -> None:
        self.remove_peer(name)
        where = msgspec.msgpack.decode(address, type=Address)
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

    def begin(self, transfer: Transfer) -> bool:
        link = self._links.get(transfer.peer)
        if link is None:
            return False
        rows = Rows(pack(transfer.local))
        if transfer.op == "READ":
            link.post(READ, encode_request(b"", pack(transfer.remote)), transfer, incoming=rows)
        else:
            link.post(WRITE, encode_request(transfer.notif, pack(transfer.remote)), transfer, outgoing=rows)
        return True

    def send_notif(self, name: str, message: bytes) -> bool:
        link = self._links.get(name)
        if link is not None:
            link.post(NOTIF, message)
        return link is not None

    def fence(self) -> None:
        self._thread.mailbox.call(self._fence)

    # -- the lane's thread

    def _fence(self) -> None:
        self._give_up_all("this agent cut all its peers off")
        self._clients.cut_off()

    def end(self) -> None:
        self._give_up_all("the transport was closed")
        self._clients.close()

    def _give_up_all(self, reason: str) -> None:
        for name in list(self._links):
            link = self._links.pop(name, None)
            if link is not None:
                link.give_up(reason)

    def _connect(self, where: Address) -> FramedSocket:
        family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
        end = socket.socket(family, socket.SOCK_STREAM)
        try:
            set_options(end)
            link = FramedSocket(end, takes_data=True, moved=self._clients.moved)
            error = end.connect_ex((where.host, where.port))
            if error not in (0, errno.EINPROGRESS):
                raise OSError(error, os.strerror(error))
            link.send(HELLO, 0, msgspec.msgpack.encode(Hello(where.secret, self._name)))
        except OSError:
            end.close()
            raise
        return link
