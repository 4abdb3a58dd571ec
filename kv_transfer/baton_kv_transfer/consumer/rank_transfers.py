"""Decides which KV heads this worker requests from which worker of a producer.

Each worker of an engine has a range of the model's KV heads, and the engines may have different
tensor-parallel sizes. A load gets a per-rank transfer for each worker of the producer that shares
heads with this worker. The transfer carries only the shared heads.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import zmq

from baton_kv_transfer.consumer.load_state import Load, RankTransfer, SharedHeads
from baton_kv_transfer.consumer.peer import Peer
from baton_kv_transfer.consumer.peer_registry import PeerRegistry
from baton_kv_transfer.context import ConnectorContext
from baton_kv_transfer.memory.layout import HeadRange


def check_heads(context: ConnectorContext) -> None:
    """Check the KV heads of this engine's workers.

    Raises:
        ValueError: the engine has more workers than KV heads, or this worker's heads are not in
            `context.ranks`.
    """
    heads, num_heads = context.memory.layout.heads, context.memory.layout.num_model_heads
    worker_heads = [rank.heads for rank in context.ranks]
    if len(worker_heads) > num_heads:
        raise ValueError(
            f"{len(worker_heads)} workers share {num_heads} KV heads: "
            "blocks of replicated heads are not exchanged"
        )
    if heads not in worker_heads:
        raise ValueError(f"this worker's {heads} are not among the engine's: {worker_heads}")


def connect_workers(
    context: ConnectorContext, peers: PeerRegistry, lead_peer: Peer, now: float
) -> tuple[dict[int, Peer], str]:
    """Connect to the producer's workers that share heads with this worker.

    Args:
        context: this worker's memory.
        peers: the connected peers, to which new connections are added.
        lead_peer: the producer's first worker, which names all workers when it is ready.
        now: the current time.

    Returns:
        The workers by rank, and an error: why a connection failed; empty if none failed.
    """
    workers, error = {}, ""
    for rank, address in enumerate(lead_peer.ranks if lead_peer.is_ready else ()):
        if not context.memory.layout.heads.overlap(address.heads).count:
            continue
        host, port = address.host, address.port
        try:
            workers[rank] = (
                peers.connect(host, port, lead_peer.peer_instance_id, now) if rank else lead_peer
            )
        except zmq.ZMQError as failure:
            error = (
                f"cannot connect to worker {rank} of {lead_peer.name} at {host}:{port}: {failure}"
            )
    return workers, error


def create_rank_transfers(
    context: ConnectorContext, load: Load, workers: dict[int, Peer], now: float
) -> list[RankTransfer]:
    """Return a RankTransfer for each worker that `connect_workers` returned.

    Args:
        context: this worker's memory and timeouts, and the heads of all workers of this engine.
        load: the load, whose lead peer is ready.
        workers: the producer's workers that share heads with this worker, by rank.
        now: the current time.
    """
    transfers = []
    for rank, peer in workers.items():
        shared = _shared_heads(
            load.lead_peer.ranks[rank].heads,
            context.memory.layout.heads,
            (worker.heads for worker in context.ranks),
        )
        transfers.append(
            RankTransfer(
                load,
                peer,
                rank,
                shared,
                block_nbytes=shared.heads.count * context.memory.layout.head_nbytes,
                last_block=now,
                deadline=now + context.config.load_timeout_s,
                peer_slots=np.full(load.num_blocks, -1, dtype=np.int64),
                checksums=[0] * load.num_blocks,
                reread=np.zeros(load.num_blocks, dtype=np.bool_),
            )
        )
    return transfers


def _shared_heads(theirs: HeadRange, ours: HeadRange, engine: Iterable[HeadRange]) -> SharedHeads:
    """Return the KV heads that both a worker of the producer and this worker hold.

    The transfer between the two carries these heads. Other workers of this engine can hold heads of
    the same producer's worker, so the result also counts and numbers this worker among them.

    Args:
        theirs: heads of the producer's worker.
        ours: heads of this worker.
        engine: heads of all workers of this engine, in rank order.
    """
    subscribers = [heads for heads in engine if heads.overlap(theirs).count]
    return SharedHeads(ours.overlap(theirs), subscribers.index(ours), len(subscribers))
