"""The state of one load and of its rank_transfers: what is wanted, what came, what was proved. No I/O; `consumer` acts on it.

A load

    HANDSHAKE   the producer's first worker is greeted: it names the workers whose heads are needed here
    LOADING    a rank_transfer per such worker; blocks that it publishes are read, or were written by it, and are proved
    DRAINING   the outcome is known; nothing new is begun. The load ends, with its one LoadResult, when all rank_transfers are settled.

    HANDSHAKE -> LOADING     the first worker is ready
    LOADING  -> DRAINING    all rank_transfers proved all blocks, or anything failed; failures come from HANDSHAKE, too
    DRAINING -> (ended)     all rank_transfers are settled: no batch in hand, nothing the producer may still write

A rank_transfer

    HANDSHAKE   its worker is greeted (with push: or the load waits for slots)
    OPEN       SUBSCRIBE was sent
    RELEASED   RELEASE was sent, or the worker is lost; with push the slots stay in quarantine until it confirmed, or until a
               fence cut it off
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
    HANDSHAKE = enum.auto()
    LOADING = enum.auto()
    DRAINING = enum.auto()


class RankTransferState(enum.Enum):
    HANDSHAKE = enum.auto()
    OPEN = enum.auto()
    RELEASED = enum.auto()


@dataclass(slots=True, eq=False)
class RankTransfer:
    """What one load gets from one of the producer's workers. Positions count the load's blocks: [0, num_blocks)."""

    load: Load
    peer: Peer
    rank: int
    """Which of the producer's workers."""
    heads: HeadRange
    """What both workers have."""
    block_nbytes: int
    """Of these heads."""
    subscriber: int
    num_subscribers: int
    """See side_channel.Subscribe."""
    last_block: float
    """When blocks were published or proved last."""
    deadline: float
    """Without blocks or word that more will come, the load fails."""
    slots_there: NDArray[np.int64]
    """[num_blocks]: slot of the producer's memory; -1: not published."""
    checksums: list[int]
    """[num_blocks]: as published."""
    reread: NDArray[np.bool_]
    """[num_blocks]: its proof failed once."""
    state: RankTransferState = RankTransferState.HANDSHAKE
    queued: list[int] = field(default_factory=list)
    """Positions to read, not posted yet."""
    num_batches: int = 0
    """In hand: posted, or there and not proved yet."""
    num_verified: int = 0
    num_written: int = 0
    """With push: published as written."""
    last: bool = False
    """PUBLISH(last) came."""
    quarantined: bool = False
    """The producer's worker may write to the load's slots."""

    @property
    def is_complete(self) -> bool:
        """Nothing more is needed from it."""
        return self.state is not RankTransferState.HANDSHAKE and self.num_verified == len(
            self.checksums
        )

    @property
    def is_last_write_over(self) -> bool:
        """The producer's worker has nothing left to write."""
        return self.last or self.num_written == len(self.checksums)

    @property
    def num_published(self) -> int:
        return int((self.slots_there >= 0).sum())

    @property
    def is_settled(self) -> bool:
        """Nothing that belongs to it can write to this engine's memory."""
        return (
            self.state is not RankTransferState.OPEN
            and self.num_batches == 0
            and not self.quarantined
        )


@dataclass(slots=True, eq=False)
class Load:
    """One LoadRequest under way."""

    request: LoadRequest
    generation: int
    first_worker: Peer
    started: float
    push: bool
    missing: NDArray[np.int32]
    """[num_blocks]: how many rank_transfers have not proved it; only meaningful once there are rank_transfers."""
    state: LoadState = LoadState.HANDSHAKE
    rank_transfers: list[RankTransfer] = field(default_factory=list)
    slots: list[int] | None = None
    """With push: a slot per block, of all rank_transfers, from the first SUBSCRIBE to the end."""
    drain_deadline: float = 0.0
    reason: FailureReason | None = None
    """None: all went well so far."""
    error: str = ""

    @property
    def transfer_id(self) -> str:
        return self.request.transfer_id

    @property
    def num_blocks(self) -> int:
        return len(self.request.block_ids)

    @property
    def peers(self) -> list[Peer]:
        """Whose loss fails this load: those from whom something is still needed."""
        if self.state is LoadState.HANDSHAKE:
            return [self.first_worker]
        return [
            rank_transfer.peer
            for rank_transfer in self.rank_transfers
            if rank_transfer.state is not RankTransferState.RELEASED
        ]

    def result(self) -> LoadResult:
        """Leading blocks that every rank_transfer proved."""
        if not self.rank_transfers:
            return LoadResult(0, self.error)
        unverified = np.flatnonzero(self.missing)
        return LoadResult(int(unverified[0]) if len(unverified) else self.num_blocks, self.error)
