"""The bytes of the checkpoint that were read."""

from __future__ import annotations

from pathlib import Path

from baton_engine.metrics.load_counter import COUNTER
from support.engine.model_cases import load


def test_the_load_counter_has_read_all_bytes_after_a_load(checkpoint: Path) -> None:
    load(checkpoint)
    progress = COUNTER.progress()
    assert progress.done_bytes == progress.total_bytes > 0
