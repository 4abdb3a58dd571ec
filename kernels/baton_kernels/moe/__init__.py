"""Mixture of experts: top-k routing, and the experts' gated MLPs on the tokens routed to them.

probs = softmax(router logits)                                  in float32
ids, weights = top k of probs                                   renormalised to sum 1 if asked
out[t] = sum over k of weights[t, k] * down[e] @ (silu(gate[e] @ x[t]) * (up[e] @ x[t]))     e = ids[t, k]

An id outside [0, num_experts), such as -1, is an expert that is not here: that choice adds zeros, whatever its weight.
"""

from __future__ import annotations

from torch import Tensor

from baton_kernels.moe.cpu import ExpertWeights, run_experts_cpu
from baton_kernels.moe.reference import route_top_k_reference

__all__ = ["ExpertWeights", "route_top_k", "run_experts"]


def route_top_k(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Chooses the experts of each token, by device of the logits.

    Which of equal probabilities are taken is up to the device. Where a logit is NaN, so are the token's weights.

    Args:
        router_logits: of shape [num_tokens, num_experts], at most 512 experts on a GPU.
        top_k: at most 16 on a GPU.

    Returns:
        weights (dtype of the logits) and expert ids (int64), each of shape [num_tokens, top_k].
    """
    if not router_logits.is_cuda:
        return route_top_k_reference(router_logits, top_k, renormalize)
    from baton_kernels.moe.triton_kernel import route_top_k_triton

    return route_top_k_triton(router_logits, top_k, renormalize)


def run_experts(
    x: Tensor, gate_up: ExpertWeights, down: ExpertWeights, weights: Tensor, expert_ids: Tensor
) -> Tensor:
    """Weighted sum of each token's experts, by device of `x`. Experts without tokens cost nothing.

    Args:
        x: of shape [num_tokens, hidden].
        gate_up: of each expert gate rows, then up rows: [num_experts, 2 * intermediate, hidden]. On a CPU perhaps a sequence
            of packed or quantised weights; see `linear`.
        down: of shape [num_experts, hidden, intermediate], or a sequence, likewise.
        weights: of shape [num_tokens, top_k].
        expert_ids: int64 of shape [num_tokens, top_k].

    Returns:
        Of shape [num_tokens, hidden].

    Raises:
        ValueError: on a GPU, if shapes do not belong together or the experts' weights are not contiguous.
    """
    if not x.is_cuda:
        return run_experts_cpu(x, gate_up, down, weights, expert_ids)
    from baton_kernels.moe.triton_kernel import run_experts_triton

    assert isinstance(gate_up, Tensor), "on a GPU the experts' weights are stacked"
    assert isinstance(down, Tensor), "on a GPU the experts' weights are stacked"
    return run_experts_triton(x, gate_up, down, weights, expert_ids)
