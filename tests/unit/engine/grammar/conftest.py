"""A tokenizer, and a manager of structured outputs that uses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_engine.grammar.structured_output import StructuredOutputManager
from baton_engine.random_checkpoint import create_checkpoint
from baton_text.tokenizer import Tokenizer
from support.engine.grammars import EOS, TOKENIZER_SIZE, VOCAB_SIZE


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_checkpoint(
        tmp_path_factory.mktemp("checkpoint") / "llama",
        "llama",
        hidden_size=64,
        intermediate_size=64,
        num_layers=1,
        vocab_size=TOKENIZER_SIZE,
        seed=3,
    )


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_folder(checkpoint)


@pytest.fixture(scope="module")
def manager(checkpoint: Path) -> StructuredOutputManager:
    return StructuredOutputManager(checkpoint, VOCAB_SIZE, EOS, lambda: None)
