"""Transfers over TCP. Only the owner of registered memory reads and writes that memory.

    READ    a request to the owner. The owner checks that every row is in its registered memory, and
            sends the bytes.
    WRITE   a request to the owner, followed by the bytes. The owner checks the rows, stores the
            bytes, delivers the notification and answers.

The requesting side connects to the owner, and first sends the secret from the owner's metadata
(`peer_link`, `tcp_server`). Bytes move directly between rows and socket (`row_io`). The data of a
transfer is sent in frames, and the frames of several transfers take turns (`framed_socket`). A side
discards data of a transfer that is not running.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

import msgspec

from baton_kv_transfer.transports.iovec import pack
from baton_kv_transfer.transports.sockets.framed_socket import FramedSocket
from baton_kv_transfer.transports.sockets.peer_link import (
    HELLO,
    READ,
    WRITE,
    PeerLink,
    encode_request,
)
from baton_kv_transfer.transports.sockets.row_io import Rows
from baton_kv_transfer.transports.sockets.socket_transport import SocketTransport
from baton_kv_transfer.transports.tcp.tcp_server import Address, TCPHello, TCPServer, set_options
from baton_kv_transfer.transports.transfer import Transfer
from baton_kv_transfer.transports.transport import TransportContext


class _TCPLink(PeerLink):
    def __init__(self, context: TransportContext, peer: str, where: Address) -> None:
        super().__init__(context, peer)
        self._where = where

    def connect(self) -> FramedSocket:
        where = self._where
        family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
        end = socket.socket(family, socket.SOCK_STREAM)
        try:
            set_options(end)
            connection = FramedSocket(end, takes_data=True, bytes_moved=self._context.bytes_moved)
            error = end.connect_ex((where.host, where.port))
            if error not in (0, errno.EINPROGRESS):
                raise OSError(error, os.strerror(error))
            connection.send(
                HELLO, 0, msgspec.msgpack.encode(TCPHello(where.secret, self._context.name))
            )
        except OSError:
            end.close()
            raise
        return connection


class TCPTransport(SocketTransport[_TCPLink]):
    """The transport `tcp`, over TCP connections."""

    _server: TCPServer

    def __init__(self, context: TransportContext) -> None:
        """Create the server, which listens for peers.

        Raises:
            OSError: `context.host` is not an address of this machine.
        """
        super().__init__(context)
        self._server = TCPServer(context)

    def add_peer(self, name: str, address: bytes) -> None:
        self.remove_peer(name)
        where = msgspec.msgpack.decode(address, type=Address)
        ipaddress.ip_address(where.host)  # refuses names, whose lookup would take time
        if not 0 < where.port < 2**16:
            raise ValueError(f"agent {name} names the invalid port {where.port}")
        self._links[name] = _TCPLink(self._context, name, where)

    def begin(self, transfer: Transfer) -> bool:
        link = self._links.get(transfer.peer)
        if link is None:
            return False
        rows = Rows(pack(transfer.local))
        if transfer.op == "READ":
            link.post(READ, encode_request(b"", pack(transfer.remote)), transfer, incoming=rows)
        else:
            link.post(
                WRITE,
                encode_request(transfer.notif, pack(transfer.remote)),
                transfer,
                outgoing=rows,
            )
        return True

    def fence(self) -> None:
        self.remove_all_peers("this agent cut all its peers off")
        self._server.cut_off()

    def close(self) -> None:
        self.remove_all_peers("the transport was closed")
        self._server.close()
