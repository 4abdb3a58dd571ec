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

    HANDSHAKE   connects to its worker; with push it also waits for slots
    OPEN        SUBSCRIBE was sent. The worker does not write here.
    PUSHING     SUBSCRIBE was sent with slots: the worker may write to them
    QUARANTINE  RELEASE was sent, or the worker is lost. The worker may still write to the slots.
    ENDED       RELEASE was sent, or the worker is lost. The worker cannot write.

    HANDSHAKE  -> OPEN, PUSHING  the worker is ready and, with push, the load has its slots
    PUSHING    -> OPEN           RELEASED was received: the worker confirms the end of its writes
    OPEN       -> ENDED          all blocks are verified, or the load has failed
    PUSHING    -> ENDED          all blocks are verified, and nothing is left to write
    PUSHING    -> QUARANTINE     the load is DRAINING, and the worker may still write
    QUARANTINE -> ENDED          RELEASED was received, or a fence cut the worker off
    HANDSHAKE  -> ENDED          the load is DRAINING, and the worker is ready
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
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
    PUSHING = enum.auto()
    QUARANTINE = enum.auto()
    ENDED = enum.auto()


@dataclass(frozen=True, slots=True)
class SharedHeads:
    """Heads that a worker of the producer shares with this worker. See side_channel.Subscribe."""

    heads: HeadRange
    subscriber: int
    num_subscribers: int

    @classmethod
    def between(
        cls, theirs: HeadRange, ours: HeadRange, engine: Sequence[HeadRange]
    ) -> SharedHeads:
        """Compare the heads of two workers.

        Args:
            theirs: heads of the producer's worker.
            ours: heads of this worker.
            engine: heads of all workers of this engine.
        """
        subscribers = [heads for heads in engine if heads.overlap(theirs).count]
        return cls(ours.overlap(theirs), subscribers.index(ours), len(subscribers))


@dataclass(slots=True, eq=False)
class RankTransfer:
    """What a load gets from one worker of the producer.

    Positions count the load's blocks from 0.
    """

    load: Load
    peer: Peer
    #: Rank of the producer's worker.
    rank: int
    shared: SharedHeads
    #: Bytes of the shared heads in a block.
    block_nbytes: int
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

    @property
    def is_open(self) -> bool:
        """SUBSCRIBE was sent, and RELEASE was not."""
        return self.state in (RankTransferState.OPEN, RankTransferState.PUSHING)

    @property
    def is_released(self) -> bool:
        """RELEASE was sent, or the worker is lost."""
        return self.state in (RankTransferState.QUARANTINE, RankTransferState.ENDED)

    @property
    def is_complete(self) -> bool:
        """All blocks were verified."""
        return self.state is not RankTransferState.HANDSHAKE and self.num_verified == len(
            self.checksums
        )

    @property
    def may_write(self) -> bool:
        """The worker may write to the load's slots."""
        is_last_write_over = self.last or self.num_written == len(self.checksums)
        return self.state is RankTransferState.QUARANTINE or (
            self.state is RankTransferState.PUSHING
            and not (self.is_complete and is_last_write_over)
        )

    @property
    def is_settled(self) -> bool:
        """No read or write of this transfer can reach this engine's memory any more."""
        return self.state in (RankTransferState.HANDSHAKE, RankTransferState.ENDED)

    def end_writes(self) -> None:
        """Record that the worker cannot write any more: it confirmed, or a fence cut it off."""
        if self.state is RankTransferState.PUSHING:
            self.state = RankTransferState.OPEN
        elif self.state is RankTransferState.QUARANTINE:
            self.state = RankTransferState.ENDED


@dataclass(slots=True, eq=False)
class Load:
    """A running LoadRequest."""

    request: LoadRequest
    generation: int
    first_worker: Peer
    started: float
    #: The producer writes the blocks to `slots`. False: they are read.
    push: bool
    #: [num_blocks]: number of per-rank transfers that have not verified the block. Valid once the
    #: load has per-rank transfers.
    missing: NDArray[np.int32]
    state: LoadState = LoadState.HANDSHAKE
    rank_transfers: list[RankTransfer] = field(default_factory=list)
    #: With push: a slot per block, from the first SUBSCRIBE to the end of the load.
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
            if not rank_transfer.is_released
        ]

    def result(self) -> LoadResult:
        """Return the number of leading blocks that every per-rank transfer verified."""
        if not self.rank_transfers:
            return LoadResult(0, self.error)
        unverified = np.flatnonzero(self.missing)
        return LoadResult(int(unverified[0]) if len(unverified) else self.num_blocks, self.error)
