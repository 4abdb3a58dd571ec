"""Decides which KV heads this worker requests from which worker of a producer.

Each worker of an engine has a range of the model's KV heads, and the engines may have different
tensor-parallel sizes. A load gets a per-rank transfer for each worker of the producer that shares
heads with this worker. The transfer carries only the shared heads.
"""

from __future__ import annotations

import numpy as np

from baton_kv_transfer.connector_context import ConnectorContext
from baton_kv_transfer.consumer.load_state import Load, RankTransfer
from baton_kv_transfer.consumer.peer import Peer


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


def create_rank_transfers(
    context: ConnectorContext, load: Load, workers: dict[int, Peer], now: float
) -> list[RankTransfer]:
    """Return a RankTransfer for each worker that `PeerRegistry.connect_workers` returned.

    Args:
        context: this worker's memory and timeouts, and the heads of all workers of this engine.
        load: the load, whose lead peer is ready.
        workers: the producer's workers that share heads with this worker, by rank.
        now: the current time.
    """
    transfers = []
    layout = context.memory.layout
    for rank, peer in workers.items():
        theirs = load.lead_peer.ranks[rank].heads
        heads = layout.heads.overlap(theirs)
        # Several workers of this engine can share heads with one worker of the producer.
        subscribers = [each.heads for each in context.ranks if each.heads.overlap(theirs).count]
        transfers.append(
            RankTransfer(
                load,
                peer,
                rank,
                heads,
                subscribers.index(layout.heads),
                len(subscribers),
                block_nbytes=heads.count * layout.head_nbytes,
                last_block=now,
                deadline=now + context.config.load_timeout_s,
                peer_slots=np.full(load.num_blocks, -1, dtype=np.int64),
                checksums=[0] * load.num_blocks,
                reread=np.zeros(load.num_blocks, dtype=np.bool_),
            )
        )
    return transfers
