"""Deadlines and thresholds of a group's controller."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """The deadlines, in seconds, and the thresholds of the topology controller."""

    #: Time from the first status to the first decision, in which all ranks can report.
    settle_s: float = 1.0
    #: Time without a status after which a rank is dead.
    dead_after_s: float = 1.5
    #: Time without a status after which a rank that other ranks cannot reach is dead.
    suspect_dead_after_s: float = 0.4
    #: Time after which a rank counts as stalled although it sends statuses. A stalled rank does not
    #: vote while other ranks wait for its vote, or does not react to the generation that replaces a
    #: broken generation. The time must exceed the time between two steps, and the duration of one
    #: layer.
    stall_after_s: float = 5.0
    #: Time limit of a step. The coordinator interrupts a longer step to find a stalled rank. The
    #: limit should exceed the longest step. The group runs an interrupted step again, and the limit
    #: doubles, at most to 8 times this value.
    step_stall_after_s: float = 30.0
    #: Time to wait for further ranks after the first rank is ready, if there is no generation.
    form_after_s: float = 30.0
    #: Time that scaling waits for missing ranks.
    wait_s: float = 60.0
    #: Time that the ranks have to prepare a generation.
    prepare_timeout_s: float = 120.0
    #: Time without progress after which the coordinator stops waiting for a commit.
    commit_timeout_s: float = 20.0
    #: Delay after the first failure. The delay doubles with each further failure in a row.
    retry_s: float = 1.0
    #: Maximum delay of a retry. A rank that could not be prepared is excluded from new generations
    #: for this time.
    retry_max_s: float = 60.0
    #: Imbalance above which experts move: the tokens of the busiest rank divided by the mean of
    #: all ranks. 0: experts move only on request.
    rebalance_threshold: float = 0.0
    #: Time over which the imbalance is measured. Experts move at most once in this time, except on
    #: request.
    rebalance_window_s: float = 300.0
    #: Maximum size in bytes of the experts that ranks receive for one automatic rebalance. The
    #: moves that reduce the imbalance most come first. Other moves follow after later windows.
    #: 0: no limit.
    rebalance_max_move_bytes: float = 0.0
