"""Writes a benchmark's figures to `benchmarks/results/<machine>/<subject>.json`, with the goals they are held against.

`python benchmarks/report.py` renders all results as docs/reference/benchmarks.md.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parent.parent / "docs" / "reference" / "benchmarks.md"


@dataclass(frozen=True)
class Goal:
    name: str
    #: None: could not be measured here.
    value: float | None
    goal: float
    unit: str
    #: The goal is an upper bound; otherwise a lower one.
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal


def machine() -> str:
    """Folder name of this machine: $BATON_MACHINE, else architecture and core count."""
    return os.environ.get("BATON_MACHINE") or f"{platform.machine()}-{os.cpu_count()}core"


def show(goals: list[Goal]) -> None:
    """Prints every goal and whether it is met."""
    for goal in goals:
        value = "not measured" if goal.value is None else f"{goal.value:.2f}"
        verdict = {None: "unmeasured", True: "met", False: "NOT met"}[goal.met]
        bound = "at most" if goal.at_most else "at least"
        print(f"goal {goal.name}: {value} {goal.unit} ({bound} {goal.goal:g}): {verdict}")


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Header and cells of rows of one part; columns that all rows leave empty are left out."""
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "part"]
    columns = [key for key in columns if any(row.get(key) is not None for row in rows)]
    return [
        columns,
        *(["" if row.get(key) is None else str(row[key]) for key in columns] for row in rows),
    ]


def print_table(rows: list[dict[str, Any]]) -> None:
    """Prints the rows, those of each part under its name."""
    for part in dict.fromkeys(row.get("part", "") for row in rows):
        cells = table([row for row in rows if row.get("part", "") == part])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        print(f"  {part}")
        for line in cells:
            print(
                "    "
                + "  ".join(
                    cell.ljust(width) for cell, width in zip(line, widths, strict=True)
                ).rstrip()
            )


def write(
    subject: str,
    figures: list[dict[str, Any]],
    goals: list[Goal],
    *,
    remarks: str = "",
    **circumstances: Any,
) -> Path:
    """Prints the goals and writes everything.

    Args:
        figures: the rows of the table.
        remarks: where a figure falls short, and what limits it.
        circumstances: what one must know to read them (repeats, environment).
    """
    show(goals)
    path = RESULTS / machine() / f"{subject}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "subject": subject,
        "circumstances": circumstances,
        "goals": [{**asdict(goal), "met": goal.met} for goal in goals],
        "figures": figures,
        "remarks": remarks,
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"written: {path.relative_to(RESULTS.parent.parent)}")
    render()
    return path


def replace(
    subject: str, figures: list[dict[str, Any]], goals: list[Goal], *, remarks: str = ""
) -> Path:
    """Puts what some parts measured anew in the place of their old figures; arguments as of `write`.

    Every part holds its peers in its own run, so parts of one subject need not be of one hour.

    Raises:
        FileNotFoundError: there is no result of the subject on this machine yet.
    """
    path = RESULTS / machine() / f"{subject}.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: measure all parts first")
    old = json.loads(path.read_text())
    parts, names = {row["part"] for row in figures}, {goal.name for goal in goals}
    kept = [
        Goal(**{key: value for key, value in goal.items() if key != "met"}) for goal in old["goals"]
    ]
    return write(
        subject,
        [row for row in old["figures"] if row["part"] not in parts] + figures,
        [goal for goal in kept if goal.name not in names] + goals,
        remarks=remarks,
        **old["circumstances"],
    )


def render() -> None:
    """Writes docs/reference/benchmarks.md from all results."""
    lines = [
        "# Benchmarks",
        "",
        "Written by `benchmarks/report.py` from `benchmarks/results/`; do not edit. Peers run side by side in one run,",
        "figures are medians. Run one with `make bench SUBJECT=<subject>`. Machines are shared and noisy: read ratios,",
        "not absolute times.",
    ]
    for file in sorted(RESULTS.glob("*/*.json")):
        result = json.loads(file.read_text())
        lines += ["", f"## {result['subject']} on {file.parent.name}", ""]
        lines += [
            ", ".join(f"{key}: {value}" for key, value in result["circumstances"].items()) + ".",
            "",
        ]
        lines += ["| goal | measured | wanted | met |", "| --- | --- | --- | --- |"]
        for goal in result["goals"]:
            value = (
                "not measured" if goal["value"] is None else f"{goal['value']:.2f} {goal['unit']}"
            )
            bound = "at most" if goal.get("at_most") else "at least"
            met = {None: "?", True: "yes", False: "**no**"}[goal["met"]]
            lines.append(
                f"| {goal['name']} | {value} | {bound} {goal['goal']:g} {goal['unit']} | {met} |"
            )
        lines += _figures(result["figures"])
        if result.get("remarks"):
            lines += ["", result["remarks"]]
    DOCS.write_text("\n".join(lines) + "\n")


def _figures(rows: list[dict[str, Any]]) -> list[str]:
    """Parts of three rows and more in tables of their own, after a list of the others."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        parts.setdefault(row.get("part", ""), []).append(row)
    few = [row for part in parts.values() if len(part) < 3 for row in part]
    lines = ["", "| figure | values |", "| --- | --- |"] if few else []
    for row in few:
        values = [
            f"{key} {value}" for key, value in row.items() if key != "part" and value is not None
        ]
        lines.append(f"| {row.get('part', '')} | {', '.join(values)} |")
    for name, part in parts.items():
        if len(part) >= 3:
            header, *cells = table(part)
            lines += ["", f"{name}:", "", f"| {' | '.join(header)} |", "|" + " --- |" * len(header)]
            lines += [f"| {' | '.join(line)} |" for line in cells]
    return lines


if __name__ == "__main__":
    render()
