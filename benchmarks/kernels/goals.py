"""The goals of the kernels, by the part of the benchmark that measures each goal."""

from __future__ import annotations

from dataclasses import replace

from report import Goal

GOALS = {
    "attention_decode": Goal(
        "decode attention against copy bandwidth, worst from 128K tokens on", None, 0.9, "x"
    ),
    "attention_prefill": Goal(
        "causal prefill of 8K tokens against torch's best SDPA", None, 0.9, "x"
    ),
    "moe": Goal("MoE decode against copy bandwidth, worst of 1 to 64 tokens", None, 0.8, "x"),
    "engine_step": Goal(
        "decode step against the sum of its kernels", None, 1.15, "x", at_most=True
    ),
    "cpu_attention": Goal(
        "CPU decode attention against read bandwidth at 4K context", None, 0.7, "x"
    ),
}


def reached(part: str, value: float | None) -> list[Goal]:
    """Return the goal of `part` with the measured `value`, in a list."""
    return [replace(GOALS[part], value=value)]
