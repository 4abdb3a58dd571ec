"""Logits of a model, compared with those of transformers."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from support.engine.model_cases import (
    load,
    run_model,
)

TOLERANCE = 1e-4
VOCAB_SIZE = 300
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "vocab_size": VOCAB_SIZE}


def sequences(num_seqs: int, num_tokens: int) -> list[list[int]]:
    draw = random.Random(num_tokens)
    return [[draw.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)] for _ in range(num_seqs)]


def assert_parity(path: Path, num_tokens: int, chunks: tuple[int, ...]) -> torch.Tensor:
    """Compare all positions of three sequences for each chunk size; return the expected logits."""
    from transformers import AutoModelForCausalLM

    reference, report = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"], "the made checkpoint is incomplete"
    assert not report["unexpected_keys"]
    tokens = sequences(3, num_tokens)
    with torch.inference_mode():
        expected: torch.Tensor = reference(torch.tensor(tokens)).logits
    model = load(path)
    for chunk in chunks:
        actual = run_model(model, tokens, chunk)
        torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(
            actual.log_softmax(-1), expected.log_softmax(-1), atol=TOLERANCE, rtol=0
        )
    return expected
