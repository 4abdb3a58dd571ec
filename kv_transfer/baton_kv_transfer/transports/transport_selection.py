"""Chooses the transports that a value of kv_transfer.transport stands for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from baton_kv_transfer.transports.shm.shm_transport import SHMTransport
from baton_kv_transfer.transports.tcp.tcp_transport import TCPTransport
from baton_kv_transfer.transports.transport import Transport


def _load_ucx() -> type[Transport]:
    from baton_kv_transfer.transports.ucx.ucx_transport import UCXTransport

    return UCXTransport


#: By name of a transport: a function that returns the transport's class. UCX is imported on first
#: use. Tests add entries.
LOADERS: dict[str, Callable[[], type[Transport]]] = {
    "shm": lambda: SHMTransport,
    "tcp": lambda: TCPTransport,
    "ucx": _load_ucx,
}


def choose_transports(kind: str) -> dict[str, type[Transport]]:
    """Return the name and class of each transport that `kind` selects, in order of preference.

    Args:
        kind: name of a transport, or `auto` for all transports that may work on this machine.

    Raises:
        ValueError: the kind is unknown.
    """
    if kind == "auto":
        has_rdma = any(Path("/sys/class/infiniband").glob("*"))
        has_gpu = Path("/dev/nvidiactl").exists()
        kinds = ["shm", "ucx", "tcp"] if has_rdma else ["shm", "tcp", *(["ucx"] if has_gpu else [])]
    elif kind in LOADERS:
        kinds = [kind]
    else:
        raise ValueError(
            f"there is no transport {kind!r}; there are auto, nixl, {', '.join(sorted(LOADERS))}"
        )
    return {kind: LOADERS[kind]() for kind in kinds}
