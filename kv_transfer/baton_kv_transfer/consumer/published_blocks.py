"""Checks and records the blocks that a producer's worker has published in a PUBLISH."""

from __future__ import annotations

from baton_kv_transfer.connector import FailureReason
from baton_kv_transfer.consumer.load_state import RankTransfer, RankTransferState
from baton_kv_transfer.side_channel import Publish


class PublishError(Exception):
    """Raised for a PUBLISH that is invalid or belongs to another prompt. The load must fail."""

    def __init__(self, reason: FailureReason, why: str) -> None:
        super().__init__(why)
        self.reason = reason


def record_published(rank_transfer: RankTransfer, message: Publish) -> list[int]:
    """Record the published blocks in a per-rank transfer that is OPEN or PUSHING.

    Blocks that were not requested, or were published before, have no effect.

    Returns:
        The positions of the blocks that were not published before.

    Raises:
        PublishError: a block has an invalid index or slot, or tokens that differ from the
            request's. Also if the producer writes after it has sent RELEASED, or if requested
            blocks are missing after the last PUBLISH.
    """
    load, request, peer = rank_transfer.load, rank_transfer.load.request, rank_transfer.peer
    if message.written and load.push and rank_transfer.state is not RankTransferState.PUSHING:
        why = f"{peer.name} wrote blocks after it had sent RELEASED"
        raise PublishError(FailureReason.PROTOCOL, why)
    new = []
    for block in message.blocks:
        position = block.index - request.first_block_index
        if block.index < 0 or not 0 <= block.slot < peer.num_slots:
            raise PublishError(
                FailureReason.PROTOCOL,
                f"{peer.name} published block {block.index} in slot {block.slot} of "
                f"{peer.num_slots}",
            )
        if not 0 <= position < load.num_blocks or rank_transfer.peer_slots[position] >= 0:
            continue  # in the prefix cache, not requested, or published before
        if block.chain_hash != request.block_hashes[position]:
            raise PublishError(
                FailureReason.OTHER_PROMPT,
                f"block {block.index} of {peer.name} has other tokens than this engine's request: "
                "the engines received different prompts",
            )
        rank_transfer.peer_slots[position] = block.slot
        rank_transfer.checksums[position] = block.checksum
        new.append(position)
    if message.last and (published := int((rank_transfer.peer_slots >= 0).sum())) < load.num_blocks:
        raise PublishError(
            FailureReason.OTHER_PROMPT,
            f"{peer.name} published {published} of the {load.num_blocks} requested blocks",
        )
    return new
