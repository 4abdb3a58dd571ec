"""Measures a mixture of experts at decode.

Copy bandwidth is the limit, because the weights of each chosen expert are read once. The sizes are
those of Qwen3-30B-A3B: 128 experts, 8 per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import costs
import torch
from goals import reached
from measure import Call, Result, Rows, Setting, best_peer, check, gb_s, tflop_s, us
from torch import Tensor
from torch.nn.functional import silu

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K = 2048, 768, 128, 8
TOKENS = [1, 2, 4, 8, 16, 32, 64, 256, 4096]
MOST_OF_GOAL = 64
NUM_LAYERS = 4  #: Sets of weights, of 1.2 GB each.
#: Sets of tokens per layer. A few tokens read few weights, which must not stay in the cache.
NUM_ROUTINGS = 8


@dataclass
class Layer:
    """The weights of one layer's experts, as `baton_kernels.moe.run_experts` expects them."""

    gate_up: Tensor
    down: Tensor


@dataclass
class Routed:
    """Tokens with their experts.

    Args:
        x: the tokens, of shape [num_tokens, hidden].
        weights: of shape [num_tokens, top_k].
        expert_ids: of shape [num_tokens, top_k].
    """

    x: Tensor
    weights: Tensor
    expert_ids: Tensor

    def cost(self, layer: Layer) -> costs.Cost:
        return costs.experts(self.x, layer.gate_up, layer.down, self.expert_ids)


def make_layer(setting: Setting, hidden: int, intermediate: int, num_experts: int) -> Layer:
    def weight(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=setting.dtype, device=setting.device).normal_(
            std=shape[-1] ** -0.5
        )

    return Layer(
        weight(num_experts, 2 * intermediate, hidden), weight(num_experts, hidden, intermediate)
    )


def route(setting: Setting, num_tokens: int, hidden: int, num_experts: int, top_k: int) -> Routed:
    """Return random tokens, each with `top_k` uniformly random experts."""
    from baton_kernels.moe import route_top_k

    logits = torch.randn(num_tokens, num_experts, device=setting.device)
    weights, expert_ids = route_top_k(logits.to(setting.dtype), top_k, True)
    return Routed(
        torch.randn(num_tokens, hidden, device=setting.device).to(setting.dtype),
        weights,
        expert_ids,
    )


def expected(layer: Layer, tokens: Routed) -> Tensor:
    """Return the reference result, computed in float32 for one expert after the other."""
    out = torch.zeros(tokens.x.shape, dtype=torch.float32, device=tokens.x.device)
    for expert in tokens.expert_ids.unique().tolist():
        rows, choice = (tokens.expert_ids == expert).nonzero(as_tuple=True)
        gate, up = (tokens.x[rows].float() @ layer.gate_up[expert].float().T).chunk(2, -1)
        result = (silu(gate) * up) @ layer.down[expert].float().T
        out.index_add_(0, rows, result * tokens.weights[rows, choice, None].float())
    return out


def run(setting: Setting) -> Result:
    from baton_kernels.moe import run_experts

    hidden, intermediate, num_experts, top_k = (
        (64, 32, 8, 2) if setting.quick else (HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K)
    )
    layers = [
        make_layer(setting, hidden, intermediate, num_experts)
        for _ in range(2 if setting.quick else NUM_LAYERS)
    ]
    rows: Rows = []
    fractions: dict[int, float] = {}
    for num_tokens in [1, 5] if setting.quick else TOKENS:
        routings = 2 if setting.quick or num_tokens > MOST_OF_GOAL else NUM_ROUTINGS
        work = [
            (layer, route(setting, num_tokens, hidden, num_experts, top_k))
            for _ in range(routings)
            for layer in layers
        ]
        for layer, tokens in work[: len(layers)]:
            got = run_experts(
                tokens.x, layer.gate_up, layer.down, tokens.weights, tokens.expert_ids
            )
            check(f"experts of {num_tokens} tokens", got, expected(layer, tokens))
        seconds = setting.seconds([_ours(layer, tokens) for layer, tokens in work])
        nbytes, flops = (
            sum(counts) / len(work)
            for counts in zip(*(tokens.cost(layer) for layer, tokens in work), strict=True)
        )
        fractions[num_tokens] = nbytes / seconds / setting.copy_bandwidth
        peer, peer_seconds, peer_rows = best_peer(
            setting, {"torch grouped_mm": [_grouped_mm(*one) for one in work]}
        )
        rows.append(
            {
                "part": "MoE",
                "tokens": num_tokens,
                "us": us(seconds),
                "GB/s": gb_s(nbytes, seconds),
                "of copy": round(fractions[num_tokens], 3),
                "TFLOP/s": tflop_s(flops, seconds),
                "of GEMM": round(flops / seconds / setting.gemm_flops, 3),
                "best peer": peer,
                "against it": round(peer_seconds / seconds, 2),
            }
        )
        rows += [
            {"part": "MoE, peers", "tokens": num_tokens, **row}
            for row in peer_rows
            if row["not run"]
        ]
    return rows, reached(
        "moe", min(value for num_tokens, value in fractions.items() if num_tokens <= MOST_OF_GOAL)
    )


def _ours(layer: Layer, tokens: Routed) -> Call:
    from baton_kernels.moe import run_experts

    return lambda: run_experts(
        tokens.x, layer.gate_up, layer.down, tokens.weights, tokens.expert_ids
    )


def _grouped_mm(layer: Layer, tokens: Routed) -> Call:
    """Return a call that computes the experts with torch's grouped matrix product.

    The call also sorts the tokens by expert and combines the results.
    """
    grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    num_tokens, top_k = tokens.expert_ids.shape
    experts = torch.arange(len(layer.gate_up), device=tokens.x.device)

    def call() -> Tensor:
        ids, order = tokens.expert_ids.flatten().sort()
        ends = torch.searchsorted(ids, experts, right=True).int()
        inside = grouped(tokens.x[order // top_k], layer.gate_up.transpose(1, 2), offs=ends)
        gate, up = inside.chunk(2, -1)
        out = grouped(silu(gate) * up, layer.down.transpose(1, 2), offs=ends)
        by_choice = torch.empty_like(out).index_copy_(0, order, out).view(num_tokens, top_k, -1)
        return (by_choice * tokens.weights[..., None]).sum(1)

    return call
