"""Counters and gauges of a rank of an expert-parallel group."""

from __future__ import annotations

import msgspec

from baton_engine.metrics.request_metrics import Histogram
from baton_protocol.topology import RankPhase

_PAUSE_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class TopologyStats(msgspec.Struct, kw_only=True):
    """Gauges and counters of a rank of an expert-parallel group.

    The counters start at 0 when the engine starts. Comments mark gauges and counters.
    """

    # Gauges
    phase: RankPhase
    #: Number of the generation. 0: none.
    generation: int = 0
    rank: int = 0
    #: Number of ranks of the generation.
    size: int = 0
    #: Number of the running wave. Outside a wave: number of the next wave.
    wave: int = 0
    wave_running: bool = False
    # Counters
    #: Number of steps run together with the other ranks.
    num_steps: int = 0
    #: Dummy batches: steps in which this rank only ran its experts for other ranks.
    num_steps_without_tokens: int = 0
    #: Generations that lost a member while this rank was in them.
    num_broken: int = 0
    #: Time in exchanges of votes, including the wait for the slowest rank.
    exchange_seconds: float = 0.0


def commit_pauses() -> dict[str, Histogram]:
    """Create one histogram of pause times for each kind of commit.

    A commit moves a rank to the next generation (version of the expert-parallel group's topology).
    For a `planned` commit, the pause is the duration of the commit. For a `broken` commit, the
    pause starts when the old generation broke, and ends with the commit.
    """
    return {
        kind: Histogram("Time without steps while the generation changed.", _PAUSE_S)
        for kind in KINDS
    }


KINDS = ("planned", "broken")
