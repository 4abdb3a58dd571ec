"""Writes a benchmark's figures to `benchmarks/results/<machine>/<subject>.json`, with the goals they are held against."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Goal:
    name: str
    value: float | None
    """None: could not be measured here."""
    goal: float
    unit: str

    @property
    def met(self) -> bool | None:
        """Goals are lower bounds."""
        return None if self.value is None else self.value >= self.goal


def machine() -> str:
    """Folder name of this machine: $BATON_MACHINE, else architecture and core count."""
    return os.environ.get("BATON_MACHINE") or f"{platform.machine()}-{os.cpu_count()}core"


def write(subject: str, figures: list[dict[str, Any]], goals: list[Goal], **circumstances: Any) -> Path:
    """Prints the goals and writes everything.

    Args:
        figures: the rows of the table.
        circumstances: what one must know to read them (repeats, environment).
    """
    for goal in goals:
        value = "not measured" if goal.value is None else f"{goal.value:.2f}"
        verdict = {None: "unmeasured", True: "met", False: "NOT met"}[goal.met]
        print(f"goal {goal.name}: {value} {goal.unit} (at least {goal.goal:g}): {verdict}")
    path = RESULTS / machine() / f"{subject}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "subject": subject,
        "circumstances": circumstances,
        "goals": [{**asdict(goal), "met": goal.met} for goal in goals],
        "figures": figures,
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"written: {path.relative_to(RESULTS.parent.parent)}")
    return path
