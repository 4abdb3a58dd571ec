"""Transports of the agent: `inproc` copies inside one process, `ucx` moves bytes between processes, over UCX and lanes of ours."""

from __future__ import annotations

from baton_kv_transfer.transports.base import Transport


def create_transport(kind: str, name: str, host: str = "") -> Transport:
    """The transport `kind` of the agent called `name`; UCX is imported here, when first needed.

    Args:
        host: address to be reached at, see UCXTransport.

    Raises:
        ValueError: unknown kind.
        OSError: `host` is no address of this machine.
        UCXError: UCX is missing or does not start.
    """
    if kind == "inproc":
        from baton_kv_transfer.transports.inproc import InprocTransport

        return InprocTransport(name)
    if kind == "ucx":
        from baton_kv_transfer.transports.ucx import UCXTransport

        return UCXTransport(name, host)
    raise ValueError(f"no such transport: {kind!r}")
