"""Makes the connector an engine's configuration asks for; UCX and numpy are imported when the first one is made."""

from __future__ import annotations

from baton_engine.protocol.config import KVTransferConfig
from baton_kv_transfer.connector import KVConnectorWorker

TRANSPORTS = ("ucx", "inproc")


def create_connector(
    config: KVTransferConfig, *, instance_id: str, compatibility_hash: str, host: str
) -> KVConnectorWorker:
    """The worker side of the connector; it serves once register_kv_cache was called.

    Args:
        instance_id: of this engine process; also the transfer agent's name.
        compatibility_hash: of what must agree with peers, see `baton_engine.protocol.config.compatibility_hash`.
        host: the pod's own address; the side channel binds config.port on it (0: any free port, see `port`).

    Raises:
        ValueError: role none, or unknown transport.
        OSError: the side channel's address is taken or not this machine's.
        UCXError: UCX is missing or does not start.
    """
    if config.transport not in TRANSPORTS:
        raise ValueError(
            f"kv_transfer.transport must be one of {', '.join(TRANSPORTS)}, got {config.transport!r}"
            + (" (nixl is not available yet: use ucx)" if config.transport == "nixl" else "")
        )
    from baton_kv_transfer.transfer_connector import TransferConnector

    return TransferConnector(config, instance_id=instance_id, compatibility_hash=compatibility_hash, host=host)
