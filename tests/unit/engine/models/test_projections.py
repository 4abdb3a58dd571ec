"""Parallel linear layers: the parts of the ranks give the product of the whole weights."""

from __future__ import annotations

import torch

from baton_engine.distributed.group import ParallelContext
from baton_engine.models.checkpoint.sharding import Part, WeightTargets
from baton_engine.models.projections import ColumnParallelLinear, RowParallelLinear
from support.engine.model_cases import run_ranks


def fill(targets: WeightTargets, weights: dict[str, torch.Tensor]) -> None:
    assert targets.keys() == weights.keys()
    for name, target in targets.items():
        assert target.shape == tuple(weights[name].shape)
        target.parameter.copy_(weights[name][target.index])


def test_a_column_parallel_layer_has_the_ranks_rows_of_each_fused_layer() -> None:
    weights = {
        f"p.{name}.{kind}": torch.randn(size, 6) if kind == "weight" else torch.randn(size)
        for name, size in (("q", 8), ("k", 4))
        for kind in ("weight", "bias")
    }
    x = torch.randn(3, 6)

    def work(rank: ParallelContext) -> torch.Tensor:
        number, size = rank.tensor.rank, rank.tensor.size
        parts = {name: Part(n, n // size * number, n // size) for name, n in (("q", 8), ("k", 4))}
        layer = ColumnParallelLinear(6, parts, bias=True)
        fill(layer.weight_targets("p"), weights)
        return layer(x)

    q, k = (x @ weights[f"p.{n}.weight"].T + weights[f"p.{n}.bias"] for n in "qk")
    first, second = run_ranks(work, tensor_size=2)
    torch.testing.assert_close(first, torch.cat([q[:, :4], k[:, :2]], 1))
    torch.testing.assert_close(second, torch.cat([q[:, 4:], k[:, 2:]], 1))


def test_a_row_parallel_layer_adds_the_products_of_the_ranks_and_its_bias_once() -> None:
    weights = {"p.weight": torch.randn(5, 8), "p.bias": torch.randn(5)}
    x = torch.randn(3, 8)

    def work(rank: ParallelContext) -> torch.Tensor:
        length = 8 // rank.tensor.size
        part = Part(8, length * rank.tensor.rank, length)
        layer = RowParallelLinear(part, 5, True, rank.tensor)
        fill(layer.weight_targets("p"), weights)
        return layer(x[:, part.start : part.start + part.length])

    for size in (1, 2):
        for product in run_ranks(work, tensor_size=size):
            torch.testing.assert_close(product, x @ weights["p.weight"].T + weights["p.bias"])
