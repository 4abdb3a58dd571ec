"""The states and data of a load and of its per-rank transfers, without I/O.

A load ends with one LoadResult:

    state       waits for                                ended by
    HANDSHAKE   the lead peer, which names all workers   handshake -> LOADING; failure -> SETTLING
    LOADING     blocks to read and verify                all verified, or failure -> SETTLING
    SETTLING    the end of running reads and writes      all transfers settled -> LoadResult

A per-rank transfer is the part of a load from one worker of the producer:

    state       waits for                                ended by
    HANDSHAKE   the worker and, with push, slots         SUBSCRIBE -> OPEN, or PUSHING with slots
    OPEN        blocks, which this engine reads          all verified, or failure -> ENDED
    PUSHING     blocks, which the worker writes here     all verified, no write left -> ENDED;
                                                         RELEASED -> OPEN;
                                                         load SETTLING, a write left -> QUARANTINE
    QUARANTINE  the end of the worker's writes           RELEASED or a fence -> ENDED
    ENDED       nothing

RELEASE is sent on the way to QUARANTINE and ENDED, unless the worker is lost. If a load fails, its
transfers in HANDSHAKE go to ENDED if their worker is ready, and stay in HANDSHAKE if it is not.
While blocks are in flight or unverified, a transfer stays OPEN or PUSHING.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.connector import FailureReason, LoadRequest, LoadResult
from baton_kv_transfer.consumer.peer import Peer
from baton_kv_transfer.memory.layout import HeadRange


class LoadState(enum.Enum):
    """The states of a load. The module docstring has a table of them."""

    HANDSHAKE = enum.auto()
    LOADING = enum.auto()
    SETTLING = enum.auto()


class RankTransferState(enum.Enum):
    """The states of a per-rank transfer. The module docstring has a table of them."""

    HANDSHAKE = enum.auto()
    OPEN = enum.auto()
    PUSHING = enum.auto()
    QUARANTINE = enum.auto()
    ENDED = enum.auto()


@dataclass(slots=True, eq=False)
class RankTransfer:
    """The part of a load that comes from one worker of the producer.

    A position is the index of a block among the load's blocks.
    """

    load: Load
    peer: Peer
    #: Rank of the producer's worker.
    rank: int
    #: KV heads that both the producer's worker and this worker hold.
    heads: HeadRange
    #: Index of this worker among this engine's workers that share heads with the producer's worker.
    subscriber: int
    #: Number of this engine's workers that share heads with the producer's worker.
    num_subscribers: int
    #: Size of `heads` in a block, in bytes.
    block_nbytes: int
    #: Time at which blocks were last published or verified; before that, the time of SUBSCRIBE or
    #: of this object's creation.
    last_block: float
    #: Time at which the load fails. Each block and each PENDING postpones this time.
    deadline: float
    #: [num_blocks]: slot of the peer's memory that has the block; -1: not published.
    peer_slots: NDArray[np.int64]
    #: [num_blocks]: checksum that the producer published for the block.
    checksums: list[int]
    #: [num_blocks]: whether the block differed from its checksum once and is read again.
    reread: NDArray[np.bool_]
    state: RankTransferState = RankTransferState.HANDSHAKE
    #: Positions to read, not posted yet.
    queued: list[int] = field(default_factory=list)
    #: Number of batches that are posted, or have arrived and are not verified yet.
    num_batches: int = 0
    num_verified: int = 0
    #: With push: number of blocks that the producer has published as written.
    num_written: int = 0
    #: Whether the last PUBLISH was received.
    is_last_received: bool = False

    @property
    def is_open(self) -> bool:
        """Whether the state is OPEN or PUSHING."""
        return self.state in (RankTransferState.OPEN, RankTransferState.PUSHING)

    @property
    def is_released(self) -> bool:
        """Whether RELEASE was queued. A lost worker does not receive the message."""
        return self.state in (RankTransferState.QUARANTINE, RankTransferState.ENDED)

    @property
    def is_complete(self) -> bool:
        """Whether all blocks of this per-rank transfer were verified."""
        return self.state is not RankTransferState.HANDSHAKE and self.num_verified == len(
            self.checksums
        )

    @property
    def may_write(self) -> bool:
        """Whether the producer's worker may still write to the load's slots."""
        is_last_write_over = self.is_last_received or self.num_written == len(self.checksums)
        return self.state is RankTransferState.QUARANTINE or (
            self.state is RankTransferState.PUSHING
            and not (self.is_complete and is_last_write_over)
        )

    @property
    def is_settled(self) -> bool:
        """Whether no read or write of this transfer can reach this engine's memory."""
        return self.state in (RankTransferState.HANDSHAKE, RankTransferState.ENDED)

    def end_writes(self) -> None:
        """Record that the producer's worker cannot write to this engine's memory any more.

        Call this after RELEASED or after `Agent.fence`.
        """
        if self.state is RankTransferState.PUSHING:
            self.state = RankTransferState.OPEN
        elif self.state is RankTransferState.QUARANTINE:
            self.state = RankTransferState.ENDED


@dataclass(slots=True, eq=False)
class Load:
    """A load: its LoadRequest, its state, its per-rank transfers, and the reason if it failed."""

    request: LoadRequest
    #: Random number that the messages about this load carry, see `side_channel`.
    generation: int
    #: The producer's first worker (rank 0), which names all workers.
    lead_peer: Peer
    started: float
    #: True: the producer writes the blocks to `slots`. False: this engine reads the blocks.
    push: bool
    #: [num_blocks]: number of per-rank transfers that have not verified the block. Valid once the
    #: load has per-rank transfers.
    missing: NDArray[np.int32]
    state: LoadState = LoadState.HANDSHAKE
    rank_transfers: list[RankTransfer] = field(default_factory=list)
    #: With push: a slot per block, from the first SUBSCRIBE to the end of the load.
    slots: list[int] | None = None
    #: In the state SETTLING: time at which peers are disconnected or cut off.
    settle_deadline: float = 0.0
    #: Why the load failed; None: it has not failed.
    reason: FailureReason | None = None
    error: str = ""

    @property
    def transfer_id(self) -> str:
        return self.request.transfer_id

    @property
    def num_blocks(self) -> int:
        return len(self.request.block_ids)

    @property
    def peers(self) -> list[Peer]:
        """Peers that the load still needs. If one of them is lost, the load fails."""
        if self.state is LoadState.HANDSHAKE:
            return [self.lead_peer]
        return [
            rank_transfer.peer
            for rank_transfer in self.rank_transfers
            if not rank_transfer.is_released
        ]

    @property
    def deadlines(self) -> list[float]:
        """Times at which the load or a peer may fail, or a fence (`Agent.fence`) may be needed."""
        if self.state is LoadState.SETTLING:
            return [self.settle_deadline]
        return [each.deadline for each in self.rank_transfers if not each.is_complete]

    def result(self) -> LoadResult:
        """Return how many leading blocks were verified, and the error if the load failed."""
        if not self.rank_transfers:
            return LoadResult(0, self.error)
        unverified = np.flatnonzero(self.missing)
        return LoadResult(int(unverified[0]) if len(unverified) else self.num_blocks, self.error)
