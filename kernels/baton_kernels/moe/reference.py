"""Routing and experts in torch, in float32. CPUs use the routing. The experts are for tests."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import silu


def route_top_k_reference(
    router_logits: Tensor, top_k: int, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """Implement `baton_kernels.moe.route_top_k` in torch."""
    probs = torch.softmax(router_logits, dim=-1, dtype=torch.float32)
    weights, expert_ids = probs.topk(top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(router_logits.dtype), expert_ids


def run_experts_reference(
    x: Tensor,
    gate_up: Iterable[Tensor],
    down: Iterable[Tensor],
    weights: Tensor,
    expert_ids: Tensor,
) -> Tensor:
    """Implement `baton_kernels.moe.run_experts` in torch, one expert after the other.

    Weights must be plain tensors, not packed or quantized.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, (gate_up_rows, down_rows) in enumerate(zip(gate_up, down, strict=True)):
        token, choice = torch.nonzero(expert_ids == expert, as_tuple=True)
        gate, up = (x[token].float() @ gate_up_rows.float().T).chunk(2, dim=-1)
        y = (silu(gate) * up) @ down_rows.float().T
        out.index_add_(0, token, y * weights[token, choice, None].float())
    return out.to(x.dtype)
