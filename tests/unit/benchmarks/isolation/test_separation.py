"""The figure of the benchmark `isolation`: how well times separate two sets of prompts."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ISOLATION = Path(__file__).parents[4] / "benchmarks" / "isolation"


def test_the_auc_is_the_probability_that_a_hit_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ISOLATION)
    auc = importlib.import_module("separation").auc
    assert auc([1.0, 2.0], [3.0, 4.0]) == 1.0
    assert auc([3.0, 4.0], [1.0, 2.0]) == 0.0
    assert auc([1.0, 4.0], [2.0, 3.0]) == 0.5
    assert auc([1.0], [1.0]) == 0.5
