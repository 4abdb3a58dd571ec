"""How far a worker is with a generation that is prepared beside the one it serves in. Torch-free: engine cores read it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class PreparationState(enum.StrEnum):
    NONE = "none"
    """Nothing is prepared: not asked for, adopted, or dropped."""
    PREPARING = "preparing"
    PREPARED = "prepared"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Preparation:
    nonce: str = ""
    """Of the generation."""
    state: PreparationState = PreparationState.NONE
    reason: str = ""
    """Why it failed."""
