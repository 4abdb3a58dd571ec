"""Experts on a CPU: one compiled operation, or torch's operations for one expert after the other.

The weights of an expert are read once for all rows routed to the expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from baton_kernels.activation import silu_and_mul
from baton_kernels.cpu import ops_for
from baton_kernels.linear import PackedWeight, QuantizedWeight, Weight, linear

#: A matrix per expert: stacked in one tensor, or a sequence of plain, packed or quantized matrices.
ExpertWeights = Tensor | Sequence[Weight] | nn.ModuleList


class ExpertList(tuple[Any, ...]):
    """A tuple of one weight per expert, with the tensors that the C++ `run_experts` reads.

    Attributes:
        data: the packed weights. Empty if `run_experts` in C++ cannot read one of them.
        scales: the scales of the packed weights. Empty if `data` is empty or the weights are not
            quantized.
    """

    data: list[Tensor]
    scales: list[Tensor]

    # Any: the items of a ModuleList are untyped.
    def __new__(cls, weights: Iterable[Any]) -> ExpertList:
        experts = super().__new__(cls, weights)
        is_compiled = all(
            isinstance(weight, PackedWeight | QuantizedWeight) and weight.is_compiled
            for weight in experts
        )
        is_quantized = any(isinstance(weight, QuantizedWeight) for weight in experts)
        experts.data = [weight.data for weight in experts] if is_compiled else []
        experts.scales = (
            [weight.scales for weight in experts] if is_compiled and is_quantized else []
        )
        return experts


def run_experts_cpu(
    x: Tensor, gate_up: ExpertWeights, down: ExpertWeights, weights: Tensor, expert_ids: Tensor
) -> Tensor:
    """Implement `baton_kernels.moe.run_experts` on a CPU."""
    if not isinstance(gate_up, Tensor) and (ops := ops_for(x)) is not None:
        assert not isinstance(down, Tensor)
        first = gate_up if isinstance(gate_up, ExpertList) else ExpertList(gate_up)
        second = down if isinstance(down, ExpertList) else ExpertList(down)
        if first.data and second.data:
            out: Tensor = ops.run_experts(
                x,
                first.data,
                first.scales,
                second.data,
                second.scales,
                first[0].shape[0] // 2,
                weights,
                expert_ids,
            )
            return out
    if expert_ids.shape[0] == 1:
        return _run_one_token(x, gate_up, down, weights, expert_ids)
    num_tokens, top_k = expert_ids.shape
    num_experts = len(gate_up)
    pairs = expert_ids.flatten()
    absent = (pairs < 0) | (pairs >= num_experts)
    pairs = pairs.masked_fill(absent, num_experts)  # sorted to the end, then cut off
    counts: list[int] = torch.bincount(pairs, minlength=num_experts + 1)[:num_experts].tolist()
    order = pairs.argsort(stable=True)[: sum(counts)]
    inputs = x[order // top_k].split(counts)
    products = [
        _run_expert(rows, gate_up[expert], down[expert])
        for expert, rows in enumerate(inputs)
        if counts[expert]
    ]
    if not products:
        return torch.zeros_like(x)
    by_pair = x.new_empty(num_tokens * top_k, x.shape[1])
    if len(order) < len(by_pair):  # some experts are on other ranks
        by_pair.zero_()
        weights = weights.masked_fill(absent.view(expert_ids.shape), 0)
    by_pair.index_copy_(0, order, torch.cat(products))
    return (by_pair.view(num_tokens, top_k, -1) * weights[..., None].to(x.dtype)).sum(1)


# Any: the items of a ModuleList are untyped.
def _run_expert(rows: Tensor, gate_up: Any, down: Any) -> Tensor:
    return linear(silu_and_mul(linear(rows, gate_up)), down)


def _run_one_token(
    x: Tensor, gate_up: ExpertWeights, down: ExpertWeights, weights: Tensor, expert_ids: Tensor
) -> Tensor:
    """Return the result of `run_experts_cpu` for a single token, whose experts are distinct."""
    ids: list[int] = expert_ids[0].tolist()
    here = [choice for choice, expert in enumerate(ids) if 0 <= expert < len(gate_up)]
    if not here:
        return torch.zeros_like(x)
    products = torch.cat(
        [_run_expert(x, gate_up[ids[choice]], down[ids[choice]]) for choice in here]
    )
    if len(here) < len(ids):
        weights = weights[:, here]
    return weights.to(x.dtype) @ products
