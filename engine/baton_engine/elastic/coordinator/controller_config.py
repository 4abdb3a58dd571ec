"""Deadlines and thresholds of a group's controller."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """Deadlines, in seconds."""

    settle_s: float = 1.0
    """After the first status, before anything is decided: all ranks can report."""
    dead_after_s: float = 1.5
    """Silence that makes a rank dead."""
    suspect_dead_after_s: float = 0.4
    """The same for a rank that others miss."""
    stall_after_s: float = 5.0
    """A rank is given up though its process answers: when the others have waited for it so long in an exchange of votes, or when it
    does not heed an urgent generation for so long. No member may need more between two steps, nor for one layer of a step."""
    step_stall_after_s: float = 30.0
    """A step that runs for so long is interrupted, to see who still answers. Longer than the longest step there is: a slower one is
    run again, and given twice the time."""
    form_after_s: float = 30.0
    """A first generation waits so long after the first rank for the others."""
    wait_s: float = 60.0
    """Scaling waits so long for ranks that are not there."""
    prepare_timeout_s: float = 120.0
    commit_timeout_s: float = 20.0
    """Without progress."""
    retry_s: float = 1.0
    """After the first failure in a row; twice as long after each further one."""
    retry_max_s: float = 60.0
    """So long at most. A rank that is left out because it cannot be prepared is tried again after it, too."""
    rebalance_threshold: float = 0.0
    """Tokens of the busiest rank over those of the average one that make experts move; 0: only when asked."""
    rebalance_window_s: float = 300.0
    """Over which that is measured."""
