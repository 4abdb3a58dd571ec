"""Mixture of experts: top-k routing, and the experts' gated MLPs on the tokens routed to them.

probs = softmax(router logits)                                  in float32
ids, weights = top k of probs                                   renormalised to sum 1 if asked
out[t] = sum over k of weights[t, k] * down[e] @ (silu(gate[e] @ x[t]) * (up[e] @ x[t]))     e = ids[t, k]
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.activation import silu_and_mul


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


def run_experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
    """Weighted sum of each token's experts. Experts without tokens cost nothing.

    Args:
        x: of shape [num_tokens, hidden].
        gate_up: gate rows, then up rows, of shape [num_experts, 2 * intermediate, hidden].
        down: of shape [num_experts, hidden, intermediate].
        weights: of shape [num_tokens, top_k].
        expert_ids: int64 of shape [num_tokens, top_k].

    Returns:
        Of shape [num_tokens, hidden].
    """
    top_k = expert_ids.shape[1]
    order = expert_ids.flatten().argsort(stable=True)  # (token, choice) pairs, grouped by expert
    token_of = order // top_k
    weight_of = weights.flatten()[order, None]
    out = torch.zeros_like(x)
    start = 0
    for expert, count in enumerate(torch.bincount(expert_ids.flatten(), minlength=gate_up.shape[0]).tolist()):
        if count == 0:
            continue
        pairs = slice(start, start + count)
        start += count
        tokens = token_of[pairs]
        hidden = silu_and_mul(x[tokens] @ gate_up[expert].T)
        out.index_add_(0, tokens, (hidden @ down[expert].T) * weight_of[pairs])
    return out
