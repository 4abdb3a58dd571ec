"""The state of a generation (ranks and expert placement) that a worker is preparing.

This module does not import torch, because engine cores import it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class PreparationState(enum.StrEnum):
    """State of the preparation of a generation."""

    #: Nothing is prepared: it was not requested, was committed, or was dropped.
    NONE = "none"
    PREPARING = "preparing"
    PREPARED = "prepared"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Preparation:
    """The preparation of one generation, and its state."""

    #: Nonce of the generation.
    nonce: str = ""
    state: PreparationState = PreparationState.NONE
    #: Why the preparation failed; else empty.
    reason: str = ""
