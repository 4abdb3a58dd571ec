"""Baton beside other engines, from the rows of `benchmarks/engine`: a table and a picture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

OURS = "Baton"
#: Parts whose rows are rates, by the label in the table and the picture.
PARTS = {
    "tokens/s in float32": "float32",
    "tokens/s in bfloat16": "bfloat16",
    "tokens/s in int8": "int8",
    "tokens/s in int4": "int4",
    "tokens/s of a mixture of experts in bfloat16": "experts, bfloat16",
}
FIGURES = ("decode of 1", "decode of 4", "decode of 8", "prefill", "throughput")
COLORS = {
    "llama.cpp": "#d95f02",
    "llama.cpp, Q4_0": "#e6ab02",
    "OpenVINO": "#1b9e77",
    "vLLM": "#7570b3",
    "vLLM, all cores": "#e7298a",
}
LOWEST, HIGHEST = 0.5, 8.0
TICKS = (0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8)
LABEL_WIDTH, PLOT_WIDTH, ROW_HEIGHT, TOP = 240, 560, 20, 56


@dataclass(frozen=True)
class Comparison:
    """One figure: Baton's tokens per second, and Baton's rate divided by each peer's."""

    precision: str
    figure: str
    rate: float
    ratios: dict[str, float]


def comparisons(rows: list[dict[str, Any]]) -> list[Comparison]:
    """Return the measured figures of an engine result, in the order of PARTS and FIGURES."""
    found = []
    for part, precision in PARTS.items():
        by_way = {row["way"]: row for row in rows if row.get("part") == part}
        for figure in FIGURES:
            rate = by_way.get(OURS, {}).get(figure)
            if rate:
                ratios = {
                    way: rate / row[figure]
                    for way, row in by_way.items()
                    if way != OURS and row.get(figure)
                }
                found.append(Comparison(precision, figure, rate, ratios))
    return found


def markdown(found: list[Comparison]) -> list[str]:
    """Return the table. A cell is Baton's rate divided by the peer's."""
    header = ["weights", "figure", "Baton, tokens/s", *(f"against {peer}" for peer in COLORS)]
    lines = [f"| {' | '.join(header)} |", "|" + " --- |" * len(header)]
    for one in found:
        ratios = [f"{one.ratios[peer]:.2f}" if peer in one.ratios else "" for peer in COLORS]
        cells = [one.precision, one.figure, f"{one.rate:.0f}", *ratios]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def svg(found: list[Comparison]) -> str:
    """Return a picture: a row for each figure, with a dot for each peer on a logarithmic scale."""
    height = TOP + ROW_HEIGHT * len(found) + 30
    bottom = height - 24
    text = 'font-family="sans-serif" font-size="12" fill="#333"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL_WIDTH + PLOT_WIDTH + 40}" '
        f'height="{height}" role="img">',
        "<title>Baton's tokens per second divided by each peer's</title>",
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for index, (peer, color) in enumerate(COLORS.items()):
        x = LABEL_WIDTH + 140 * index
        parts.append(f'<circle cx="{x}" cy="16" r="5" fill="{color}"/>')
        parts.append(f'<text x="{x + 10}" y="20" {text}>{peer}</text>')
    for tick in TICKS:
        stroke = "#333" if tick == 1 else "#ddd"
        x = _x(tick)
        parts.append(f'<line x1="{x}" x2="{x}" y1="{TOP - 14}" y2="{bottom}" stroke="{stroke}"/>')
        parts.append(
            f'<text x="{x}" y="{bottom + 16}" text-anchor="middle" {text}>{tick:g} x</text>'
        )
    for index, one in enumerate(found):
        y = TOP + ROW_HEIGHT * index
        label = f"{one.precision}, {one.figure}"
        parts.append(
            f'<text x="{LABEL_WIDTH - 12}" y="{y + 4}" text-anchor="end" {text}>{label}</text>'
        )
        for peer, ratio in one.ratios.items():
            parts.append(
                f'<circle cx="{_x(ratio)}" cy="{y}" r="5" fill="{COLORS[peer]}" '
                f'fill-opacity="0.85"><title>{peer}: {ratio:.2f} x</title></circle>'
            )
    return "\n".join([*parts, "</svg>", ""])


def _x(ratio: float) -> float:
    """Return the place of a ratio. Ratios outside of the scale lie at its ends."""
    inside = min(max(ratio, LOWEST), HIGHEST)
    share = math.log(inside / LOWEST) / math.log(HIGHEST / LOWEST)
    return round(LABEL_WIDTH + PLOT_WIDTH * share, 1)
