"""The store in which ranks meet: keys and values, held by a thread of the process that opens it. Needs no torch.

It tells a client that waits for keys when the last of them comes. Deadlines are the clients': who gives up closes its connection.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time

import msgspec

from baton_engine.distributed.store_wire import (
    RECEIVE_BYTES,
    Add,
    Answer,
    Append,
    Check,
    CompareSet,
    CountKeys,
    Delete,
    Get,
    Request,
    Set,
    StoreAddress,
    frame,
    listen,
    prepare,
    take_payload,
)
from baton_engine.protocol.config import pod_ip

logger = logging.getLogger(__name__)

ACCEPT_PAUSE_S = 0.1


def open_store(host: str | None = None, *, port: int = 0) -> StoreServer:
    """Starts a store.

    Args:
        host: the one address to listen on; None: the pod's.
        port: 0: any free one.

    Raises:
        OSError: the address is not free, or none of this host's.
    """
    return StoreServer(host or pod_ip(), port)


class StoreServer:
    """Lives, with its keys, until it is closed. Its clients' calls fail at once then."""

    def __init__(self, host: str, port: int) -> None:
        self._listener = listen(host, port)
        self._listener.setblocking(False)
        self.address = StoreAddress(*self._listener.getsockname()[:2])
        self._closing, self._close = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._closing, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._clients: set[_Client] = set()
        self._values: dict[str, bytes] = {}
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        self._close.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                for key, events in self._selector.select():
                    if key.fileobj is self._closing:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data in self._clients:  # else it was dropped for what another one did
                        self._attend(key.data, events)
        finally:
            for client in self._clients:
                client.socket.close()
            for own in (self._listener, self._closing, self._selector):
                own.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            prepare(connection)
        except OSError as error:
            logger.warning("a store cannot take a connection: %s", error)
            time.sleep(ACCEPT_PAUSE_S)  # without a descriptor for it, it stays there to be taken
            return
        client = _Client(connection)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _attend(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                client.flush()
            if events & selectors.EVENT_READ:
                for request in client.receive():
                    self._serve(client, request)
            self._watch(client)
        except Exception as error:  # whatever it is, it comes of this client's bytes, and the others must go on
            self._drop(client, error)

    def _serve(self, client: _Client, request: Request) -> None:
        if client.waits_for is not None:
            raise ValueError("it asks before it is answered")
        if isinstance(request, Get):
            client.waits_for = request.keys
            self._answer_if_there(client)
            return
        try:
            answer = self._apply(request)
        except ValueError as error:
            answer = Answer(error=str(error))
        client.send(answer)
        if isinstance(request, Set | Add | Append | CompareSet):
            for other in [other for other in self._clients if other.waits_for is not None]:
                try:
                    self._answer_if_there(other)
                    self._watch(other)
                except (OSError, ValueError) as error:
                    self._drop(other, error)

    def _apply(self, request: Request) -> Answer:
        values = self._values
        match request:
            case Set():
                values.update(request.values)
            case Add(key, amount):
                total = int(values.get(key, b"0")) + amount
                values[key] = str(total).encode()
                return Answer(number=total)
            case Append(key, value):
                values[key] = values.get(key, b"") + value
            case CompareSet(key, expected, desired):
                if values.get(key, b"") == expected:
                    values[key] = desired
                return Answer([values.get(key, expected)])
            case Check(keys):
                return Answer(number=int(self._has(keys)))
            case Delete(key):
                return Answer(number=int(values.pop(key, None) is not None))
            case CountKeys():
                return Answer(number=len(values))
        return Answer()

    def _answer_if_there(self, client: _Client) -> None:
        assert client.waits_for is not None
        if self._has(client.waits_for):
            answer = Answer([self._values[key] for key in client.waits_for])
            client.waits_for = None
            client.send(answer)

    def _has(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def _watch(self, client: _Client) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.outgoing else 0)
        if self._selector.get_key(client.socket).events != events:
            self._selector.modify(client.socket, events, client)

    def _drop(self, client: _Client, error: Exception) -> None:
        if not isinstance(error, EOFError | ConnectionError):
            logger.warning("a store dropped a client: %s", error)
        self._clients.discard(client)
        self._selector.unregister(client.socket)
        client.socket.close()


class _Client:
    """A connection: one thread of a client at a time uses it."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.waits_for: list[str] | None = None
        self.outgoing = bytearray()
        self._incoming = bytearray()
        self._decoder = msgspec.msgpack.Decoder(Request)

    def receive(self) -> list[Request]:
        """Raises EOFError if the client is gone; errors of sockets, ValueError and DecodeError."""
        data = self.socket.recv(RECEIVE_BYTES)
        if not data:
            raise EOFError
        self._incoming += data
        requests = []
        while (payload := take_payload(self._incoming)) is not None:
            requests.append(self._decoder.decode(payload))
        return requests

    def send(self, answer: Answer) -> None:
        self.outgoing += frame(answer)
        self.flush()

    def flush(self) -> None:
        """As much as the socket takes."""
        try:
            while self.outgoing:
                del self.outgoing[: self.socket.send(self.outgoing)]
        except BlockingIOError:
            pass
