"""Those who connected to this process to write to its memory: what they ask is checked here, and done by the lane's thread."""

from __future__ import annotations

import hmac
import logging
import os
import socket
import struct
from collections.abc import Callable

import msgspec

from baton_kv_transfer.transports.base import Region
from baton_kv_transfer.transports.framed_socket import MAX_PAYLOAD_BYTES, FramedSocket
from baton_kv_transfer.transports.iovec import RUN_BYTES, count_outside, total_bytes
from baton_kv_transfer.transports.lane_protocol import (
    ANSWER,
    HELLO,
    MAX_HELLO_BYTES,
    NOTIF,
    WRITE,
)
from baton_kv_transfer.transports.lane_thread import Job, LaneThread
from baton_kv_transfer.transports.shm.cross_memory import BatchedCopy, Cell, CopyError, Process
from baton_kv_transfer.transports.shm.messages import Hello, HostAddress, decode_write, get_location

logger = logging.getLogger(__name__)

_PEER_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class _Client:
    """A process that connected to ask for writes here. `process` is None until its hello was accepted."""

    def __init__(self, link: FramedSocket, pid: int) -> None:
        self.link = link
        self.pid = pid
        self.name = ""
        self.process: Process | None = None


class SHMClients:
    """All methods belong to the lane's thread, save `address`."""

    address: bytes
    """What a process of the same host needs to connect, packed."""
    num_refused = 0
    """Descriptors outside registered memory."""
    num_copied = 0
    """Bytes copied into memory here, also by reads of this side."""

    def __init__(self, thread: LaneThread, deliver: Callable[[str, bytes], None]) -> None:
        """`deliver` is called with (sender, notification)."""
        self._thread = thread
        self._deliver = deliver
        self._regions: list[Region] = []
        self._clients: list[_Client] = []

    def add_region(self, region: Region) -> None:
        self._regions.append(region)

    def forget_region(self, region: Region) -> None:
        self._regions.remove(region)
        for job in [job for job in self._thread.jobs if isinstance(job.owner, _Client)]:
            # Finishing one may have ended its client, and with it others of these jobs.
            if job in self._thread.jobs and count_outside(job.copy.target, self._regions):
                self._thread.jobs.remove(job)
                job.finish("the memory was deregistered")

    def open(self) -> None:
        """Under a new address."""
        self._cell = Cell()
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.setblocking(False)
        server.bind(b"\0baton-kv-" + os.urandom(12).hex().encode())
        server.listen(128)
        self._server = server
        self._thread.watch(server.fileno(), self._accept)
        here = get_location()
        self.address = msgspec.msgpack.encode(
            HostAddress(*here, os.getpid(), self._cell.address, self._cell.value, server.getsockname())
        )

    def close(self) -> None:
        """Cuts all of them off."""
        self._cell.clear()
        self._thread.unwatch(self._server.fileno())
        self._server.close()
        for client in list(self._clients):
            self._drop_client(client)

    def _accept(self) -> None:
        try:
            end, _ = self._server.accept()
        except OSError:  # gone again, or no more files can be opened
            return
        pid, uid, _ = _PEER_CREDENTIALS.unpack(
            end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        )
        if uid not in (os.geteuid(), 0):
            end.close()
            return
        client = _Client(FramedSocket(end, MAX_HELLO_BYTES), pid)
        self._clients.append(client)
        self._thread.watch(client.link.fileno(), lambda: self._serve_client(client))

    def _serve_client(self, client: _Client) -> None:
        try:
            client.link.flush()
            for kind, number, payload in client.link.receive():
                if kind == HELLO and client.process is None:
                    self._greet(client, msgspec.msgpack.decode(payload, type=Hello))
                elif client.process is None:
                    raise ConnectionError("no hello")
                elif kind == NOTIF:
                    self._deliver(client.name, payload)
                elif kind == WRITE:
                    self._serve_write(client, client.process, number, payload)
            self._watch_writable(client)
        except (OSError, ValueError, OverflowError, RecursionError, msgspec.DecodeError, CopyError) as error:
            logger.info("same-host connection of process %d (%s) ended: %s", client.pid, client.name or "?", error)
            self._drop_client(client)

    def _greet(self, client: _Client, hello: Hello) -> None:
        if not hmac.compare_digest(hello.peer_cell, self._cell.value):
            raise ConnectionError("it does not know this agent's metadata")
        client.process = Process(client.pid, hello.cell_address, hello.cell)
        client.name = hello.name
        client.link.max_payload_bytes = MAX_PAYLOAD_BYTES

    def _serve_write(self, client: _Client, process: Process, number: int, request: bytes) -> None:
        notif, source, target = decode_write(request)

        def finish(error: str) -> None:
            self.num_copied += 0 if error else total_bytes(target)
            if not error and notif:
                self._deliver(client.name, notif)
            try:
                client.link.send(ANSWER, number, error.encode())
                self._watch_writable(client)
            except OSError:
                self._drop_client(client)

        outside = count_outside(target, self._regions)
        if outside:
            self.num_refused += outside
            finish(f"{outside} of {len(target) // RUN_BYTES} descriptors are outside the memory registered there")
            return
        self._thread.jobs.append(Job(BatchedCopy(process, target, source), finish, client))

    def _watch_writable(self, client: _Client) -> None:
        self._thread.watch_writable(client.link.fileno(), client.link.has_outgoing)

    def _drop_client(self, client: _Client) -> None:
        if client not in self._clients:
            return
        self._clients.remove(client)
        self._thread.unwatch(client.link.fileno())
        client.link.close()
        if client.process is not None:
            client.process.close()
        self._thread.take_jobs(client)
