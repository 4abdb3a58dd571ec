"""What a rank of an expert-parallel group counts of its generations and waves."""

from __future__ import annotations

import msgspec

from baton_engine.metrics.request_metrics import Histogram
from baton_protocol.topology import RankPhase

_PAUSE_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class TopologyStats(msgspec.Struct, kw_only=True):
    """Gauges of now; from `num_steps` on counters since start."""

    phase: RankPhase
    generation: int = 0
    """0: none."""
    rank: int = 0
    size: int = 0
    """Ranks of the generation."""
    wave: int = 0
    """The running one, or the next."""
    wave_running: bool = False
    num_steps: int = 0
    """Steps of waves."""
    num_steps_without_tokens: int = 0
    """Of these: steps that only lent this rank's experts to the others."""
    num_broken: int = 0
    """Generations that lost a member while this rank was in them."""
    exchange_seconds: float = 0.0
    """Spent in exchanges of votes, waiting for the slowest rank included."""


def commit_pauses() -> dict[str, Histogram]:
    """By why the generation changed: `planned` ones pause between two steps, `broken` ones since the last step that ran."""
    return {
        kind: Histogram("No step could run for so long, for the generation changed.", _PAUSE_S)
        for kind in KINDS
    }


KINDS = ("planned", "broken")
