"""Paged attention in Triton: one program per (query block, KV head), online softmax over KV tiles.

The query heads of one KV head times a few query tokens are packed into the M dimension of `tl.dot`, so decode (one token)
and prefill share the code. A program finds its sequence by binary search in `cu_seqlens_q`: the grid's bound
`num_tokens // BLOCK_Q + num_seqs` needs only shapes, so the host never waits for the device. Scores are kept in base 2
(q is scaled by log2(e) beforehand) because exp2 is what the hardware has.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_seqs"])
def _paged_attention_kernel(  # type: ignore[no-untyped-def]  # Triton types its parameters itself
    out_ptr,  # [num_tokens, num_heads, head_dim]
    q_ptr,  # [num_tokens, num_heads, head_dim]
    k_ptr,  # [num_blocks, num_kv_heads, block_size, head_dim]
    v_ptr,  # like k_ptr, same strides
    block_tables_ptr,  # [num_seqs, max_blocks_per_seq]
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    seq_lens_ptr,  # [num_seqs]
    scale_log2e,
    num_seqs,
    stride_out_token,
    stride_out_head,
    stride_q_token,
    stride_q_head,
    stride_kv_block,
    stride_kv_head,
    stride_kv_slot,
    stride_table_seq,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # query tokens per program, BLOCK_M // GROUP
    KV_TILE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
):
    q_block = tl.program_id(0)
    kv_head = tl.program_id(1)

    # Sequence s owns the query blocks from cu_seqlens_q[s] // BLOCK_Q + s on: find the last s that begins at or before ours.
    left = 0
    right = num_seqs
    while left < right:
        middle = (left + right) // 2
        first_block = tl.load(cu_seqlens_q_ptr + middle) // BLOCK_Q + middle
        if first_block <= q_block:
            left = middle + 1
        else:
            right = middle
    seq = left - 1
    q_start = tl.load(cu_seqlens_q_ptr + seq)
    q_len = tl.load(cu_seqlens_q_ptr + seq + 1) - q_start
    q_offset = (q_block - (q_start // BLOCK_Q + seq)) * BLOCK_Q
    if q_offset >= q_len:
        return
    seq_len = tl.load(seq_lens_ptr + seq)

    rows = tl.arange(0, BLOCK_M)  # row = query token * GROUP + head in group
    dims = tl.arange(0, HEAD_DIM_PADDED)
    q_index = q_offset + rows // GROUP
    row_mask = (rows < BLOCK_Q * GROUP) & (q_index < q_len)
    dim_mask = dims < HEAD_DIM
    head = kv_head * GROUP + rows % GROUP
    q_token = (q_start + q_index).to(tl.int64)
    q = tl.load(
        q_ptr + (q_token * stride_q_token + head * stride_q_head)[:, None] + dims[None, :],
        mask=row_mask[:, None] & dim_mask[None, :],
        other=0.0,
    )  # [BLOCK_M, HEAD_DIM_PADDED]
    last_visible = seq_len - q_len + q_index  # [BLOCK_M] position of each query

    running_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], dtype=tl.float32)
    kv_end = tl.minimum(seq_len, seq_len - q_len + q_offset + BLOCK_Q)
    kv_start = 0
    if WINDOW > 0:  # what even the first query does not see
        kv_start = tl.maximum(0, seq_len - q_len + q_offset - WINDOW + 1)
    table_ptr = block_tables_ptr + tl.cast(seq, tl.int64) * stride_table_seq
    for tile_start in range(kv_start, kv_end, KV_TILE):
        token = tile_start + tl.arange(0, KV_TILE)
        token_mask = token < kv_end
        block_id = tl.load(table_ptr + token // BLOCK_SIZE, mask=token_mask, other=0).to(tl.int64)
        kv_offset = block_id * stride_kv_block + kv_head * stride_kv_head + (token % BLOCK_SIZE) * stride_kv_slot
        # What lies past kv_end is never loaded: stale bytes may be NaN, and 0 * NaN is NaN.
        kv_mask = token_mask[:, None] & dim_mask[None, :]
        k = tl.load(k_ptr + kv_offset[:, None] + dims[None, :], mask=kv_mask, other=0.0)  # [KV_TILE, HEAD_DIM_PADDED]
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2e  # [BLOCK_M, KV_TILE]
        visible = token[None, :] <= last_visible[:, None]
        if WINDOW > 0:
            visible = visible & (token[None, :] > last_visible[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        # Without a window the first tile holds token 0, which every query sees: new_max is finite from then on.
        base = new_max
        if WINDOW > 0:  # the window of a later query may begin behind the first tile
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.math.exp2(running_max - base)
        weights = tl.math.exp2(scores - base[:, None])
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        v = tl.load(v_ptr + kv_offset[:, None] + dims[None, :], mask=kv_mask, other=0.0)
        acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        running_max = new_max

    acc = acc / running_sum[:, None]
    tl.store(
        out_ptr + (q_token * stride_out_token + head * stride_out_head)[:, None] + dims[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=row_mask[:, None] & dim_mask[None, :],
    )


def paged_attention_triton(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Arguments and result as `baton_kernels.attention.paged_attention`; `out` is written if given.

    Raises:
        ValueError: if strides are not what the kernel addresses.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    if key_cache.stride() != value_cache.stride() or key_cache.stride(3) != 1 or query.stride(2) != 1:
        raise ValueError("key and value cache need equal strides, and the head dimension of q, k and v stride 1")
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    group = num_heads // num_kv_heads
    block_m = max(16, triton.next_power_of_2(group))
    if num_tokens > 8 * seq_lens.shape[0]:  # mostly prefill: longer query blocks reuse each KV tile more
        block_m = max(block_m, 64)
    block_q = block_m // group
    head_dim_padded = max(16, triton.next_power_of_2(head_dim))
    grid = (num_tokens // block_q + seq_lens.shape[0], num_kv_heads)
    _paged_attention_kernel[grid](
        out,
        query,
        key_cache,
        value_cache,
        block_tables,
        cu_seqlens_q,
        seq_lens,
        scale * math.log2(math.e),
        seq_lens.shape[0],
        out.stride(0),
        out.stride(1),
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        block_tables.stride(0),
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=head_dim_padded,
        BLOCK_SIZE=block_size,
        GROUP=group,
        BLOCK_M=block_m,
        BLOCK_Q=block_q,
        KV_TILE=64 if head_dim_padded <= 128 else 32,
        WINDOW=window or 0,
        num_warps=4,
        num_stages=2,
    )
    return out
