"""Grammars that a manager of structured outputs compiles, and the tokens that they allow."""

from __future__ import annotations

import pytest

from baton_engine.grammar.structured_output import Grammar, StructuredOutputManager
from baton_protocol.sampling_params import StructuredOutput, StructuredOutputKind

TOKENIZER_SIZE = 512
VOCAB_SIZE = 600  # a padded embedding
EOS = [2, 0]


def compiled(manager: StructuredOutputManager, kind: str, spec: str = "") -> Grammar:
    return manager.compile(StructuredOutput(StructuredOutputKind(kind), spec)).result(timeout=30)


def refusal(manager: StructuredOutputManager, kind: str, spec: str = "") -> str:
    with pytest.raises(ValueError, match="structured_output") as raised:
        compiled(manager, kind, spec)
    return str(raised.value)


def allowed(
    manager: StructuredOutputManager, grammar: Grammar, vocab_size: int = VOCAB_SIZE
) -> set[int]:
    row = manager.bitmask([grammar])[0]
    return {token for token in range(vocab_size) if row[token // 32] >> (token % 32) & 1}
