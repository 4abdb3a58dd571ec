"""Transports of the agent, each in a room of its own:

    ucx       UCX moves every byte, of host or device memory, over TCP, RDMA or what else it has for peers that may fail
    tcp       authenticated sockets, for host memory
    shm       copies between processes of one host
    auto      the fastest of these that both sides have
    inproc    copies inside one process, for tests
    nixl      the NIXL library; an agent of its own, not a Transport

`lanes` makes a transport of one or more of the first three; they share a thread (`lane_thread`), with `mailbox` and `iovec`. tcp
and shm share `lane_link`, `lane_clients`, `lane_protocol`, `framed_socket` and `rows`.
"""

from __future__ import annotations

import os
from pathlib import Path

from baton_kv_transfer.transports.base import Transport


def create_transport(kind: str, name: str, host: str = "") -> Transport:
    """The transport `kind` of the agent called `name`; UCX is imported here, when first needed.

    Args:
        host: address to listen at, and to be reached at; empty: $POD_IP, or else 127.0.0.1.

    Raises:
        ValueError: unknown kind.
        OSError: `host` is no address of this machine.
        UCXError: UCX is missing or does not start.
    """
    if kind == "inproc":
        from baton_kv_transfer.transports.inproc import InprocTransport

        return InprocTransport(name)
    from baton_kv_transfer.transports.lanes import Lane, LaneTransport
    from baton_kv_transfer.transports.shm.lane import SHMLane
    from baton_kv_transfer.transports.tcp.lane import TCPLane

    lanes: dict[str, type[Lane]] = {"shm": SHMLane, "tcp": TCPLane}
    if kind == "ucx" or (kind == "auto" and (has_rdma() or has_gpu())):
        from baton_kv_transfer.transports.ucx.lane import UCXLane

        lanes["ucx"] = UCXLane
    kinds = [kind] if kind != "auto" else ["shm", "ucx", "tcp"] if has_rdma() else ["shm", "tcp", "ucx"]
    chosen = {kind: lanes[kind] for kind in kinds if kind in lanes}
    if not chosen:
        raise ValueError(f"no such transport: {kind!r}")
    return LaneTransport(name, host or os.environ.get("POD_IP") or "127.0.0.1", chosen)


def has_rdma() -> bool:
    """Whether this machine has a network that accesses memory."""
    return any(Path("/sys/class/infiniband").glob("*"))


def has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()
