"""The state of a generation (ranks and expert placement) that a worker is preparing.

This module does not import torch, so that engine cores can import the module without torch.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class PreparationState(enum.StrEnum):
    """State of the preparation of a generation (ranks and expert placement)."""

    #: No generation is prepared: none was requested, or the last one was committed or dropped.
    NONE = "none"
    PREPARING = "preparing"
    PREPARED = "prepared"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Preparation:
    """The preparation of one generation: nonce, state and reason of a failure."""

    #: Nonce of the generation.
    nonce: str = ""
    state: PreparationState = PreparationState.NONE
    #: Why the preparation failed. Empty in other states.
    reason: str = ""
