"""Transports of the agent, each in a folder of its own:

    ucx       UCX moves every byte, of host or device memory, over TCP, RDMA or what else it has for peers that may fail
    tcp       authenticated sockets, for host memory
    shm       copies between processes of one host
    auto      the fastest of these that both sides have
    inproc    copies inside one process, for tests (a file)
    nixl      the NIXL library

An agent has one or more of these as `lanes` (save nixl, an agent of its own); they share a thread (`lane_thread`), with `mailbox`
and `iovec`. tcp and shm share `lane_link`, `lane_clients`, `framed_socket` and `rows`.
"""

from __future__ import annotations

from pathlib import Path

from baton_kv_transfer.transports.lanes import Lane

KINDS = ("ucx", "tcp", "shm", "auto", "inproc", "nixl")


def choose_lanes(kind: str) -> dict[str, type[Lane]]:
    """The lanes of a transport by name, in order of preference; UCX is imported here, when first needed.

    Raises:
        ValueError: unknown kind.
    """
    from baton_kv_transfer.transports.inproc import InprocLane
    from baton_kv_transfer.transports.shm.lane import SHMLane
    from baton_kv_transfer.transports.tcp.lane import TCPLane

    lanes: dict[str, type[Lane]] = {"shm": SHMLane, "tcp": TCPLane, "inproc": InprocLane}
    has_rdma = any(Path("/sys/class/infiniband").glob("*"))  # a network that accesses memory
    if kind == "ucx" or (kind == "auto" and (has_rdma or Path("/dev/nvidiactl").exists())):
        from baton_kv_transfer.transports.ucx.lane import UCXLane

        lanes["ucx"] = UCXLane
    kinds = (
        [kind] if kind != "auto" else ["shm", "ucx", "tcp"] if has_rdma else ["shm", "tcp", "ucx"]
    )
    chosen = {kind: lanes[kind] for kind in kinds if kind in lanes}
    if not chosen:
        raise ValueError(
            f"kv_transfer.transport must be {', '.join(KINDS[:-1])} or {KINDS[-1]}, got {kind!r}"
        )
    return chosen
