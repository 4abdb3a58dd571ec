"""Finds the TCP connections of one gloo group among this process's sockets.

Gloo does not expose its connections. Baton needs them for two reasons:

- An operation that waits for a frozen member must end. `abort` and `shutdown` of torch's backend do
  not end this operation, but shutting down the group's connections does. Each gloo device listens
  on its own port, so one end of every connection has the listening address of a member.
- Gloo does not authenticate its peers, and listens until the group is closed. Members therefore
  publish in their store the addresses from which they have connected. All other connections are
  shut down, and new connections are dropped.

An attacker in the network can still make a group fail to form. Baton then retries. An attacker can
also occupy file descriptors, because gloo closes connections only with the group.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import socket
import stat
import threading
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist

logger = logging.getLogger(__name__)

#: Attempts of `open_device`. An attempt fails if another thread opens a listener at the same time.
MAX_ATTEMPTS = 100
# Constants of Linux that the module `socket` lacks.
SO_ATTACH_FILTER = 26
BPF_RET = 0x06

_opening_device = threading.Lock()

#: (numeric host, port).
Address = tuple[str, int]


class GlooConnection(NamedTuple):
    """A socket of this process. The inode shows whether `fd` still refers to this socket."""

    fd: int
    inode: int


def open_device(host: str) -> tuple[Any, Address]:
    """Create a gloo device.

    Returns:
        The device, and the address on which it listens.

    Raises:
        RuntimeError: the address could not be determined.
    """
    gloo: Any = dist.ProcessGroupGloo
    with _opening_device:
        for _ in range(MAX_ATTEMPTS):
            before = {inode for _, inode, _ in _tcp_sockets()}
            device = gloo.create_device(hostname=host, lazy_init=False)
            addresses = [
                _address(tcp.getsockname())
                for _, inode, tcp in _tcp_sockets()
                if inode not in before and tcp.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            ]
            # If there are several, another thread has opened a listener, and ours is unknown.
            if len(addresses) == 1:
                return device, addresses[0]
    raise RuntimeError(
        f"a gloo device on {host} could not be distinguished from other listeners of this process"
    )


def connections_among(listening: Collection[Address]) -> list[GlooConnection]:
    """Return this process's connections to or from these addresses.

    If several ranks are threads of this process, the list has the connections of all these ranks.
    """
    return [each for each, own, peer in _connected() if {own, peer} & set(listening)]


def connected_from(listening: Collection[Address]) -> list[tuple[Address, Address]]:
    """Return this process's connections to the addresses in `listening`.

    Each connection is described by (own address, peer's address).
    """
    return [(own, peer) for _, own, peer in _connected() if peer in listening]


def reject_non_members(
    own: Address, members: Collection[Address], *, is_translated: bool = False
) -> int:
    """Shut down connections that are not from members, and drop new connections.

    Call this function when all members are connected.

    Args:
        own: address on which a device of this process listens.
        members: addresses from which members have connected to `own`.
        is_translated: the network may change the peers' addresses. Then no connection is shut down
            if there are as many connections as members.

    Returns:
        Number of connections that were shut down.
    """
    for _, _, tcp in _tcp_sockets():
        if _address(tcp.getsockname()) == own and tcp.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            _drop_new_connections(tcp)
    accepted = [(peer, each) for each, local, peer in _connected() if local == own]
    if is_translated and _num_sockets(each for _, each in accepted) == len(set(members)):
        return 0
    rejected = [connection for address, connection in accepted if address not in members]
    end_connections(rejected)
    return _num_sockets(rejected)


def _num_sockets(connections: Iterable[GlooConnection]) -> int:
    # Another thread that lists sockets duplicates each descriptor for a moment.
    return len({connection.inode for connection in connections})


class _Instruction(ctypes.Structure):
    """Linux' struct sock_filter."""

    _fields_ = (
        ("code", ctypes.c_ushort),
        ("jt", ctypes.c_ubyte),
        ("jf", ctypes.c_ubyte),
        ("k", ctypes.c_uint),
    )


class _Program(ctypes.Structure):
    """Linux' struct sock_fprog."""

    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction)))


def _drop_new_connections(listener: socket.socket) -> None:
    """Drop all packets to a listener. The listener cannot be closed, because gloo owns it."""
    keep_no_bytes = _Instruction(BPF_RET, 0, 0, 0)
    program = _Program(1, ctypes.pointer(keep_no_bytes))
    try:
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, bytes(program))
    except OSError as error:  # a sandbox without socket filters
        logger.warning(
            "gloo at %s still accepts connections, because no socket filter can be attached: %s; "
            "a NetworkPolicy can keep other clients away",
            listener.getsockname(),
            error,
        )


def end_connections(connections: Collection[GlooConnection]) -> None:
    """Shut connections down, so that operations fail on both sides. Gloo closes the descriptors."""
    for connection in connections:
        if tcp := _copy_of(connection.fd, connection.inode):
            with tcp, contextlib.suppress(OSError):  # the peer has closed it
                tcp.shutdown(socket.SHUT_RDWR)


def _connected() -> Iterator[tuple[GlooConnection, Address, Address]]:
    """Yield (connection, own address, peer's address) for each TCP connection of this process."""
    for fd, inode, tcp in _tcp_sockets():
        with contextlib.suppress(OSError):  # not connected
            yield (
                GlooConnection(fd, inode),
                _address(tcp.getsockname()),
                _address(tcp.getpeername()),
            )


def _tcp_sockets() -> Iterator[tuple[int, int, socket.socket]]:
    """Yield (descriptor, inode, socket object) for each TCP socket of this process.

    The socket object has a duplicate of the descriptor. The duplicate is closed when the next item
    is requested.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was closed since the listing
            status = os.stat(f"/proc/self/fd/{name}")
            if stat.S_ISSOCK(status.st_mode) and (copy := _copy_of(int(name), status.st_ino)):
                with copy:
                    if (
                        copy.family in (socket.AF_INET, socket.AF_INET6)
                        and copy.type == socket.SOCK_STREAM
                    ):
                        yield int(name), status.st_ino, copy


def _copy_of(fd: int, inode: int) -> socket.socket | None:
    """Return a duplicate of a socket, or None if the socket is closed.

    The duplicate refers to this socket even if another thread closes and reuses the descriptor.
    """
    try:
        status = os.stat(f"/proc/self/fd/{fd}")
        if status.st_ino != inode or not stat.S_ISSOCK(status.st_mode):
            return None  # closing a duplicate of a file would drop the process's locks on it
        copy = os.dup(fd)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EBADF):
            return None
        raise
    if os.fstat(copy).st_ino != inode:
        os.close(copy)
        return None
    return socket.socket(fileno=copy)


def _address(name: tuple[Any, ...]) -> Address:
    return name[0], name[1]
