"""Form a gloo group of three threads, and print the number of reverse name lookups.

For the tests of process groups.

The C library's getnameinfo is replaced by a function that counts calls and fails.
"""

from __future__ import annotations

import ctypes
import mmap
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import torch
from torch._C._distributed_c10d import Store, TCPStore

from baton_engine.distributed import process_group
from baton_engine.distributed.group import Group
from baton_engine.distributed.process_group import create_group
from baton_engine.distributed.store.socket_store import connect_store
from baton_engine.distributed.store.store_server import open_store

HOST = "127.0.0.1"
WAIT_S = 30.0
SIZE = 3
#: The flags of calls that would have looked up a name.
names_wanted: list[int] = []


@ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p, ctypes.c_uint] * 3, ctypes.c_int)
def note(*arguments: int) -> int:
    flags = arguments[-1]
    if not flags & socket.NI_NUMERICHOST:
        names_wanted.append(flags)
    return socket.EAI_AGAIN


def replace_getnameinfo() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    function = ctypes.cast(libc.getnameinfo, ctypes.c_void_p).value
    target = ctypes.cast(note, ctypes.c_void_p).value
    page = function - function % mmap.PAGESIZE
    everything = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(2 * mmap.PAGESIZE), everything) != 0:
        raise OSError(ctypes.get_errno(), "the C library's code cannot be written to")
    code = b"\x48\xb8" + target.to_bytes(8, "little") + b"\xff\xe0"  # mov rax, target; jmp rax
    ctypes.memmove(function, code, len(code))


def form(store: Store) -> None:
    """Form the group, and check its all-reduce. `store` is the store of rank 0."""

    def join(rank: int, store: Store) -> Group:
        return create_group("test", rank, SIZE, store, 1, torch.device("cpu"), WAIT_S)

    with (
        ThreadPoolExecutor(SIZE) as pool,
        mock.patch.object(process_group, "over_shared_memory", lambda group, *_: group),
    ):
        groups = list(pool.map(join, range(SIZE), [store, *(connect() for _ in range(1, SIZE))]))
        sums = list(pool.map(lambda group: int(group.all_reduce(torch.ones(1))), groups))
    assert sums == [SIZE] * SIZE


if __name__ == "__main__":
    replace_getnameinfo()
    timeout = timedelta(seconds=WAIT_S)
    if sys.argv[1] == "ours":
        server = open_store(HOST)

        def connect() -> Store:
            return connect_store(server.address, WAIT_S)

        form(connect())
    else:
        master = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timeout)

        def connect() -> Store:
            return TCPStore(HOST, master.port, wait_for_workers=False, timeout=timeout)

        form(master)
    print("formed, lookups:", len(names_wanted))
