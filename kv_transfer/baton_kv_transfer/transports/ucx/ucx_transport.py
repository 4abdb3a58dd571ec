"""Transfers over UCX.

Each side passes only its own memory to UCX, and checks every row of a peer's request.

Each UCX request belongs to a connection. A connection is cut when it fails, when it is silent, or
when its peer is removed. Then UCX closes the endpoint by force, and each transfer ends when UCX has
completed the requests of the transfer. If UCX does not complete them, the UCX worker is replaced.
"""

from __future__ import annotations

import contextlib
import ctypes as c
import hmac
import logging
import os
import secrets
import time

import msgspec

from baton_kv_transfer.transports.iovec import check_iovec, count_outside, pack
from baton_kv_transfer.transports.transfer import (
    LOST_NOTIFICATION,
    Region,
    Transfer,
    TransportError,
)
from baton_kv_transfer.transports.transport import Transport, TransportContext
from baton_kv_transfer.transports.ucx import capabilities, messages
from baton_kv_transfer.transports.ucx.connection import OutgoingTransfer, UCXConnection
from baton_kv_transfer.transports.ucx.data_messages import DataMessages
from baton_kv_transfer.transports.ucx.library import UCXError
from baton_kv_transfer.transports.ucx.messages import (
    DATA_BIT,
    Done,
    Go,
    Notif,
    Read,
    UCXHello,
    UCXRefused,
    Write,
)
from baton_kv_transfer.transports.ucx.ucx_worker import SETTINGS, Buffer, UCXContext, UCXWorker

logger = logging.getLogger(__name__)

#: A connection in use is cut when nothing arrives during this many ticks of _TICK_S seconds.
SILENT_TICKS = 10
#: How long UCX may take to end the requests of a cut connection. After this time, the UCX worker is
#: replaced.
RETURN_TIMEOUT_S = 0.5
#: How long the creation of a new worker is retried. It fails while the network is down.
NETWORK_TIMEOUT_S = 20.0
RETRY_S = 0.5
NOT_LISTENING = (
    "UCX stopped listening for KV transfers, because this process had no free file descriptor. "
    "Present connections continue, and new peers cannot connect. Restart the engine; if it happens "
    "again, raise the limit of open files, and let only the service's pods reach this port"
)
_TICK_S = 1.0
#: Maximum number of calls of UCX's progress function in one turn of the thread.
_ROUNDS = 4
_SECRET_BYTES = 16


class PeerAddress(msgspec.Struct, array_like=True, frozen=True):
    """Address of a UCX worker, and the secret with which a peer can connect to the worker."""

    worker: bytes
    secret: bytes


class UCXTransport(Transport):
    """The transport `ucx`, over UCX tag messages."""

    def __init__(self, context: TransportContext) -> None:
        """Start UCX and create a worker.

        Raises:
            OSError: `context.host` is not an address of this machine.
            UCXError: UCX is missing or cannot start.
        """
        super().__init__(context)
        self._ucx = UCXContext(context.host)
        restriction = os.environ.get("UCX_TLS", SETTINGS["TLS"])
        logger.info(
            "KV transfers use %s; UCX_TLS=%s selects among them",
            capabilities.describe(),
            restriction,
        )
        self.mem_types = ("DRAM", "VRAM") if self._ucx.has_cuda else ("DRAM",)
        self._peers: dict[str, PeerAddress] = {}
        self._by_address: dict[bytes, UCXConnection] = {}
        self._by_session: dict[int, UCXConnection] = {}
        self._cut: list[UCXConnection] = []
        self._closed: list[int] = []  # sessions whose endpoints failed
        self._worker: UCXWorker | None = None
        #: Why `_cut_all` has cut all connections. Empty: connections may be opened.
        self._cut_reason = ""
        self._use_worker(self._ucx.create_worker())
        self._thread.progress_also(self._progress)
        self._thread.call_later(_TICK_S, self._tick)

    # Called by any thread

    def add_peer(self, name: str, address: bytes) -> None:
        self.remove_peer(name)
        self._peers[name] = msgspec.msgpack.decode(address, type=PeerAddress)

    def remove_peer(self, name: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is not None:
            with contextlib.suppress(TransportError):  # a closed transport has no connections
                self._thread.commands.submit(
                    lambda: self._disconnect(peer, f"agent {name} was removed")
                )

    def begin(self, transfer: Transfer) -> bool:
        peer = self._peers.get(transfer.peer)
        if peer is not None:
            self._thread.commands.submit(lambda: self._begin(peer, transfer))
        return peer is not None

    def send_notif(self, name: str, message: bytes) -> bool:
        peer = self._peers.get(name)
        if peer is not None:
            self._thread.commands.submit(lambda: self._notify(peer, name, message))
        return peer is not None

    # Transfers of this side

    def _begin(self, peer: PeerAddress, transfer: Transfer) -> None:
        try:
            connection = self._connect(peer, transfer.peer)
            remote, notif = pack(transfer.remote), transfer.notif
            if len(remote) + len(notif) > messages.MAX_MESSAGE_BYTES - 4096:
                raise ValueError(
                    f"{len(transfer.remote)} descriptors are too many for one transfer: "
                    "split the transfer"
                )
            number = secrets.randbits(messages.TRANSFER_BITS)
            data = DataMessages(
                connection,
                number,
                pack(transfer.local),
                lambda data: self._end_outgoing(connection, number),
            )
        except (UCXError, ValueError) as error:
            transfer.end(f"{transfer.op} of {transfer.peer}'s memory: {error}")
            self._context.wakeup()
            return
        connection.outgoing[number] = OutgoingTransfer(transfer, data)
        if transfer.op == "READ":
            data.receive()
            connection.send_message(Read(connection.session, number, remote))
        elif len(remote) + len(notif) > self._ucx.max_eager_bytes:
            connection.send_message(Write(connection.session, number, remote, notif, True))
        else:
            write = Write(connection.session, number, remote, notif, False)
            connection.send_message(write, then=data.send)

    def _notify(self, peer: PeerAddress, name: str, message: bytes) -> None:
        try:
            connection = self._connect(peer, name)
            connection.send_message(Notif(connection.session, message))
        except UCXError as error:
            logger.warning(LOST_NOTIFICATION, name, error)

    def _disconnect(self, peer: PeerAddress, reason: str) -> None:
        """Cut the connection to a removed peer, unless only the peer still uses the connection.

        So the connection stays if the peer has sent HELLO and no transfer that this side started
        is in flight.
        """
        connection = self._by_address.get(peer.worker)
        if connection is not None and (connection.outgoing or connection.peer_session is None):
            connection.fail(reason)
            self._cut_failed()

    def forget_region(self, region: Region) -> None:
        for connection in self._by_address.values():
            if any(
                count_outside(data.pieces.iovec, self._context.regions)
                for data in connection.incoming.values()
            ):
                connection.fail("memory of a transfer in flight was deregistered")
        if self._cut_failed() and not self._wait_for_memory():
            self._replace_worker("UCX did not give back deregistered memory")

    def fence(self) -> None:
        """Cut all connections and replace the worker, which makes earlier metadata invalid.

        Raises:
            UCXError: no worker can be created, because the network is down.
        """
        self._replace_worker("this agent cut all its peers off; later transfers connect again")

    def close(self) -> None:
        self._cut_all("the transport was closed")
        self._drop_worker()

    # Progress

    def _progress(self) -> bool:
        """Advance UCX, and carry out messages; return whether work is left."""
        worker = self._worker
        if worker is None:
            return False
        for _ in range(_ROUNDS):
            worker.progress()
            self._receive_messages(worker)
            # Discard data of a transfer that has ended, or of an untrusted client.
            worker.discard(DATA_BIT, DATA_BIT)
            if self._cut_failed():
                continue  # messages may arrive while an endpoint is closed
            if worker.arm():
                return False
        return True

    def _receive_messages(self, worker: UCXWorker) -> None:
        """Receive and carry out messages until no more arrive.

        Handling a message may close an endpoint. Then more messages may arrive, for example a WRITE
        and its data. The WRITE must be handled first, because data without a transfer is discarded.
        """
        has_more = True
        while has_more:
            while arrived := worker.probe(0, DATA_BIT):
                self._receive(worker, *arrived)
            has_more = worker.call_back()

    def _receive(self, worker: UCXWorker, message: int, nbytes: int) -> None:
        content = bytearray(nbytes if nbytes <= messages.MAX_MESSAGE_BYTES else 0)
        address = c.addressof(c.c_char.from_buffer(content)) if content else 0

        def on_end(error: str) -> None:
            if content and not error:
                self._handle_message(content)

        worker.take(message, Buffer.of(address, len(content)), on_end)

    def _handle_message(self, content: bytearray) -> None:
        try:
            message = messages.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            logger.info(
                "a malformed message of %d bytes that arrived over UCX is ignored: %s",
                len(content),
                error,
            )
            return
        if isinstance(message, UCXHello):
            self._handle_hello(message)
            return
        connection = self._by_session.get(message.session)
        if connection is None or connection.error:
            return  # the message is from a cut connection, or from an untrusted client
        connection.silent_ticks = 0
        if message.session == connection.peer_session and isinstance(message, Read | Write):
            self._serve(connection, message)
        elif message.session == connection.peer_session and isinstance(message, Notif):
            self._context.deliver(connection.peer_name, message.message)
        elif message.session == connection.session and isinstance(message, Go | UCXRefused | Done):
            self._handle_answer(connection, message)

    def _handle_hello(self, hello: UCXHello) -> None:
        if not hmac.compare_digest(hello.secret, self._secret):
            logger.info("a UCX connection from a client without this agent's secret is ignored")
            return
        connection = self._by_address.get(hello.address)
        if connection is not None and connection.peer_session not in (None, hello.session):
            connection.fail(f"{hello.name} connected again")
            self._cut_failed()
            connection = None
        if connection is None:
            try:
                connection = self._open(hello.address)
            except UCXError as error:
                logger.info("agent %s sent HELLO, and cannot be reached: %s", hello.name, error)
                return
        connection.peer_session, connection.peer_name = hello.session, hello.name
        self._by_session[hello.session] = connection

    # Transfers that peers began

    def _serve(self, connection: UCXConnection, request: Read | Write) -> None:
        try:
            check_iovec(request.rows)
            if refusal := self._context.refuse(request.rows):
                raise ValueError(refusal)
            if request.transfer in connection.incoming:
                raise ValueError("two transfers have the same number")

            def on_end(data: DataMessages) -> None:
                del connection.incoming[data.transfer]
                if isinstance(request, Write) and not data.error:
                    if request.notif:
                        self._context.deliver(connection.peer_name, request.notif)
                    connection.send_message(Done(request.session, request.transfer))

            data = DataMessages(connection, request.transfer, request.rows, on_end)
        except ValueError as error:
            connection.send_message(UCXRefused(request.session, request.transfer, str(error)))
            return
        connection.incoming[request.transfer] = data
        if isinstance(request, Read):
            data.send()
        else:
            data.receive()
            if request.awaits_go:
                connection.send_message(Go(request.session, request.transfer))

    def _handle_answer(self, connection: UCXConnection, answer: Go | UCXRefused | Done) -> None:
        outgoing = connection.outgoing.get(answer.transfer)
        if outgoing is None:
            return
        if isinstance(answer, Go):
            outgoing.data.send()
        elif isinstance(answer, Done):
            outgoing.is_answered = True
            self._end_outgoing(connection, answer.transfer)
        else:
            outgoing.data.stop(answer.reason)
            # `stop` does not end the transfer if the data of a short WRITE was already sent.
            self._end_outgoing(connection, answer.transfer)

    def _end_outgoing(self, connection: UCXConnection, number: int) -> None:
        """End a transfer that has failed or was answered, if UCX has completed its requests.

        Otherwise do nothing.
        """
        outgoing = connection.outgoing.get(number)
        if outgoing is None:
            return
        data, transfer = outgoing.data, outgoing.transfer
        error = data.error or connection.error
        if not data.has_ended or not (error or outgoing.is_answered):
            return
        del connection.outgoing[number]
        if error:
            error = f"{transfer.op} of {transfer.peer}'s memory: {error}"
        elif transfer.op == "READ" and transfer.notif:
            connection.send_message(Notif(connection.session, transfer.notif))
        transfer.end(error)
        self._context.wakeup()

    # Connections

    def _connect(self, peer: PeerAddress, name: str) -> UCXConnection:
        connection = self._by_address.get(peer.worker) or self._open(peer.worker)
        if not connection.is_hello_sent:
            connection.is_hello_sent = True
            connection.peer_name = connection.peer_name or name
            assert self._worker is not None, "it is connected"
            connection.send_message(
                UCXHello(peer.secret, connection.session, self._context.name, self._worker.address)
            )
        return connection

    def _open(self, address: bytes) -> UCXConnection:
        if self._worker is None:
            raise UCXError(
                "the transport lost its network, and UCX has no worker; restart the engine"
            )
        if self._cut_reason:
            raise UCXError(self._cut_reason)
        connection = UCXConnection(
            self._worker, address, self._closed.append, self._context.bytes_moved
        )
        self._by_address[address] = self._by_session[connection.session] = connection
        return connection

    def _cut_failed(self) -> bool:
        """Cut connections that failed; return whether there were any."""
        while self._closed:
            connection = self._by_session.get(self._closed.pop())
            if connection is not None:
                connection.fail(f"connection to {connection.peer_name} lost")
        failed = [connection for connection in self._by_address.values() if connection.error]
        for connection in failed:
            name = connection.peer_name or "an unknown agent"
            logger.info("the KV transfer connection with %s was closed: %s", name, connection.error)
            del self._by_address[connection.address]
            self._by_session.pop(connection.session, None)
            self._by_session.pop(connection.peer_session or -1, None)
            self._cut.append(connection)
            connection.cut()
            for number in list(connection.outgoing):
                self._end_outgoing(connection, number)  # ends transfers that waited only for DONE
        return bool(failed)

    def _cut_all(self, reason: str) -> None:
        """Cut all connections before the worker is dropped.

        No connection is opened until there is a new worker.
        """
        self._cut_reason = reason
        for connection in self._by_address.values():
            connection.fail(reason)
        self._cut_failed()
        self._wait_for_memory()

    def _wait_for_memory(self) -> bool:
        """Wait until UCX no longer uses the memory of requests on cut connections.

        Returns:
            False if some of these requests have not ended after RETURN_TIMEOUT_S seconds.
        """
        deadline = time.monotonic() + RETURN_TIMEOUT_S
        while self._worker is not None and any(connection.is_busy for connection in self._cut):
            self._worker.progress()
            if time.monotonic() > deadline:
                return False
        return True

    def _tick(self) -> None:
        """Cut connections that are in use but silent, and check that UCX still listens.

        Silence is counted in calls of this function, not in seconds. So a process that was
        suspended first reads the arrived messages, and cuts only connections that are still silent.
        """
        for connection in self._by_address.values():
            connection.silent_ticks = connection.silent_ticks + 1 if connection.is_busy else 0
            if connection.silent_ticks >= SILENT_TICKS:
                connection.fail(
                    f"nothing arrived from {connection.peer_name} for {SILENT_TICKS * _TICK_S:g} s"
                )
        if not self._wait_for_memory():
            logger.error(
                "UCX did not end the requests of a closed connection within %g s: replacing UCX's "
                "worker, which ends all KV transfers in flight",
                RETURN_TIMEOUT_S,
            )
            self._replace_worker("UCX's worker was replaced; later transfers connect again")
        self._cut = [connection for connection in self._cut if connection.is_busy]
        self._cut_failed()
        if self._worker is not None and not (self._context.failure or self._worker.is_listening):
            self._context.failure = NOT_LISTENING
            logger.error("%s", NOT_LISTENING)
        self._thread.call_later(_TICK_S, self._tick)

    # The worker

    def _use_worker(self, worker: UCXWorker) -> None:
        self._worker = worker
        self._cut_reason = ""
        self._context.failure = ""
        self._secret = os.urandom(_SECRET_BYTES)
        self.address = msgspec.msgpack.encode(PeerAddress(worker.address, self._secret))
        self._thread.watch(worker.event_fd, lambda: None)

    def _drop_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        self._thread.unwatch(worker.event_fd)
        for connection in self._cut:
            connection.drop()
        worker.destroy()
        self._cut.clear()
        self._closed.clear()

    def _replace_worker(self, reason: str) -> None:
        self._cut_all(reason)
        self._drop_worker()
        deadline = time.monotonic() + NETWORK_TIMEOUT_S
        while True:
            try:
                self._use_worker(self._ucx.create_worker())
                return
            except UCXError as error:
                if time.monotonic() > deadline or self._thread.commands.closed:
                    raise
                logger.warning(
                    "a UCX worker cannot be created, retrying for %g s: %s",
                    NETWORK_TIMEOUT_S,
                    error,
                )
                time.sleep(RETRY_S)
