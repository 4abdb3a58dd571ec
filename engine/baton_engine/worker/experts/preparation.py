"""The state of a generation that a worker prepares beside the one that serves.

Torch-free: engine cores read it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class PreparationState(enum.StrEnum):
    """How far a preparation is."""

    #: Nothing is prepared: it was not requested, was committed, or was dropped.
    NONE = "none"
    PREPARING = "preparing"
    PREPARED = "prepared"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Preparation:
    """A preparation and its state."""

    #: Nonce of the generation.
    nonce: str = ""
    state: PreparationState = PreparationState.NONE
    #: Why it failed.
    reason: str = ""
