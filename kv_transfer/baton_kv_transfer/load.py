"""The state of one load and of its legs: what is wanted, what came, what was proved. No I/O; `consumer` acts on it.

A load

    GREETING   the producer's first worker is greeted: it names the workers whose heads are needed here
    LOADING    a leg per such worker; blocks that it publishes are read, or were written by it, and are proved
    DRAINING   the outcome is known; nothing new is begun. The load ends, with its one LoadResult, when all legs are settled.

    GREETING -> LOADING     the first worker is ready
    LOADING  -> DRAINING    all legs proved all blocks, or anything failed; failures come from GREETING, too
    DRAINING -> (ended)     all legs are settled: no batch in hand, nothing the producer may still write

A leg

    GREETING   its worker is greeted (with push: or the load waits for slots)
    OPEN       SUBSCRIBE was sent
    RELEASED   RELEASE was sent, or the worker is lost; with push the slots stay in quarantine until it confirmed, or until a
               fence cut it off
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.connector import BlockLoad, FailureReason, HeadRange, LoadResult

if TYPE_CHECKING:
    from baton_kv_transfer.peer import Peer


class LoadState(enum.Enum):
    GREETING = enum.auto()
    LOADING = enum.auto()
    DRAINING = enum.auto()


class LegState(enum.Enum):
    GREETING = enum.auto()
    OPEN = enum.auto()
    RELEASED = enum.auto()


@dataclass(slots=True, eq=False)
class Leg:
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
    state: LegState = LegState.GREETING
    wanted: list[int] = field(default_factory=list)
    """Positions to read, not posted yet."""
    num_batches: int = 0
    """In hand: posted, or there and not proved yet."""
    num_proved: int = 0
    num_written: int = 0
    """With push: published as written."""
    last: bool = False
    """PUBLISH(last) came."""
    quarantined: bool = False
    """The producer's worker may write to the load's slots."""

    @property
    def complete(self) -> bool:
        """Nothing more is needed from it."""
        return self.state is not LegState.GREETING and self.num_proved == len(self.checksums)

    @property
    def is_last_write_over(self) -> bool:
        """The producer's worker has nothing left to write."""
        return self.last or self.num_written == len(self.checksums)

    @property
    def num_published(self) -> int:
        return int((self.slots_there >= 0).sum())

    @property
    def settled(self) -> bool:
        """Nothing that belongs to it can write to this engine's memory."""
        return self.state is not LegState.OPEN and self.num_batches == 0 and not self.quarantined


@dataclass(slots=True, eq=False)
class Load:
    """One BlockLoad under way."""

    wish: BlockLoad
    generation: int
    first_worker: Peer
    started: float
    push: bool
    missing: NDArray[np.int32]
    """[num_blocks]: how many legs have not proved it; only meaningful once there are legs."""
    state: LoadState = LoadState.GREETING
    legs: list[Leg] = field(default_factory=list)
    slots: list[int] | None = None
    """With push: a slot per block, of all legs, from the first SUBSCRIBE to the end."""
    drain_deadline: float = 0.0
    reason: FailureReason | None = None
    """None: all went well so far."""
    error: str = ""

    @property
    def transfer_id(self) -> str:
        return self.wish.transfer_id

    @property
    def num_blocks(self) -> int:
        return len(self.wish.block_ids)

    @property
    def peers(self) -> list[Peer]:
        """Whose loss fails this load: those from whom something is still needed."""
        if self.state is LoadState.GREETING:
            return [self.first_worker]
        return [leg.peer for leg in self.legs if leg.state is not LegState.RELEASED]

    def result(self) -> LoadResult:
        """Leading blocks that every leg proved."""
        if not self.legs:
            return LoadResult(0, self.error)
        unproved = np.flatnonzero(self.missing)
        return LoadResult(int(unproved[0]) if len(unproved) else self.num_blocks, self.error)
