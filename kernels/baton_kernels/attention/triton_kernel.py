"""Paged attention in Triton: one program per (query block, KV head), online softmax over KV tiles.

The algorithm is FlashAttention-2 (Dao 2023). The rows of `tl.dot` are the query heads of one KV
head, for a few query tokens. So decode (one token) and prefill share the code. If each sequence has
few queries (decode), the program id selects a sequence, or a segment of a sequence (`split_kv`).
Otherwise each program finds its sequence by binary search in `cu_seqlens_q`. The host computes the
size of the grid, `num_tokens // BLOCK_Q + num_seqs`, from shapes, without waiting for the device.
The last query blocks of a sequence attend to the most keys, so they start first.

Key tiles need not match KV blocks, because each token is looked up in the block table. The block
ids of the next tile are loaded during the computation of a tile. Scores are in base 2, for the
hardware's exp2.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.attention.split_kv_triton import (
    Partials,
    SplitKVBatch,
    find_segment,
    join_segments_kernel,
)
from baton_kernels.kernel_arguments import Caches, Heads

if TYPE_CHECKING:
    from baton_kernels.attention import AttentionPlan

LOG2E = tl.constexpr(math.log2(math.e))

# Arguments that vary between steps. They are not in named tuples, because Triton specializes on
# every field of a tuple, and would recompile the kernel.
_VARYING = ["num_seqs", "target_segments", "stride_table_seq"]
_UNALIGNED = ["block_tables_ptr", "cu_seqlens_q_ptr", "seq_lens_ptr"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _paged_attention_kernel(
    out: Heads,
    q: Heads,
    caches: Caches,
    block_tables_ptr,  # int32 [num_seqs, max_blocks_per_seq]
    cu_seqlens_q_ptr,  # int32 [num_seqs + 1]
    seq_lens_ptr,  # int32 [num_seqs]
    stride_table_seq,
    num_seqs,
    partials: Partials | None,  # None: no sequence is split
    target_segments,  # only with partials
    scale,
    soft_cap,  # None: no cap
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # query tokens per program, BLOCK_M // GROUP
    KV_TILE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    ONE_BLOCK: tl.constexpr,  # each sequence has at most BLOCK_Q queries; required by partials
    MIN_TILES: tl.constexpr,
    SCAN: tl.constexpr,
):
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    item = tl.program_id(0) // NUM_KV_HEADS
    q_offset = 0
    segment = 0
    segments = 1
    if partials is not None:
        seq, segment, segments = find_segment(
            item,
            SplitKVBatch(cu_seqlens_q_ptr, seq_lens_ptr, num_seqs),
            target_segments,
            KV_TILE,
            MIN_TILES,
            WINDOW,
            SCAN,
        )
        if seq >= num_seqs:
            return
        if (segment == 0) & (kv_head == 0):
            tl.store(partials.segments_ptr + 2 * seq, item)
            tl.store(partials.segments_ptr + 2 * seq + 1, segments)
    elif ONE_BLOCK:
        seq = item
    else:
        # Sequence s has the query blocks from cu_seqlens_q[s] // BLOCK_Q + s on. Find the last s
        # that begins at or before this block.
        q_block = tl.num_programs(0) // NUM_KV_HEADS - 1 - item
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
        q_offset = (q_block - (tl.load(cu_seqlens_q_ptr + seq) // BLOCK_Q + seq)) * BLOCK_Q
    q_start = tl.load(cu_seqlens_q_ptr + seq)
    q_len = tl.load(cu_seqlens_q_ptr + seq + 1) - q_start
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
    # [BLOCK_M, HEAD_DIM_PADDED]
    query = tl.load(
        q.ptr + (q_token * q.stride_token + head * q.stride_head)[:, None] + dims[None, :],
        mask=row_mask[:, None] & dim_mask[None, :],
        other=0.0,
    )
    first_position = seq_len - q_len + q_offset
    last_visible = seq_len - q_len + q_index  # [BLOCK_M] position of each query
    if caches.key_scale_ptr is not None:
        scale *= tl.load(caches.key_scale_ptr + kv_head)
    # `unit` converts scores to base 2. With a soft cap, the factor of the cap converts them.
    unit = scale * LOG2E
    if soft_cap is not None:
        unit = 1.0

    kv_end = tl.minimum(seq_len, first_position + BLOCK_Q)
    kv_start = 0
    if WINDOW > 0:  # no query attends to an earlier token
        kv_start = tl.maximum(0, first_position - WINDOW + 1)
    first_tile = kv_start // KV_TILE
    end_tile = (kv_end + KV_TILE - 1) // KV_TILE
    if partials is not None:
        num_tiles = end_tile - first_tile
        end_tile = first_tile + (segment + 1) * num_tiles // segments
        first_tile += segment * num_tiles // segments
    # Offsets within a block table's row fit into 32 bits. Offsets of rows and of blocks may not.
    table_ptr = block_tables_ptr + tl.cast(seq, tl.int64) * stride_table_seq
    k_ptr = caches.k_ptr + tl.cast(kv_head, tl.int64) * caches.stride_head
    v_ptr = caches.v_ptr + tl.cast(kv_head, tl.int64) * caches.stride_head
    in_tile = tl.arange(0, KV_TILE)

    running_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], dtype=tl.float32)
    if ONE_BLOCK:  # warps share the rows, so a sum per tile would synchronize the warps each time
        running_sum = tl.zeros([BLOCK_M, KV_TILE], dtype=tl.float32)
    else:
        running_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    next_token = first_tile * KV_TILE + in_tile
    next_mask = (next_token >= kv_start) & (next_token < kv_end)
    next_block = tl.load(table_ptr + next_token // BLOCK_SIZE, mask=next_mask, other=0)
    for tile_start in range(first_tile * KV_TILE, end_tile * KV_TILE, KV_TILE):
        token = tile_start + in_tile
        block = next_block.to(tl.int64)
        next_token = token + KV_TILE
        next_block = tl.load(
            table_ptr + next_token // BLOCK_SIZE, mask=next_token < kv_end, other=0
        )
        kv_offset = (block * caches.stride_block + (token % BLOCK_SIZE) * caches.stride_slot)[
            :, None
        ] + dims[None, :]
        # Tokens past kv_end are not loaded: stale bytes may be NaN, and 0 * NaN is NaN. Blocks
        # before kv_start may have been freed.
        kv_mask = (token < kv_end)[:, None]
        if WINDOW > 0:
            kv_mask = kv_mask & (token >= kv_start)[:, None]
        if HEAD_DIM != HEAD_DIM_PADDED:
            kv_mask = kv_mask & dim_mask[None, :]
        k = tl.load(k_ptr + kv_offset, mask=kv_mask, other=0.0)  # [KV_TILE, HEAD_DIM_PADDED]
        scores = tl.dot(
            query, tl.trans(k.to(query.dtype)), input_precision="ieee"
        )  # [BLOCK_M, KV_TILE]
        if soft_cap is not None:  # tanh(x) = 1 - 2 / (1 + exp(2 x)), exact at both infinities
            scores = 1.0 - 2.0 / (1.0 + tl.math.exp2(scores * (2.0 * LOG2E * scale / soft_cap)))
            scores *= soft_cap * LOG2E
        at_edge = tile_start + KV_TILE > first_position + 1
        if WINDOW > 0:
            at_edge = at_edge | (tile_start <= first_position + BLOCK_Q - 1 - WINDOW)
        if at_edge:
            visible = token[None, :] <= last_visible[:, None]
            if WINDOW > 0:
                visible = visible & (token[None, :] > last_visible[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        # A query may attend to no key of the first tiles: the window begins later, or the segment
        # lies past the query's position.
        base = tl.where(new_max == float("-inf"), 0.0, new_max) * unit
        rescale = tl.math.exp2(running_max * unit - base)
        weights = tl.math.exp2(scores * unit - base[:, None])
        if ONE_BLOCK:
            running_sum = running_sum * rescale[:, None] + weights
        else:
            running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        v = tl.load(v_ptr + kv_offset, mask=kv_mask, other=0.0).to(query.dtype)
        acc = tl.dot(weights.to(query.dtype), v, acc * rescale[:, None], input_precision="ieee")
        running_max = new_max

    if ONE_BLOCK:
        row_sum = tl.sum(running_sum, axis=1)
    else:
        row_sum = running_sum
    if caches.value_scale_ptr is not None:
        acc *= tl.load(caches.value_scale_ptr + kv_head)
    mask = row_mask[:, None] & dim_mask[None, :]
    if segments == 1:
        acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]  # 0: an empty sequence
        out_row = q_token * out.stride_token + head * out.stride_head
        target = out.ptr + out_row[:, None] + dims[None, :]
        tl.store(target, acc.to(out.ptr.dtype.element_ty), mask=mask)
    elif partials is not None:
        index = (item * NUM_KV_HEADS + kv_head) * BLOCK_M + rows
        tl.store(partials.out_ptr + index[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
        tl.store(partials.sum_ptr + index, row_sum, mask=row_mask)
        tl.store(partials.max_ptr + index, running_max * unit, mask=row_mask)


def paged_attention_triton(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """Implement `baton_kernels.attention.paged_attention` in Triton.

    Raises:
        ValueError: the kernel does not support the strides.
    """
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if (
        key_cache.stride() != value_cache.stride()
        or key_cache.stride(3) != 1
        or query.stride(2) != 1
        or out.stride(2) != 1
    ):
        raise ValueError(
            "key and value cache need equal strides, and the head dimension of q, k, v and out "
            "stride 1"
        )
    launch, num_seqs = plan.launch, len(plan.seq_lens)
    assert launch is not None
    if len(query) == 0 or num_seqs == 0:
        return out
    attended = Heads(out, *out.stride()[:2])
    _paged_attention_kernel[(launch.items * key_cache.shape[1],)](
        attended,
        Heads(query, *query.stride()[:2]),
        Caches(key_cache, value_cache, key_scale, value_scale, *key_cache.stride()[:3]),
        plan.block_tables,
        plan.cu_seqlens_q,
        plan.seq_lens,
        plan.block_tables.stride(0),
        num_seqs,
        launch.partials,
        launch.target_segments,
        float(scale),
        None if plan.soft_cap is None else float(plan.soft_cap),
        **launch.shared,
        **launch.constants,
    )
    if launch.partials is not None:
        join_segments_kernel[(query.shape[1], num_seqs, launch.max_queries)](
            attended,
            launch.partials,
            plan.cu_seqlens_q,
            **launch.shared,
            SEGMENT_TILE=32,
            num_warps=4,
        )
    return out
