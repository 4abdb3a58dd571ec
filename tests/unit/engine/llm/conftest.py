"""An LLM on a tiny checkpoint. The tests of a module share it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_engine import LLM
from support.engine.offline_llm import make_llm


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with make_llm(checkpoint, max_model_len=512) as llm:
        yield llm
