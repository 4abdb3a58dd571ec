"""Layers of a model on several tensor ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import embedding

from baton_engine.distributed.group import ParallelContext
from baton_engine.models.layers import VocabParallelEmbedding
from baton_engine.random_checkpoint import create_checkpoint
from support.engine.model_cases import (
    load,
    run_model,
    run_ranks,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_vocab_parallel_embedding_works_with_ranks_that_have_no_rows() -> None:
    """Nine rows are split into eight parts of two, so the last three ranks have none."""
    table, ids = torch.randn(9, 16), torch.tensor([0, 8, 5, 1])

    def work(rank: ParallelContext) -> tuple[torch.Tensor, torch.Tensor]:
        layer = VocabParallelEmbedding(9, 16, rank.tensor)
        layer.weight.fill_(float("nan"))
        for target in layer.weight_targets("embed").values():
            target.parameter.copy_(table[target.index])
        return layer(ids), layer.logits(table[:3])

    for found, logits in run_ranks(work, tensor_size=8):
        assert torch.equal(found, embedding(ids, table))
        torch.testing.assert_close(logits, table[:3] @ table.T)


def test_each_attention_and_each_mlp_needs_one_all_reduce(tmp_path: Path) -> None:
    path = create_checkpoint(tmp_path / "model", "mixtral", hidden_size=64, num_layers=2)

    def work(rank: ParallelContext) -> dict[str, int]:
        run_model(load(path, rank), [[5, 6, 7, 8, 9]], 5)
        return rank.tensor.calls

    # One all_reduce for the embedding and two for each of two layers; one all_gather for logits.
    assert run_ranks(work, tensor_size=2) == [{"all_reduce": 1 + 2 * 2, "all_gather": 1}] * 2
