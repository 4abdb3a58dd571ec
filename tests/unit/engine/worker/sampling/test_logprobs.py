"""Log-probabilities of prompts, and counts of NaN logits."""

from __future__ import annotations

import math

import pytest
import torch

from baton_engine.worker.sampling.logprobs import count_nans, prompt_logprobs


def test_nans_are_counted_per_row() -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2:] = math.nan
    assert count_nans(logits) == [0, 3, 0]


def test_prompt_logprobs_are_those_of_the_following_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 30, generator=torch.Generator().manual_seed(2))
    following = [3, 1, 4, 1, 5, 9, 2]
    monkeypatch.setattr("baton_kernels.sampling.vocabulary_blocks.CPU_CHUNK", 60)
    reported = prompt_logprobs(logits, following, 2)
    expected = logits.log_softmax(-1)
    for position, (token, entry) in enumerate(zip(following, reported, strict=True)):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(expected[position, token]))
        assert entry.rank == int((expected[position] > expected[position, token]).sum()) + 1
        assert [top for top, _ in entry.top] == expected[position].topk(2).indices.tolist()
    assert prompt_logprobs(logits[:0], [], 2) == []
    assert prompt_logprobs(logits[:1], [3], 0)[0].top == []
