"""Mixture of experts: top-k routing, and each expert's gated MLP on the tokens of that expert.

    probs = softmax(router logits)              in float32
    ids, weights = top k of probs               optionally renormalized to sum 1
    y[t, k] = down[e] @ (silu(gate[e] @ x[t]) * (up[e] @ x[t]))        e = ids[t, k]
    out[t] = sum over k of weights[t, k] * y[t, k]

An id outside [0, num_experts), such as -1, means an expert of another rank. Such an expert
contributes zeros, even if its weight is NaN.

The implementations are C++ (../cpu/source/moe.h), torch (experts_cpu.py) and Triton
(triton_kernel.py).

Counted cost (`benchmarks/kernels/costs.py`):

    bytes       weights of the chosen experts, and tokens in and out
    operations  6 * hidden * intermediate per pair of a token and an expert
"""

from __future__ import annotations

from torch import Tensor

from baton_kernels.cpu import ops_for
from baton_kernels.moe.experts_cpu import ExpertList, ExpertWeights, run_experts_cpu
from baton_kernels.moe.reference import route_top_k_reference

__all__ = ["ExpertList", "ExpertWeights", "route_top_k", "run_experts"]


def route_top_k(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Return the routing weights and the experts of each token, on the device of the logits.

    Among experts with equal probabilities, the choice depends on the device. A NaN logit makes all
    weights of the token NaN.

    Args:
        router_logits: tensor of shape [num_tokens, num_experts], at most 512 experts on a GPU.
        top_k: number of experts per token; at most 16 on a GPU.
        renormalize: whether to scale the weights of a token to the sum 1.

    Returns:
        Weights (dtype of the logits) and expert ids (int64), each of shape [num_tokens, top_k].
    """
    if (ops := ops_for(router_logits)) is not None:
        weights, expert_ids = ops.route(router_logits, top_k, renormalize)
        return weights, expert_ids
    if not router_logits.is_cuda:
        return route_top_k_reference(router_logits, top_k, renormalize)
    from baton_kernels.moe.triton_kernel import route_top_k_triton

    return route_top_k_triton(router_logits, top_k, renormalize)


def run_experts(
    x: Tensor, gate_up: ExpertWeights, down: ExpertWeights, weights: Tensor, expert_ids: Tensor
) -> Tensor:
    """Compute the weighted sum of expert outputs for each token, on the device of `x`.

    Matrices of experts without tokens are not read.

    Args:
        x: tensor of shape [num_tokens, hidden].
        gate_up: tensor of shape [num_experts, 2 * intermediate, hidden], with the gate rows of an
            expert before its up rows. On a CPU, a sequence with one packed or quantized weight per
            expert is also allowed (see `linear`). An `ExpertList` is the fastest sequence.
        down: tensor of shape [num_experts, hidden, intermediate]. On a CPU, a sequence is also
            allowed, as for gate_up.
        weights: routing weights of shape [num_tokens, top_k].
        expert_ids: int64 of shape [num_tokens, top_k]. Ids outside [0, num_experts) add nothing.

    Returns:
        Tensor of shape [num_tokens, hidden].

    Raises:
        ValueError: on a GPU, shapes do not match or the experts' weights are not contiguous.
    """
    if not x.is_cuda:
        return run_experts_cpu(x, gate_up, down, weights, expert_ids)
    from baton_kernels.moe.triton_kernel import run_experts_triton

    assert isinstance(gate_up, Tensor), "on a GPU the experts' weights are stacked"
    assert isinstance(down, Tensor), "on a GPU the experts' weights are stacked"
    return run_experts_triton(x, gate_up, down, weights, expert_ids)
