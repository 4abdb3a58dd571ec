"""Mixture of experts: top-k routing, and the experts' gated MLPs on the tokens routed to them.

probs = softmax(router logits)                                  in float32
ids, weights = top k of probs                                   renormalised to sum 1 if asked
out[t] = sum over k of weights[t, k] * down[e] @ (silu(gate[e] @ x[t]) * (up[e] @ x[t]))     e = ids[t, k]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from baton_kernels.activation import silu_and_mul
from baton_kernels.linear import linear


def route_top_k(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Chooses the experts of each token.

    Args:
        router_logits: of shape [num_tokens, num_experts].

    Returns:
        weights (dtype of the logits) and expert ids (int64), each of shape [num_tokens, top_k].
    """
    probs = torch.softmax(router_logits, dim=-1, dtype=torch.float32)
    weights, expert_ids = probs.topk(top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(router_logits.dtype), expert_ids


def run_experts(
    x: Tensor,
    gate_up: Sequence[Tensor] | nn.ParameterList,
    down: Sequence[Tensor] | nn.ParameterList,
    weights: Tensor,
    expert_ids: Tensor,
) -> Tensor:
    """Weighted sum of each token's experts. Experts without tokens cost nothing.

    Args:
        x: of shape [num_tokens, hidden].
        gate_up: of each expert gate rows, then up rows, of shape [2 * intermediate, hidden]; see `linear`.
        down: of each expert, of shape [hidden, intermediate].
        weights: of shape [num_tokens, top_k].
        expert_ids: int64 of shape [num_tokens, top_k].

    Returns:
        Of shape [num_tokens, hidden].
    """
    num_tokens, top_k = expert_ids.shape
    order = expert_ids.flatten().argsort(stable=True)  # (token, choice) pairs, grouped by expert
    counts = torch.bincount(expert_ids.flatten(), minlength=len(gate_up)).tolist()
    inputs = x[order // top_k].split(counts)
    grouped = torch.cat(
        [
            linear(silu_and_mul(linear(rows, gate_up[expert])), down[expert])
            for expert, rows in enumerate(inputs)
            if len(rows)
        ]
    )
    by_pair = torch.empty_like(grouped).index_copy_(0, order, grouped).view(num_tokens, top_k, -1)
    return (by_pair * weights[..., None]).sum(1)
