"""Finds the TCP connections of one gloo group among this process's sockets.

Gloo does not expose its connections. Baton needs them for two reasons:

- An operation that waits for a frozen member must end. `abort` and `shutdown` of torch's backend do
  not end this operation, but shutting down the group's connections does. Each gloo device listens
  on its own port, so one end of every connection has the listening address of a member.
- Gloo does not authenticate its peers, and listens until the group is closed. Each member therefore
  publishes in the group's store the addresses from which it has connected. Each member then shuts
  down connections from other addresses, and drops new connections.

A process with many ranks has hundreds of sockets, so sockets that are older than the group's device
are skipped.

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
    """A TCP connection of this process. `inode` shows whether `fd` is still the same socket."""

    fd: int
    inode: int
    own: Address
    peer: Address


def open_device(host: str) -> tuple[Any, Address, Collection[int]]:
    """Create a gloo device.

    Returns:
        The device, the address on which the device listens, and the inodes of all sockets of this
        process that are older than the device.

    Raises:
        RuntimeError: the address could not be determined.
    """
    gloo: Any = dist.ProcessGroupGloo
    with _opening_device:
        for _ in range(MAX_ATTEMPTS):
            older = {inode for _, inode in _sockets()}
            device = gloo.create_device(hostname=host, lazy_init=False)
            addresses = [
                _address(tcp.getsockname())
                for _, _, tcp in _tcp_sockets(older)
                if tcp.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            ]
            # With several addresses, another thread has opened a listener, and it is unknown which
            # address is the device's.
            if len(addresses) == 1:
                return device, addresses[0], older
    raise RuntimeError(
        f"the port of a gloo device on {host} was not found, because other threads of this process "
        f"opened listeners in all {MAX_ATTEMPTS} attempts; try again"
    )


def connections_among(
    listening: Collection[Address], older: Collection[int] = ()
) -> list[GlooConnection]:
    """Return this process's connections to or from the addresses in `listening`.

    If several ranks are threads of this process, the list has the connections of all these ranks.

    Args:
        listening: the listening address of each member's gloo device.
        older: inodes of sockets that are older than this rank's gloo device. These sockets are
            skipped.
    """
    return [each for each in _connected(older) if {each.own, each.peer} & set(listening)]


def connected_from(
    connections: Collection[GlooConnection], listening: Collection[Address]
) -> list[tuple[Address, Address]]:
    """Return (own address, peer's address) of each connection to an address in `listening`."""
    return [(each.own, each.peer) for each in connections if each.peer in listening]


def reject_non_members(
    own: Address,
    members: Collection[Address],
    older: Collection[int] = (),
    *,
    is_translated: bool = False,
) -> int:
    """Shut down connections that are not from members, and drop new connections.

    Call this function when all members are connected.

    Args:
        own: address on which a device of this process listens.
        members: addresses from which members have connected to `own`.
        older: inodes of sockets that are older than this device. These sockets are skipped.
        is_translated: whether the network may change the addresses of peers. If so, and `own` has
            as many connections as `members` has addresses, no connection is shut down.

    Returns:
        Number of connections that were shut down.
    """
    for _, _, tcp in _tcp_sockets(older):
        if _address(tcp.getsockname()) == own and tcp.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            _drop_new_connections(tcp)
    accepted = [each for each in _connected(older) if each.own == own]
    if is_translated and _num_sockets(accepted) == len(set(members)):
        return 0
    rejected = [each for each in accepted if each.peer not in members]
    end_connections(rejected)
    return _num_sockets(rejected)


def _num_sockets(connections: Iterable[GlooConnection]) -> int:
    # While another thread lists sockets, one socket can appear under two descriptors.
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


def _connected(older: Collection[int]) -> Iterator[GlooConnection]:
    """Yield the TCP connections of this process, without those in `older`."""
    for fd, inode, tcp in _tcp_sockets(older):
        with contextlib.suppress(OSError):  # not connected
            yield GlooConnection(
                fd, inode, _address(tcp.getsockname()), _address(tcp.getpeername())
            )


def _tcp_sockets(older: Collection[int]) -> Iterator[tuple[int, int, socket.socket]]:
    """Yield (descriptor, inode, socket object) for each TCP socket that is not in `older`.

    The socket object has a duplicate of the descriptor. The duplicate is closed when the next item
    is requested.
    """
    for fd, inode in _sockets():
        if inode not in older and (copy := _copy_of(fd, inode)):
            with copy:
                if (
                    copy.family in (socket.AF_INET, socket.AF_INET6)
                    and copy.type == socket.SOCK_STREAM
                ):
                    yield fd, inode, copy


def _sockets() -> Iterator[tuple[int, int]]:
    """Yield (descriptor, inode) for each socket of this process."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if inode := _inode_of(fd):
            yield fd, inode


def _inode_of(fd: int) -> int | None:
    """Return the inode of a socket, or None if the descriptor is closed or is not a socket."""
    try:
        status = os.fstat(fd)
    except OSError as error:
        if error.errno == errno.EBADF:
            return None
        raise
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


def _copy_of(fd: int, inode: int) -> socket.socket | None:
    """Return a duplicate of a socket, or None if the socket is closed.

    The duplicate refers to this socket even if another thread closes and reuses the descriptor.
    """
    # Closing a duplicate of a file would drop the process's locks on the file.
    if _inode_of(fd) != inode:
        return None
    try:
        copy = os.dup(fd)
    except OSError as error:
        if error.errno == errno.EBADF:
            return None
        raise
    if os.fstat(copy).st_ino != inode:
        os.close(copy)
        return None
    return socket.socket(fileno=copy)


def _address(name: tuple[Any, ...]) -> Address:
    return name[0], name[1]
