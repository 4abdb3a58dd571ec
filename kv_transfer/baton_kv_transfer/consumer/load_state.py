"""The state of a load and of its per-rank transfers. No I/O; `load_manager` acts on it.

Load

    HANDSHAKE  connects to the producer's first worker, which names the workers with needed heads
    LOADING    has one per-rank transfer for each of these workers. Blocks that a worker publishes
               are read, unless the worker wrote them here (push). All blocks are verified.
    DRAINING   has an outcome and starts nothing new. It ends, with its one LoadResult, when all
               per-rank transfers are settled.

    HANDSHAKE -> LOADING    the first worker is ready
    LOADING   -> DRAINING   every per-rank transfer verified all blocks, or anything failed;
                            HANDSHAKE -> DRAINING on failures
    DRAINING  -> (ended)    no batch is in flight or unverified, and the producer cannot write

Per-rank transfer

    HANDSHAKE  connects to its worker; with push it also waits for slots
    OPEN       SUBSCRIBE was sent
    RELEASED   RELEASE was sent, or the worker is lost. With push the slots stay in quarantine until
               the worker confirms, or until a fence cuts it off.
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
    """What a load gets from one worker of the producer.

    Positions count the load's blocks from 0.
    """

    load: Load
    peer: Peer
    #: Rank of the producer's worker.
    rank: int
    #: Heads that both workers have.
    heads: HeadRange
    #: Bytes of these heads in a block.
    block_nbytes: int
    #: As in side_channel.Subscribe.
    subscriber: int
    #: As in side_channel.Subscribe.
    num_subscribers: int
    #: Time at which blocks were last published or verified.
    last_block: float
    #: Time at which the load fails. Blocks and PENDING extend it.
    deadline: float
    #: [num_blocks]: slot of the producer's memory; -1: not published.
    slots_there: NDArray[np.int64]
    #: [num_blocks]: as published.
    checksums: list[int]
    #: [num_blocks]: whether the verification failed once.
    reread: NDArray[np.bool_]
    state: RankTransferState = RankTransferState.HANDSHAKE
    #: Positions to read, not posted yet.
    queued: list[int] = field(default_factory=list)
    #: Batches in hand: posted, or arrived and not verified yet.
    num_batches: int = 0
    num_verified: int = 0
    #: With push: blocks published as written.
    num_written: int = 0
    #: PUBLISH(last) was received.
    last: bool = False
    #: The producer's worker may write to the load's slots.
    quarantined: bool = False

    @property
    def is_complete(self) -> bool:
        """All blocks were verified."""
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
        """No read or write of this transfer can reach this engine's memory any more."""
        return (
            self.state is not RankTransferState.OPEN
            and self.num_batches == 0
            and not self.quarantined
        )


@dataclass(slots=True, eq=False)
class Load:
    """A running LoadRequest."""

    request: LoadRequest
    generation: int
    first_worker: Peer
    started: float
    push: bool
    #: [num_blocks]: number of per-rank transfers that have not verified the block. Valid once the
    #: load has per-rank transfers.
    missing: NDArray[np.int32]
    state: LoadState = LoadState.HANDSHAKE
    rank_transfers: list[RankTransfer] = field(default_factory=list)
    #: With push: a slot per block, from the first SUBSCRIBE to the end.
    slots: list[int] | None = None
    drain_deadline: float = 0.0
    #: None: no failure so far.
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
        """Peers whose loss fails this load, because blocks of them are missing."""
        if self.state is LoadState.HANDSHAKE:
            return [self.first_worker]
        return [
            rank_transfer.peer
            for rank_transfer in self.rank_transfers
            if rank_transfer.state is not RankTransferState.RELEASED
        ]

    def result(self) -> LoadResult:
        """Return the number of leading blocks that every per-rank transfer verified."""
        if not self.rank_transfers:
            return LoadResult(0, self.error)
        unverified = np.flatnonzero(self.missing)
        return LoadResult(int(unverified[0]) if len(unverified) else self.num_blocks, self.error)
