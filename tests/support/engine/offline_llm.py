"""An LLM of the offline API on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from baton_engine import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def make_llm(checkpoint: Path, **args: Any) -> LLM:
    defaults = {"dtype": "float32", "num_blocks": 96, "device": "cpu", "num_threads": 1}
    return LLM(checkpoint, **{**defaults, **args})


def metric(llm: LLM, name: str) -> float:
    return next(item.value for item in llm.get_metrics() if item.name == name)
