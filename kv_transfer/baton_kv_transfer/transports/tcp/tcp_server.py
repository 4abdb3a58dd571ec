"""The server of the transport `tcp`: checks and serves the READ and WRITE requests of peers."""

from __future__ import annotations

import hmac
import os
import socket
from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton_kv_transfer.transports.iovec import count_outside
from baton_kv_transfer.transports.sockets.framed_socket import DATA, FramedSocket
from baton_kv_transfer.transports.sockets.peer_link import NOTIF, READ, WRITE, decode_request
from baton_kv_transfer.transports.sockets.peer_server import (
    MAX_HELLO_BYTES,
    MAX_UNAUTHENTICATED,
    PeerClient,
    PeerServer,
)
from baton_kv_transfer.transports.sockets.row_io import Rows
from baton_kv_transfer.transports.transfer import Region
from baton_kv_transfer.transports.transport import TransportContext


class Address(msgspec.Struct, array_like=True, frozen=True):
    """Address and secret with which a peer can connect."""

    host: str
    port: int
    secret: bytes


class TCPHello(msgspec.Struct, array_like=True):
    """First message on a connection, from the side that connects."""

    #: The receiver's secret. Only a sender with the receiver's metadata has it.
    secret: bytes
    name: str


#: A connection is lost if the peer's host acknowledges nothing for this time, in seconds.
SILENT_S = 10
_PROBE_S = 2
_SECRET_BYTES = 16


def set_options(end: socket.socket) -> None:
    """Set TCP options: send small messages at once, and fail after SILENT_S seconds of silence.

    Both ends of a connection call this.
    """
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, 1)  # connecting fails after 3 s
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_S // _PROBE_S - 1)


@dataclass(eq=False)
class _Client(PeerClient):
    #: Notifications of WRITE transfers whose data is still arriving, by transfer number.
    notifs: dict[int, bytes] = field(default_factory=dict)


class TCPServer(PeerServer[_Client]):
    """The server of the transport `tcp`, for READ and WRITE requests of peers."""

    def __init__(self, context: TransportContext) -> None:
        """Listen on a free port.

        Raises:
            OSError: `context.host` is not an address of this machine.
        """
        super().__init__(context)
        host = context.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.bind((host, 0))
            self._listener.setblocking(False)
            self._listener.listen(MAX_UNAUTHENTICATED)
        except OSError as error:
            self._listener.close()
            raise OSError(
                error.errno, f"KV transfers cannot be served at {host}: {error.strerror}"
            ) from error
        self._here: tuple[str, int] = self._listener.getsockname()[:2]
        self._listen(self._listener)
        self._draw_secret()

    def forget_region(self, region: Region) -> None:
        for client in list(self._clients):
            for number, rows in client.connection.transfers.items():
                if not count_outside(rows.iovec, self._context.regions):
                    continue
                if client.connection.is_sending_last_frame(number):
                    # The client would mistake the zeros that complete the frame for data.
                    self._drop(client, "memory that it was reading was deregistered")
                    break
                client.connection.stop(number)
                client.notifs.pop(number, None)
                self._answer(client, number, "the memory was deregistered")

    def cut_off(self) -> None:
        """Disconnect all clients and draw a new secret, which makes earlier metadata invalid."""
        self.disconnect_all()
        self._draw_secret()

    def _draw_secret(self) -> None:
        self._secret = os.urandom(_SECRET_BYTES)
        host, port = self._here
        self.address = msgspec.msgpack.encode(Address(host, port, self._secret))

    def _make_client(self, end: socket.socket, where: Any) -> _Client:
        set_options(end)
        connection = FramedSocket(end, MAX_HELLO_BYTES, bytes_moved=self._context.bytes_moved)
        return _Client(connection, f"{where[0]}:{where[1]}")

    def _handle_message(self, client: _Client, kind: int, number: int, payload: bytes) -> None:
        if kind == DATA:  # all rows of a write have arrived
            if notif := client.notifs.pop(number):
                self._context.deliver(client.name, notif)
            self._answer(client, number, "")
        elif kind == NOTIF:
            self._context.deliver(client.name, payload)
        elif kind in (READ, WRITE) and number not in client.connection.transfers:
            self._begin(client, kind, number, payload)
        else:
            raise ConnectionError(f"message {number} of kind {kind} is invalid here")

    def _check_hello(self, client: _Client, payload: bytes) -> str:
        hello = msgspec.msgpack.decode(payload, type=TCPHello)
        if not hello.name or not hmac.compare_digest(hello.secret, self._secret):
            raise ConnectionError("it does not have this agent's metadata")
        client.connection.takes_data = True
        return hello.name

    def _begin(self, client: _Client, kind: int, number: int, request: bytes) -> None:
        notif, iovec = decode_request(request)
        unfinished = client.connection.transfers.values()
        self._check_unfinished([rows.iovec for rows in unfinished], request)
        if refusal := self._context.refuse(iovec):
            self._answer(client, number, refusal)
        elif kind == READ:
            client.connection.send_rows(number, Rows(iovec))
        else:
            client.notifs[number] = notif
            client.connection.expect(number, Rows(iovec))
