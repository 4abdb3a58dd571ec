"""Renders the rates of Baton and other engines, from rows of `benchmarks/engine`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Any

Rows = list[dict[str, Any]]
OURS = "Baton"
#: Part with rates -> label in the table and the picture.
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
    "vLLM, default": "#7570b3",
    "vLLM, all cores": "#e7298a",
}
#: Prefix of the parts with the latencies of servers.
SERVING = "serving, "
SERVING_FIGURES = ("tokens/s", "TTFT mean, ms", "ITL p99, ms")
SERVING_PEERS = ("vLLM, default", "vLLM, all cores")
LOWEST, HIGHEST = 0.5, 8.0
TICKS = (0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8)
LABEL_WIDTH, PLOT_WIDTH, ROW_HEIGHT, TOP = 240, 560, 20, 56
CHAR_WIDTH = 7  #: Upper bound of the average width of a character.


@dataclass(frozen=True)
class Comparison:
    """One figure: Baton's tokens per second, and Baton's rate divided by each peer's."""

    precision: str
    figure: str
    rate: float
    ratios: dict[str, float]


def comparisons(rows: Rows) -> list[Comparison]:
    """Return the measured figures of an engine result, in the order of PARTS and FIGURES."""
    found = []
    for part, precision in PARTS.items():
        ways = _by_way(rows, part)
        ours = ways.pop(OURS, [])
        for figure in FIGURES:
            if ours and figure in ours[0]:
                ratios = {
                    way: _ratio(ours, theirs, figure)
                    for way, theirs in ways.items()
                    if figure in theirs[0]
                }
                rate = median(row[figure] for row in ours)
                found.append(Comparison(precision, figure, rate, ratios))
    return found


def statistic(rows: Rows) -> str:
    """Return sentences that define the ratios of `rows`."""
    parts = dict.fromkeys(row["part"] for row in rows)
    compared = [part for part in parts if part in PARTS or part.startswith(SERVING)]
    single = [part for part in compared if len(_by_way(rows, part)[OURS]) == 1]
    if single == compared:
        return (
            "The goals are medians of the ratios of paired repeats. This result keeps only medians "
            "of the repeats, so the ratios below are ratios of medians."
        )
    text = "A ratio is the median of the ratios of paired repeats, as in the goals."
    if single:
        text += f" It is the ratio of the medians in parts without repeats: {'; '.join(single)}."
    return text


def rates(found: list[Comparison]) -> list[list[str]]:
    """Return the table of the rates. A cell is Baton's rate divided by the peer's."""
    header = ["weights", "figure", "Baton, tokens/s", *(f"against {peer}" for peer in COLORS)]
    cells = [header]
    for one in found:
        ratios = [f"{one.ratios[peer]:.2f}" if peer in one.ratios else "" for peer in COLORS]
        cells.append([one.precision, one.figure, f"{one.rate:.0f}", *ratios])
    return cells


def serving(rows: Rows) -> list[list[str]]:
    """Return the table of the servers. A cell is Baton's figure divided by that of vLLM."""
    columns = [(figure, peer) for figure in SERVING_FIGURES for peer in SERVING_PEERS]
    cells = [["load", "way", *(f"{figure}: against {peer}" for figure, peer in columns)]]
    for part in dict.fromkeys(row["part"] for row in rows if row["part"].startswith(SERVING)):
        ways = _by_way(rows, part)
        for way in ways:
            if way.startswith(OURS):
                ratios = [
                    f"{_ratio(ways[way], ways[peer], figure):.2f}" for figure, peer in columns
                ]
                cells.append([part.removeprefix(SERVING), way, *ratios])
    return cells


def _by_way(rows: Rows, part: str) -> dict[str, Rows]:
    """Return the rows of a part by candidate, each with one row per repeat."""
    ways: dict[str, Rows] = {}
    for row in rows:
        if row["part"] == part:
            ways.setdefault(row["way"], []).append(row)
    return ways


def _ratio(ours: Rows, theirs: Rows, figure: str) -> float:
    """Return the median of the ratios of paired repeats."""
    return median(our[figure] / their[figure] for our, their in zip(ours, theirs, strict=True))


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
    x = LABEL_WIDTH
    for peer, color in COLORS.items():
        parts.append(f'<circle cx="{x}" cy="16" r="5" fill="{color}"/>')
        parts.append(f'<text x="{x + 10}" y="20" {text}>{peer}</text>')
        x += 30 + CHAR_WIDTH * len(peer)
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
    """Return the x coordinate of a ratio. Ratios outside of the scale lie at its ends."""
    inside = min(max(ratio, LOWEST), HIGHEST)
    share = math.log(inside / LOWEST) / math.log(HIGHEST / LOWEST)
    return round(LABEL_WIDTH + PLOT_WIDTH * share, 1)
