"""Makes the connector an engine's configuration asks for; the transport and numpy are imported when the first one is made."""

from __future__ import annotations

from baton_engine.protocol.config import KVTransferConfig
from baton_engine.protocol.service_key import ServiceKey
from baton_kv_transfer.connector import KVConnectorWorker

MODES = ("pull", "push")


def create_connector(
    config: KVTransferConfig,
    *,
    instance_id: str,
    compatibility_hash: str,
    host: str,
    rank: int = 0,
    service_key: ServiceKey | None = None,
) -> KVConnectorWorker:
    """The worker side of the connector; it serves once register_kv_cache was called.

    Args:
        instance_id: of this engine process.
        compatibility_hash: of what must agree with peers, see `baton_engine.protocol.config.compatibility_hash`.
        host: the pod's own address. The side channel of rank 0 binds config.port on it (0: any free port), those of the others
            any free port: see `port`.
        rank: of this worker among those of its engine; the transfer agent is called `<instance_id>/<rank>`.
        service_key: peers that do not have it are refused. None: those that have one are.

    Raises:
        ValueError: role none, unknown transport or mode, or rdma without verbs or a device.
        OSError: the side channel's address is taken or not this machine's.
        UCXError: UCX is missing or does not start.
    """
    if config.mode not in MODES:
        raise ValueError(f"kv_transfer.mode must be one of {', '.join(MODES)}, got {config.mode!r}")
    if config.rdma:
        from baton_kv_transfer.transports.ucx.capabilities import require_rdma

        require_rdma()
    from baton_kv_transfer.transfer_connector import TransferConnector

    return TransferConnector(
        config,
        instance_id=instance_id,
        compatibility_hash=compatibility_hash,
        host=host,
        rank=rank,
        service_key=service_key,
    )
