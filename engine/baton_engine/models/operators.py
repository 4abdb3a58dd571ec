"""Operators that use the forward context or a group: attention, all-reduce, mixture of experts.

In eager code, the operators are plain functions. In a graph traced by torch.compile, each is an
opaque custom operator of the namespace `baton`, so the graph contains neither context nor group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from baton_engine.distributed.group import Group
from baton_engine.distributed.group_errors import GroupBrokenError
from baton_engine.models.expert_shard import ExpertShard
from baton_engine.models.forward_context import current_context
from baton_kernels.attention import paged_attention
from baton_kernels.kv_write import write_kv
from baton_kernels.moe import ExpertWeights, route_top_k, run_experts


def attend(q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float, window: int | None) -> Tensor:
    """Write k and v into the KV cache, then compute attention over the step's sequences.

    Args:
        q: queries of shape [num_tokens, num_heads, head_dim].
        k: keys of shape [num_tokens, num_kv_heads, head_dim].
        v: values of the same shape as k.
        layer: index of the layer on this rank.
        scale: positive factor of the scores, usually head_dim ** -0.5.
        window: size of the sliding window in tokens, at least 1. None: no window.

    Returns:
        The attention outputs, of the same shape as q.
    """
    if torch.compiler.is_compiling():
        # The previous piece allocates `out`, so its address is the same in every graph replay.
        out = torch.empty_like(q)
        torch.ops.baton.attend(q, k, v, out, layer, scale, window)
        return out
    return _attend(q, k, v, layer, scale, window)


def attend_to_prompt(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute the attention of each token to all tokens of its sequence in the step.

    Nothing is read from or written to the KV cache. Compiled graphs cannot contain this operator.

    Args:
        q: queries of shape [num_tokens, num_heads, head_dim].
        k: keys of the same shape.
        v: values of the same shape.
        scale: factor of the products of queries and keys.

    Returns:
        The attention outputs, of the same shape as q.
    """
    out = torch.empty_like(q)
    for start, end in current_context().query_bounds:
        # [tokens, heads, dim] -> [1, heads, tokens, dim]
        query, key, value = (each[start:end].transpose(0, 1)[None] for each in (q, k, v))
        attended = scaled_dot_product_attention(query, key, value, scale=scale)
        out[start:end] = attended[0].transpose(0, 1)
    return out


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum x over the tensor ranks in place, and return x."""
    if group.size > 1 and torch.compiler.is_compiling():
        torch.ops.baton.all_reduce(x)
        return x
    return group.all_reduce(x)


def mix_experts(
    x: Tensor,
    router_logits: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    top_k: int,
    renormalize: bool,
) -> Tensor:
    """Choose experts for each token, and return the weighted sums of the experts' outputs.

    See `baton_kernels.moe` for the arguments. Outside compiled graphs, the chosen experts are
    appended to `ForwardContext.routed_experts`, unless it is None.
    """
    if torch.compiler.is_compiling():
        experts = [
            [weights] if isinstance(weights, Tensor) else list(weights)
            for weights in (gate_up, down)
        ]
        return torch.ops.baton.mix_experts(x, router_logits, *experts, top_k, renormalize)
    weights, expert_ids = _route(router_logits, top_k, renormalize)
    return run_experts(x, gate_up, down, weights, expert_ids)


def mix_parallel_experts(
    x: Tensor, router_logits: Tensor, shard: ExpertShard | None, top_k: int, renormalize: bool
) -> Tensor:
    """Return the result of `mix_experts`, with experts on all ranks of an expert-parallel group.

    All ranks must call this operator, and compiled graphs cannot contain it. Without a shard, as
    during warm-up, the result is zeros. If the group breaks, `ForwardContext.broken` is set and the
    result is zeros. The forward continues, so that collectives of other groups still match.
    """
    weights, expert_ids = _route(router_logits, top_k, renormalize)
    return torch.zeros_like(x) if shard is None else exchange_tokens(shard, x, weights, expert_ids)


def exchange_tokens(shard: ExpertShard, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
    """Return the result of `ExpertShard.mix` for this step, or zeros if the group is broken.

    If the group breaks during the call, set `ForwardContext.broken`.
    """
    context = current_context()
    if context.broken is None:
        try:
            return shard.mix(x, weights, expert_ids, context.wave_tokens)
        except GroupBrokenError as error:
            context.broken = error
    return torch.zeros_like(x)


def _route(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    weights, expert_ids = route_top_k(router_logits, top_k, renormalize)
    routed_experts = current_context().routed_experts
    if routed_experts is not None:
        routed_experts.append(expert_ids)
    return weights, expert_ids


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: int,
    scale: float,
    window: int | None,
    out: Tensor | None = None,
) -> Tensor:
    context = current_context()
    key_cache, value_cache = context.layer_cache(layer)
    plan = context.plan(q, window)
    write_kv(k, v, key_cache, value_cache, context.slot_mapping, plan.write)
    if context.kv_written is not None and layer == context.kv_cache.shape[2] - 1:
        context.kv_written()
    return paged_attention(q, key_cache, value_cache, plan.attention, scale, out=out)


def _attend_to_real_tokens(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int, scale: float, window: int | None
) -> None:
    """Write the result of `attend` into `out`. Traced graphs call this function.

    Tokens past the end of the context's `slot_mapping` are padding and are skipped.
    """
    num_tokens = len(current_context().slot_mapping)
    _attend(q[:num_tokens], k[:num_tokens], v[:num_tokens], layer, scale, window, out[:num_tokens])


def _all_reduce_in_place(x: Tensor) -> None:
    group = current_context().tensor_group
    assert group is not None, "set ForwardContext.tensor_group before running a compiled graph"
    group.all_reduce(x)


def _mix_experts(
    x: Tensor,
    router_logits: Tensor,
    gate_up: list[Tensor],
    down: list[Tensor],
    top_k: int,
    renormalize: bool,
) -> Tensor:
    together = gate_up[0].dim() == 3
    weights = route_top_k(router_logits, top_k, renormalize)
    return run_experts(
        x, gate_up[0] if together else gate_up, down[0] if together else down, *weights
    )


def _returns_nothing(*args: Any) -> None:
    pass


def _like_first(x: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(x)


_library = torch.library.Library("baton", "DEF")


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"baton::{name}", fake, lib=_library)


_define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor(a!) out, "
    "int layer, float scale, int? window) -> ()",
    _attend_to_real_tokens,
    _returns_nothing,
)
_define("all_reduce(Tensor(a!) x) -> ()", _all_reduce_in_place, _returns_nothing)
_define(
    "mix_experts(Tensor x, Tensor router_logits, Tensor[] gate_up, Tensor[] down, "
    "int top_k, bool renormalize) -> Tensor",
    _mix_experts,
    _like_first,
)

#: Operators at which a traced graph is cut, and the function that replaces each of them.
SPLITTING = {torch.ops.baton.attend.default: _attend_to_real_tokens}
