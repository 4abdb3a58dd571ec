"""The server of the transport `shm`: checks and serves the WRITE requests of other processes."""

from __future__ import annotations

import hmac
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from baton_kv_transfer.transports.iovec import check_iovec, count_outside, lengths_of
from baton_kv_transfer.transports.shm.cross_memory import BatchedCopy, PeerProcess, ProcessNonce
from baton_kv_transfer.transports.sockets.framed_socket import FramedSocket
from baton_kv_transfer.transports.sockets.peer_link import NOTIF, WRITE, encode_request
from baton_kv_transfer.transports.sockets.peer_server import (
    MAX_HELLO_BYTES,
    MAX_UNAUTHENTICATED,
    PeerClient,
    PeerServer,
)
from baton_kv_transfer.transports.transfer import Region
from baton_kv_transfer.transports.transport_thread import CopyJob

#: Prefix of the names of the abstract unix sockets. An address with another name is refused.
SOCKET_PREFIX = b"\0baton-kv-"
_PEER_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class HostAddress(msgspec.Struct, array_like=True, frozen=True):
    """Data with which a process of the same host connects to this process and reads its memory."""

    boot_id: str
    pid_namespace: int
    network_namespace: int
    pid: int
    #: Address of this process's `ProcessNonce`.
    nonce_address: int
    #: Content of this process's `ProcessNonce`.
    nonce: bytes
    #: Name of the abstract unix socket on which this process listens.
    socket_name: bytes


class SHMHello(msgspec.Struct, array_like=True):
    """First message on a connection, from the side that connects.

    `name`, `nonce_address` and `nonce` describe the sender.
    """

    #: Content of the receiver's nonce. Only a sender with the receiver's metadata has it.
    peer_nonce: bytes
    name: str
    nonce_address: int
    nonce: bytes


def encode_write(notif: bytes, source: bytes, target: bytes) -> bytes:
    """Return a WRITE request.

    Args:
        notif: notification; empty for none.
        source: iovec of the sender's memory.
        target: iovec of the receiver's memory, with runs of the same lengths.
    """
    return encode_request(notif, source + target)


def decode_write(request: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the (notification, source, target) of a WRITE request.

    Raises:
        ValueError: the request is malformed or too long, or the lengths of source and target
            differ.
    """
    end = 4 + int.from_bytes(request[:4], "little")
    middle = end + (len(request) - end) // 2
    source, target = request[end:middle], request[middle:]
    check_iovec(target)
    if len(source) != len(target) or lengths_of(source).tobytes() != lengths_of(target).tobytes():
        raise ValueError("the runs of a write are not as long as their sources")
    return request[4:end], source, target


def get_location() -> tuple[str, int, int]:
    """Return the boot id of this host, and this process's pid and network namespaces."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot_id, os.stat("/proc/self/ns/pid").st_ino, os.stat("/proc/self/ns/net").st_ino


@dataclass(eq=False)
class _Client(PeerClient):
    pid: int
    #: The process of the client; None until its HELLO was accepted.
    process: PeerProcess | None = None

    def close(self) -> None:
        super().close()
        if self.process is not None:
            self.process.close()


class SHMServer(PeerServer[_Client]):
    """The server of the transport `shm`, for other processes of this host."""

    def forget_region(self, region: Region) -> None:
        for job in [job for job in self._thread.jobs if isinstance(job.owner, _Client)]:
            # Finishing a job may disconnect the client, which removes the client's other jobs.
            if job in self._thread.jobs and count_outside(job.copy.target, self._context.regions):
                self._thread.jobs.remove(job)
                job.finish("the memory was deregistered")

    def open(self) -> None:
        """Listen on a new unix socket, and set `address` to this socket and a new nonce."""
        self._nonce = ProcessNonce()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        listener.bind(SOCKET_PREFIX + os.urandom(12).hex().encode())
        listener.listen(MAX_UNAUTHENTICATED)
        self._listener = listener
        self._listen(listener)
        here = get_location()
        self.address = msgspec.msgpack.encode(
            HostAddress(
                *here, os.getpid(), self._nonce.address, self._nonce.value, listener.getsockname()
            )
        )

    def close(self) -> None:
        self._nonce.clear()
        super().close()

    def _make_client(self, end: socket.socket, where: Any) -> _Client | None:
        pid, uid, _ = _PEER_CREDENTIALS.unpack(
            end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        )
        if uid not in (os.geteuid(), 0):
            return None
        connection = FramedSocket(end, MAX_HELLO_BYTES, bytes_moved=self._context.bytes_moved)
        return _Client(connection, f"process {pid}", pid)

    def _check_hello(self, client: _Client, payload: bytes) -> str:
        hello = msgspec.msgpack.decode(payload, type=SHMHello)
        if not hello.name or not hmac.compare_digest(hello.peer_nonce, self._nonce.value):
            raise ConnectionError("it does not have this agent's metadata")
        client.process = PeerProcess(client.pid, hello.nonce_address, hello.nonce)
        return hello.name

    def _handle_message(self, client: _Client, kind: int, number: int, payload: bytes) -> None:
        if kind == NOTIF:
            self._context.deliver(client.name, payload)
        elif kind == WRITE:
            self._write(client, number, payload)
        else:
            raise ConnectionError(f"a message of kind {kind} is invalid here")

    def _write(self, client: _Client, number: int, request: bytes) -> None:
        notif, source, target = decode_write(request)
        jobs = [job for job in self._thread.jobs if job.owner is client]
        self._check_unfinished([job.copy.target for job in jobs], request)
        if refusal := self._context.refuse(target):
            self._answer(client, number, refusal)
            return
        assert client.process is not None, "HELLO was accepted"
        copy = BatchedCopy(client.process, target, source)

        def finish(error: str) -> None:
            if not error:
                self._context.bytes_moved["process_vm_readv"] += copy.nbytes
                if notif:
                    self._context.deliver(client.name, notif)
            self._answer(client, number, error)

        self._thread.jobs.append(CopyJob(copy, finish, client))
