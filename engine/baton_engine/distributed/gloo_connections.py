"""The TCP connections of one gloo group, which gloo does not name, so that they can be ended under an operation that waits.

Neither `abort` nor `shutdown` of torch's backend ends an operation that waits for a frozen member; the end of its connections does.
A gloo device listens on a port of its own, and every connection of the group has the listening address of a member at one end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import threading
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist

MAX_ATTEMPTS = 100

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
            if len(addresses) == 1:  # else another thread began to listen at the same time: which is whose?
                return device, addresses[0]
    raise RuntimeError(f"no gloo device on {host} could be told from other listeners of this process")


def connections_among(listening: Collection[Address]) -> list[Connection]:
    """This process's connections to or from these addresses. Ranks in threads of one process find each other's as well."""
    found = []
    for fd, inode, tcp in _tcp_sockets():
        with contextlib.suppress(OSError):  # not connected
            if {_address(tcp.getsockname()), _address(tcp.getpeername())} & set(listening):
                found.append(Connection(fd, inode))
    return found


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
                    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
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
