"""Paged attention: queries of many sequences over keys and values in fixed-size blocks.

The query heads are divided among the KV heads. Query head h uses KV head
g = h // (num_heads / num_kv_heads). For the query at position p of a sequence:

    out[h] = sum over t <= p of softmax_t(scale * q[h] . K[g, t]) * V[g, t]

Options, each off by default:

    sliding window (Beltagy et al. 2020)   the sum is over p - window < t <= p
    soft cap (Gemma Team 2024)             score = cap * tanh(score / cap)
    fp8 caches                             K[g, t] = key_scale[g] * cached key, V likewise

No model uses the soft cap or the scales yet. They are for Gemma models and fp8 KV caches.

One call serves prefill chunks and decode steps together (varlen). The queries of sequence s are the
rows `cu_seqlens_q[s] : cu_seqlens_q[s + 1]`. These queries are the last of the sequence's
`seq_lens[s]` tokens. Slots past the sequence's end may hold stale bytes or NaN, which never affect
the result.

The implementations are C++ (../cpu/source/attention.h), torch (torch_cpu.py) and Triton
(triton_kernel.py).

Counted cost (`benchmarks/kernels/costs.py`):

    bytes       visible keys and values of each sequence, queries, results and block ids
    operations  4 * head_dim for each head, each query and each key that the query attends to

A step calls `plan_attention` once, on the host. The plan has what all layers of the step share: the
implementation, the launch configuration, the split of long sequences and the workspace. Each layer
then calls `paged_attention` with the plan and the layer's query and cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from baton_kernels import cpu
from baton_kernels.attention.torch_cpu import GatherPlan, paged_attention_cpu

if TYPE_CHECKING:
    from baton_kernels.attention.triton_plan import Launch


#: triton: on a GPU, and in tests in Triton's interpreter.
#: cpp: on a CPU with compiled operations.
#: torch: on a CPU without compiled operations. It supports no soft cap and no fp8 caches.
#: reference: on a CPU, for options that neither cpp nor torch supports.
Implementation = Literal["triton", "cpp", "torch", "reference"]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """Sequences, options and precomputed data of a step's attention, which all layers share."""

    implementation: Implementation
    query_shape: torch.Size  #: [num_tokens, num_heads, head_dim].
    #: int32 [num_seqs, max_blocks_per_seq]: block ids of each sequence. Padding is not read.
    block_tables: Tensor
    cu_seqlens_q: Tensor  #: int32 [num_seqs + 1]: prefix sum of query lengths.
    seq_lens: Tensor  #: int32 [num_seqs]: tokens of each sequence, including its queries.
    window: int | None  #: Tokens that a query attends to, including its own. None: no limit.
    soft_cap: float | None  #: Bound of the scores. None: no bound.
    launch: Launch | None  #: Only for triton: grids, constants and workspace.
    gather: GatherPlan | None  #: Only for torch: rows to gather, masks and scratch memory.


def plan_attention(
    query: Tensor,
    key_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    window: int | None = None,
    max_seqlen_q: int | None = None,
    soft_cap: float | None = None,
    implementation: Implementation | None = None,
) -> AttentionPlan:
    """Prepare the attention of a step, once for all layers.

    For a GPU, the function reads only shapes and host values, and does not wait for the device.
    During the capture of a CUDA graph, the plan's workspace is allocated in the graph's memory.
    `AttentionPlan` describes the arguments that are not listed here.

    Args:
        query: the query of any layer. All layers have the same shape and dtype.
        key_cache: the cache of any layer. All layers have the same shape, strides and dtype.
        window: size of the sliding window in tokens, at least 1. None: no window.
        max_seqlen_q: upper bound of the number of queries of a sequence. None: unknown. If it is
            small (decode), a GPU divides long sequences among programs (`split_kv`).
        soft_cap: positive bound of the scores. None: no bound.
        implementation: implementation to use, for tests. None: this function chooses by device,
            dtype and options.

    Raises:
        ValueError: an option is out of range, query and cache do not fit together, or the
            implementation does not support the cache's strides.
    """
    _check_step(query, key_cache, window, soft_cap)
    if implementation is None:
        implementation = _choose(key_cache, soft_cap)
    launch = gather = None
    if implementation == "triton":
        from baton_kernels.attention.triton_plan import plan_launch

        launch = plan_launch(query, key_cache, block_tables, len(seq_lens), window, max_seqlen_q)
    elif implementation == "torch":
        gather = GatherPlan(key_cache, block_tables, cu_seqlens_q, seq_lens, window)
    return AttentionPlan(
        implementation,
        query.shape,
        block_tables,
        cu_seqlens_q,
        seq_lens,
        window,
        soft_cap,
        launch,
        gather,
    )


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute a layer's causal attention with grouped query heads.

    On a GPU, the call does not wait for the device. The launch parameters do not depend on the
    values of lengths and block tables. So a captured CUDA graph can be replayed with other values.

    Args:
        query: tensor of shape [num_tokens, num_heads, head_dim].
        key_cache: tensor of shape [num_blocks, num_kv_heads, block_size, head_dim], in query's
            dtype or float8_e4m3fn. The last stride is 1. On a CPU the tokens of a block and head
            are contiguous, and the other strides are multiples of block_size * head_dim.
        value_cache: like key_cache, with the same strides.
        plan: result of `plan_attention` for this step.
        scale: positive factor of the scores, usually head_dim ** -0.5.
        key_scale: positive float32 of shape [num_kv_heads]. Required for fp8 caches, else None.
        value_scale: like key_scale.
        out: tensor for the result, of query's shape and dtype, with last stride 1. None: a new
            tensor.

    Returns:
        Tensor of shape [num_tokens, num_heads, head_dim] in query's dtype. Queries of a sequence of
        length 0 get zeros.

    Raises:
        ValueError: the arguments contradict each other or the plan, or the implementation does not
            support the strides.
    """
    _check_layer(query, key_cache, plan, scale, key_scale, value_scale)
    match plan.implementation:
        case "triton":
            from baton_kernels.attention.triton_kernel import paged_attention_triton

            return paged_attention_triton(
                query, key_cache, value_cache, plan, scale, key_scale, value_scale, out
            )
        case "cpp":
            assert cpu.OPS is not None
            if out is None:
                out = torch.empty_like(query, memory_format=torch.contiguous_format)
            cpu.OPS.paged_attention(
                out,
                query,
                key_cache,
                value_cache,
                plan.block_tables,
                plan.cu_seqlens_q,
                plan.seq_lens,
                scale,
                plan.window,
                plan.soft_cap,
            )
            return out
        case "torch":
            assert plan.gather is not None
            attended = paged_attention_cpu(query, key_cache, value_cache, plan.gather, scale)
        case "reference":
            from baton_kernels.attention.reference import paged_attention_reference

            attended = paged_attention_reference(
                query, key_cache, value_cache, plan, scale, key_scale, value_scale
            )
    return attended if out is None else out.copy_(attended)


def _choose(key_cache: Tensor, soft_cap: float | None) -> Implementation:
    if key_cache.is_cuda:
        return "triton"
    if cpu.OPS is not None and key_cache.dtype in cpu.DTYPES:
        return "cpp"
    if soft_cap is not None or key_cache.dtype == torch.float8_e4m3fn:
        return "reference"
    return "torch"


def _check_step(
    query: Tensor, key_cache: Tensor, window: int | None, soft_cap: float | None
) -> None:
    """Raise ValueError if no implementation supports the step. Tensor values are not read."""
    if key_cache.dtype not in (query.dtype, torch.float8_e4m3fn):
        raise ValueError(
            f"queries of {query.dtype} need caches of the same dtype or float8_e4m3fn, "
            f"not {key_cache.dtype}"
        )
    if query.shape[1] % key_cache.shape[1]:
        raise ValueError(
            f"{query.shape[1]} query heads cannot share {key_cache.shape[1]} KV heads evenly"
        )
    if window is not None and window < 1:
        raise ValueError(f"the window must be positive, not {window}")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap must be positive, not {soft_cap}")


def _check_layer(
    query: Tensor,
    key_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> None:
    """Raise ValueError if the layer does not fit the plan. Tensor values are not read."""
    if query.shape != plan.query_shape:
        raise ValueError(
            f"the step is planned for queries of shape {list(plan.query_shape)}, "
            f"not {list(query.shape)}"
        )
    is_fp8 = key_cache.dtype == torch.float8_e4m3fn
    if (key_scale is not None, value_scale is not None) != (is_fp8, is_fp8):
        raise ValueError(
            "key_scale and value_scale go with float8_e4m3fn caches, which need both; these "
            f"caches are {key_cache.dtype}"
        )
    if scale <= 0:
        raise ValueError(f"scale must be positive, not {scale}")
