"""Operators of the layers that look beyond their arguments: attention, sums over ranks, mixtures of experts.

Called eagerly they are functions. In a graph that torch.compile traces they are opaque custom operators of the namespace `baton`:
what they read of the forward context, or of values on the device, is not part of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from baton_engine.distributed.group import Group
from baton_engine.distributed.group_errors import GroupBrokenError
from baton_engine.models.expert_parallel import ExpertShard
from baton_engine.models.forward_context import current_context
from baton_kernels.attention import paged_attention
from baton_kernels.kv_write import write_kv
from baton_kernels.moe import ExpertWeights, route_top_k, run_experts


def attend(q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float, window: int | None) -> Tensor:
    """Writes the KV of the step's tokens into the cache and attends to all that is there of their sequences.

    Args:
        q: of shape [num_tokens, num_heads, head_dim].
        k: of shape [num_tokens, num_kv_heads, head_dim].
        v: like k.
        layer: among this rank's.
        scale, window: as of `baton_kernels.attention.paged_attention`.

    Returns:
        Like q.
    """
    if torch.compiler.is_compiling():
        out = torch.empty_like(
            q
        )  # by the graph before, so that a captured one finds it at the same address
        torch.ops.baton.attend(q, k, v, out, layer, scale, window)
        return out
    return _attend(q, k, v, layer, scale, window)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The tensor ranks' sum of x, in place."""
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
    """Routes each token to its experts and sums what they make of it; see `baton_kernels.moe`.

    The choice is recorded for who asked for it, except in a compiled graph.
    """
    if torch.compiler.is_compiling():
        experts = [
            [weights] if isinstance(weights, Tensor) else list(weights)
            for weights in (gate_up, down)
        ]
        y: Tensor = torch.ops.baton.mix_experts(x, router_logits, *experts, top_k, renormalize)
        return y
    weights, expert_ids = _route(router_logits, top_k, renormalize)
    return run_experts(x, gate_up, down, weights, expert_ids)


def mix_parallel_experts(
    x: Tensor, router_logits: Tensor, shard: ExpertShard | None, top_k: int, renormalize: bool
) -> Tensor:
    """As `mix_experts`, with experts that are spread over the ranks of a group. Collective; never in a compiled graph.

    Without a shard there are no experts yet, and zeros are added: so steps that serve nobody run, to warm up. When the group
    breaks, the forward goes on with zeros, so that those of other groups stay in step; `ForwardContext.broken` says so.
    """
    weights, expert_ids = _route(router_logits, top_k, renormalize)
    return torch.zeros_like(x) if shard is None else exchange_tokens(shard, x, weights, expert_ids)


def exchange_tokens(shard: ExpertShard, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
    """`ExpertShard.mix` of this step, or zeros where its group is broken."""
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
    plan = context.plan(window)
    write_kv(k, v, key_cache, value_cache, context.slot_mapping, plan.write)
    return paged_attention(
        q,
        key_cache,
        value_cache,
        context.block_tables,
        context.cu_seqlens_q,
        context.seq_lens,
        scale,
        window,
        plan.attention,
        max_seqlen_q=context.max_seqlen_q,
        out=out,
    )


def _attend_to_real_tokens(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int, scale: float, window: int | None
) -> None:
    """`attend` in a traced graph, of whose tokens the last ones may be padding: of those, nothing is read or written."""
    num_tokens = len(current_context().slot_mapping)
    _attend(q[:num_tokens], k[:num_tokens], v[:num_tokens], layer, scale, window, out[:num_tokens])


def _all_reduce_in_place(x: Tensor) -> None:
    group = current_context().tensor_group
    assert group is not None, "who runs a compiled graph says with whom it sums"
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
    "attend(Tensor q, Tensor k, Tensor v, Tensor(a!) out, int layer, float scale, int? window) -> ()",
    _attend_to_real_tokens,
    _returns_nothing,
)
_define("all_reduce(Tensor(a!) x) -> ()", _all_reduce_in_place, _returns_nothing)
_define(
    "mix_experts(Tensor x, Tensor router_logits, Tensor[] gate_up, Tensor[] down, int top_k, bool renormalize) -> Tensor",
    _mix_experts,
    _like_first,
)

SPLITTING = {torch.ops.baton.attend.default: _attend_to_real_tokens}
"""Where a traced graph is cut, and what runs there: functions, for a dispatcher would only cost time."""
