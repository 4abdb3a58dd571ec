"""The TCP connections of one gloo group, which gloo does not name: so that they can be ended under an operation that waits, and
those of strangers at once.

Neither `abort` nor `shutdown` of torch's backend ends an operation that waits for a frozen member; the end of its connections does.
A gloo device listens on a port of its own, and every connection of the group has the listening address of a member at one end.

gloo asks nobody who he is, and takes the first that names a small number for a member. It listens as long as the group lives, and
keeps what connects open until then. So members tell each other, over their store, from where they have connected; then all others
are cut off, and nobody else gets in. What is left to strangers: to spoil the forming of a group, which is tried again, and to take
descriptors while it goes on: gloo does not close what was cut off before the group ends.
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
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 100
SO_ATTACH_FILTER = 26
BPF_RET = 0x06

_opening_device = threading.Lock()

Address = tuple[str, int]


class Connection(NamedTuple):
    """A socket of this process. The inode tells it from another one that got the same descriptor later."""

    fd: int
    inode: int


def open_device(host: str) -> tuple[Any, Address]:
    """A gloo device and the address on which it listens."""
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
            if (
                len(addresses) == 1
            ):  # else another thread began to listen at the same time: which is whose?
                return device, addresses[0]
    raise RuntimeError(
        f"no gloo device on {host} could be told from other listeners of this process"
    )


def connections_among(listening: Collection[Address]) -> list[Connection]:
    """This process's connections to or from these addresses. Ranks in threads of one process find each other's as well."""
    found = []
    for fd, inode, tcp in _tcp_sockets():
        with contextlib.suppress(OSError):  # not connected
            if {_address(tcp.getsockname()), _address(tcp.getpeername())} & set(listening):
                found.append(Connection(fd, inode))
    return found


def connected_from(listening: Collection[Address]) -> list[tuple[Address, Address]]:
    """(own address, the other's) of this process's connections to these addresses."""
    found = []
    for _, _, tcp in _tcp_sockets():
        with contextlib.suppress(OSError):  # not connected
            if _address(tcp.getpeername()) in listening:
                found.append((_address(tcp.getsockname()), _address(tcp.getpeername())))
    return found


def shut_out_strangers(own: Address, members: Collection[Address]) -> int:
    """Once all members are connected: nobody else gets in, and who did is cut off.

    Args:
        own: the address on which a device of this process listens.
        members: addresses from which members have connected to it.

    Returns:
        How many were cut off.
    """
    for _, _, tcp in _tcp_sockets():
        if _address(tcp.getsockname()) == own and tcp.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            _drop_all_that_arrives(tcp)
    accepted = []
    for fd, inode, tcp in _tcp_sockets():
        with contextlib.suppress(OSError):  # not connected
            if _address(tcp.getsockname()) == own:
                accepted.append((_address(tcp.getpeername()), Connection(fd, inode)))
    if len(accepted) == len(set(members)):
        return 0  # as many as there should be. Where addresses are translated on the way they need not be the same
    strangers = [connection for address, connection in accepted if address not in members]
    end_connections(strangers)
    return len(strangers)


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


def _drop_all_that_arrives(listener: socket.socket) -> None:
    """Who asks for a connection gets no answer. The listener stays gloo's, which would not notice that it was closed."""
    program = _Program(
        1, ctypes.pointer(_Instruction(BPF_RET, 0, 0, 0))
    )  # keep 0 bytes of each packet
    try:
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, bytes(program))
    except OSError as error:  # a sandbox that has no filters
        logger.warning("others can still connect to gloo at %s: %s", listener.getsockname(), error)


def end_connections(connections: Collection[Connection]) -> None:
    """Both sides' operations on them fail at once. The descriptors stay gloo's to close; those it has closed are left alone."""
    for connection in connections:
        if tcp := _copy_of(connection.fd, connection.inode):
            with tcp, contextlib.suppress(OSError):  # the other side has ended it already
                tcp.shutdown(socket.SHUT_RDWR)


def _tcp_sockets() -> Iterator[tuple[int, int, socket.socket]]:
    """(descriptor, inode, copy that is closed on the next step) of this process's sockets."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            status = os.stat(f"/proc/self/fd/{name}")
            if stat.S_ISSOCK(status.st_mode) and (copy := _copy_of(int(name), status.st_ino)):
                with copy:
                    if (
                        copy.family in (socket.AF_INET, socket.AF_INET6)
                        and copy.type == socket.SOCK_STREAM
                    ):
                        yield int(name), status.st_ino, copy


def _copy_of(fd: int, inode: int) -> socket.socket | None:
    """A socket's duplicate: what is asked of it or done to it cannot hit one that gets the same descriptor meanwhile."""
    try:
        status = os.stat(f"/proc/self/fd/{fd}")
        if status.st_ino != inode or not stat.S_ISSOCK(status.st_mode):
            return None  # and never copied: to close the copy of a file would drop the process's locks on it
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
