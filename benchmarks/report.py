"""Benchmark reports: figures and goals, in `benchmarks/results/<machine>/<subject>.json`.

`python benchmarks/report.py` renders all results as docs/reference/benchmarks.md. The texts between
the tables come from two places:

    benchmarks/<subject>/method.md   what is measured, and how to repeat it; holds for every run
    remarks in a result file         observations about one run; a new run replaces them
"""

from __future__ import annotations

import datetime
import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import peer_ratios

BENCHMARKS = Path(__file__).parent
RESULTS = BENCHMARKS / "results"
REFERENCE = BENCHMARKS.parent / "docs" / "reference"
FIRST_SUBJECT = "engine"  #: The others follow in alphabetical order.


@dataclass(frozen=True)
class Goal:
    name: str
    value: float | None  #: None if this machine cannot measure it.
    goal: float
    unit: str
    at_most: bool = False  #: The goal is an upper bound, otherwise a lower bound.

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal


def machine() -> str:
    """Return the name of this machine: $BATON_MACHINE, or else architecture and core count."""
    return os.environ.get("BATON_MACHINE") or f"{platform.machine()}-{os.cpu_count()}core"


def cpu_model() -> str | None:
    """Return the processor's name from Linux, or None if Linux has none."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return None


def show(goals: list[Goal]) -> None:
    """Print every goal and whether it is met."""
    for goal in goals:
        value = "not measured" if goal.value is None else f"{goal.value:.2f}"
        verdict = {None: "unmeasured", True: "met", False: "NOT met"}[goal.met]
        bound = "at most" if goal.at_most else "at least"
        print(f"goal {goal.name}: {value} {goal.unit} ({bound} {goal.goal:g}): {verdict}")


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the header and the cells of `rows`, without columns that are empty in all rows.

    The header has no `part`, because all rows of a table have the same one.
    """
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "part"]
    columns = [key for key in columns if any(row.get(key) is not None for row in rows)]
    return [
        columns,
        *(["" if row.get(key) is None else str(row[key]) for key in columns] for row in rows),
    ]


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the rows as one table for each part. Repeats are printed as their medians."""
    rows = _medians(rows)
    for part in dict.fromkeys(row["part"] for row in rows):
        cells = table([row for row in rows if row["part"] == part])
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
    **conditions: Any,
) -> Path:
    """Print the goals, write the result file, and render docs/reference/benchmarks.md.

    Args:
        subject: name of the benchmark's folder.
        figures: rows of the tables. Each has a `part`, the name of its table.
        goals: measured goals.
        remarks: observations about the run, such as parts that failed.
        conditions: repeats, versions and other conditions of the run.

    Returns:
        The path of the result file.
    """
    return _save(subject, figures, goals, [_run(figures, conditions)], remarks)


def replace(
    subject: str, figures: list[dict[str, Any]], goals: list[Goal], **conditions: Any
) -> Path:
    """Replace the rows, conditions and goals of the measured parts. Keep all other parts.

    The arguments are those of `write`. Parts may be measured at different times, because each part
    runs its own peers. The result file is created if this machine has none of the subject.
    """
    path = _path(subject)
    if not path.exists():
        return write(subject, figures, goals, **conditions)
    old = json.loads(path.read_text())
    run, names = _run(figures, conditions), {goal.name for goal in goals}
    runs = [
        one | {"parts": [part for part in one["parts"] if part not in run["parts"]]}
        for one in old["runs"]
    ]
    kept = [
        Goal(**{key: value for key, value in goal.items() if key != "met"}) for goal in old["goals"]
    ]
    return _save(
        subject,
        [row for row in old["figures"] if row["part"] not in run["parts"]] + figures,
        [goal for goal in kept if goal.name not in names] + goals,
        [one for one in runs if one["parts"]] + [run],
        old["remarks"],
    )


def _path(subject: str) -> Path:
    return RESULTS / machine() / f"{subject}.json"


def _run(figures: list[dict[str, Any]], conditions: dict[str, Any]) -> dict[str, Any]:
    """Return the parts and the conditions of a run that ends now."""
    return {
        "parts": list(dict.fromkeys(row["part"] for row in figures)),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "CPU": cpu_model(),
        **conditions,
    }


def _save(
    subject: str,
    figures: list[dict[str, Any]],
    goals: list[Goal],
    runs: list[dict[str, Any]],
    remarks: str,
) -> Path:
    show(goals)
    path = _path(subject)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "subject": subject,
        "runs": runs,
        "goals": [{**asdict(goal), "met": goal.met} for goal in goals],
        "figures": figures,
        "remarks": remarks,
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"written: {path.relative_to(RESULTS.parent.parent)}")
    render(REFERENCE)
    return path


def render(folder: Path) -> None:
    """Write benchmarks.md and its pictures from all results into `folder`."""
    files = sorted(
        RESULTS.glob("*/*.json"), key=lambda file: (file.stem != FIRST_SUBJECT, file.stem, file)
    )
    titles = {file: f"{file.stem} on {file.parent.name}" for file in files}
    lines = [
        "# Benchmarks",
        "",
        "Generated by `benchmarks/report.py` from `benchmarks/`; do not edit.",
        "`make bench SUBJECT=<subject>` runs one benchmark.",
        "Peers are measured in the same run. Repeated measurements are shown as their medians.",
        "Machines are shared and noisy: compare ratios, not absolute times.",
        "",
        *(f"- [{title}](#{title.replace(' ', '-')})" for title in titles.values()),
    ]
    for subject in dict.fromkeys(file.stem for file in files):
        lines += ["", f"## {subject}"]
        method = BENCHMARKS / subject / "method.md"
        if method.exists():
            lines += ["", method.read_text().strip()]
        for file, title in titles.items():
            if file.stem == subject:
                lines += ["", f"### {title}", "", *_result(file, folder)]
    (folder / "benchmarks.md").write_text("\n".join(lines) + "\n")


def _result(file: Path, folder: Path) -> list[str]:
    """Return the lines of a result. Its picture is written into `folder`."""
    result = json.loads(file.read_text())
    lines = [*_conditions(result["runs"]), ""]
    lines += ["| goal | measured | wanted | met |", "| --- | --- | --- | --- |"]
    for goal in result["goals"]:
        value = "not measured" if goal["value"] is None else f"{goal['value']:.2f} {goal['unit']}"
        bound = "at most" if goal.get("at_most") else "at least"
        met = {None: "?", True: "yes", False: "**no**"}[goal["met"]]
        lines.append(
            f"| {goal['name']} | {value} | {bound} {goal['goal']:g} {goal['unit']} | {met} |"
        )
    if result["remarks"]:
        lines += ["", result["remarks"]]
    if comparisons := peer_ratios.comparisons(result["figures"]):
        picture = folder / f"beside-peers-{file.parent.name}.svg"
        picture.write_text(peer_ratios.svg(comparisons))
        lines += _beside_peers(result["figures"], comparisons, picture.name)
    return [*lines, *_figures(result["figures"])]


def _beside_peers(
    rows: list[dict[str, Any]], comparisons: list[peer_ratios.Comparison], picture: str
) -> list[str]:
    """Return the lines about Baton beside other engines, with a link to the picture."""
    title = "Baton's tokens per second divided by each peer's, figure by figure"
    lines = ["", "Baton's tokens per second divided by each peer's: above 1, Baton is faster."]
    lines += [peer_ratios.statistic(rows), "", f"![{title}]({picture})", ""]
    lines += markdown(peer_ratios.rates(comparisons))
    servers = peer_ratios.serving(rows)
    if len(servers) > 1:
        lines += ["", "`baton serve`'s figures divided by those of `vllm serve`.", ""]
        lines += markdown(servers)
    return lines


def _conditions(runs: list[dict[str, Any]]) -> list[str]:
    """Return the conditions as one line, or as a table if parts were measured in several runs."""
    if len(runs) > 1:
        return markdown(table([run | {"parts": "; ".join(run["parts"])} for run in runs]))
    conditions = {key: value for key, value in runs[0].items() if value and key != "parts"}
    return [", ".join(f"{key}: {value}" for key, value in conditions.items()) + "."]


def markdown(cells: list[list[str]]) -> list[str]:
    """Return a header and cells as the lines of a Markdown table."""
    header, *body = (f"| {' | '.join(line)} |" for line in cells)
    return [header, "|" + " --- |" * len(cells[0]), *body]


def _figures(rows: list[dict[str, Any]]) -> list[str]:
    """Return Markdown tables of the rows.

    Each part with at least three rows has its own table. The rows of all other parts are in one
    table before them.
    """
    parts: dict[str, list[dict[str, Any]]] = {}
    for row in _medians(rows):
        parts.setdefault(row["part"], []).append(row)
    few = [row for part in parts.values() if len(part) < 3 for row in part]
    lines = ["", "| figure | values |", "| --- | --- |"] if few else []
    for row in few:
        values = [
            f"{key} {value}" for key, value in row.items() if key != "part" and value is not None
        ]
        lines.append(f"| {row['part']} | {', '.join(values)} |")
    for name, part in parts.items():
        if len(part) >= 3:
            lines += ["", f"{name}:", "", *markdown(table(part))]
    return lines


def _medians(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge rows that repeat one measurement into a row with the medians of their floats.

    Rows repeat a measurement if they are equal except for values that are floats or None.
    """
    repeats: dict[tuple[tuple[str, Any], ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = tuple(item for item in row.items() if not isinstance(item[1], float | None))
        repeats.setdefault(key, []).append(row)
    return [
        {name: _median([row.get(name) for row in same]) for name in same[0]}
        for same in repeats.values()
    ]


def _median(values: list[Any]) -> Any:
    """Return the median of the floats in `values`; without floats the first value."""
    floats = [value for value in values if isinstance(value, float)]
    return round(median(floats), 3) if len(floats) > 1 else (floats or values)[0]


if __name__ == "__main__":
    render(REFERENCE)
