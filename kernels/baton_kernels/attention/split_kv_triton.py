"""Split-KV in Triton: each program finds a segment, and a second launch joins the segments.

`split_kv` defines the number of segments of each sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.kernel_arguments import Heads


class SplitKVBatch(NamedTuple):
    """Number of sequences in a step, with the number of queries and tokens of each sequence."""

    cu_seqlens_q_ptr: tl.tensor  #: int32 [num_seqs + 1].
    seq_lens_ptr: tl.tensor  #: int32 [num_seqs].
    num_seqs: tl.tensor


class Partials(NamedTuple):
    """Partial results of segments, which `join_segments_kernel` joins.

    The dimension `items` has an entry for each segment of the batch. For a sequence with only one
    segment, the attention kernel writes the final result to the attention output. In `Partials`, it
    then writes only the sequence's row of `segments_ptr`.
    """

    #: float32 [items, num_kv_heads, BLOCK_M, head_dim], not yet divided by the sum.
    out_ptr: Tensor
    sum_ptr: Tensor  #: float32 [items, num_kv_heads, BLOCK_M].
    #: float32, shape of `sum_ptr`: the largest score in base 2, which is subtracted before exp2.
    max_ptr: Tensor
    segments_ptr: Tensor  #: int32 [num_seqs, 2]: first item and number of items of each sequence.


@triton.jit
def _segments_of(tiles, tiles_per_segment):
    return tl.maximum(1, (2 * tiles + tiles_per_segment) // (2 * tiles_per_segment))


@triton.jit
def _count_tiles(seqs, in_batch, batch: SplitKVBatch, KV_TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Return, for each of the sequences `seqs`, the number of key tiles that its queries attend to.

    The number is 0 where `in_batch` is false.
    """
    seq_len = tl.load(batch.seq_lens_ptr + seqs, mask=in_batch, other=0)
    tiles = (seq_len + KV_TILE - 1) // KV_TILE
    if WINDOW > 0:
        q_start = tl.load(batch.cu_seqlens_q_ptr + seqs, mask=in_batch, other=0)
        q_len = tl.load(batch.cu_seqlens_q_ptr + seqs + 1, mask=in_batch, other=0) - q_start
        tiles -= tl.maximum(0, seq_len - q_len - WINDOW + 1) // KV_TILE
    return tiles


@triton.jit
def find_segment(
    item,
    batch: SplitKVBatch,
    target_segments,
    KV_TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    SCAN: tl.constexpr,  # sequences read at once
):
    """Find the sequence of segment `item`. Segments count from 0, sequence by sequence.

    Returns:
        (sequence, index of the segment in the sequence, number of segments of the sequence). The
        sequence is num_seqs if the batch has no segment `item`.
    """
    lanes = tl.arange(0, SCAN)
    all_tiles = 0
    for start in range(0, batch.num_seqs, SCAN):
        seqs = start + lanes
        all_tiles += tl.sum(_count_tiles(seqs, seqs < batch.num_seqs, batch, KV_TILE, WINDOW))
    tiles_per_segment = tl.maximum(MIN_TILES, (all_tiles + target_segments - 1) // target_segments)

    seq = 0
    first_item = 0
    end = 0
    for start in range(0, batch.num_seqs, SCAN):
        seqs = start + lanes
        in_batch = seqs < batch.num_seqs
        tiles = _count_tiles(seqs, in_batch, batch, KV_TILE, WINDOW)
        segments = tl.where(in_batch, _segments_of(tiles, tiles_per_segment), 0)
        ends = end + tl.cumsum(segments)
        passed = in_batch & (ends <= item)
        seq += tl.sum(passed.to(tl.int32))
        first_item = tl.maximum(first_item, tl.max(tl.where(passed, ends, 0)))
        end += tl.sum(segments)
    found = seq < batch.num_seqs
    tiles = _count_tiles(seq, found, batch, KV_TILE, WINDOW)
    return seq, item - first_item, _segments_of(tiles, tiles_per_segment)


@triton.jit(do_not_specialize_on_alignment=["cu_seqlens_q_ptr"])
def join_segments_kernel(
    out: Heads,
    partials: Partials,
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SEGMENT_TILE: tl.constexpr,  # segments joined at once
):
    """Join the results of segments. Each program joins one query head of one query.

    For a sequence with one segment, the attention kernel has already written the result.
    """
    head = tl.program_id(0)
    seq = tl.program_id(1)
    query = tl.program_id(2)
    segments = tl.load(partials.segments_ptr + 2 * seq + 1)
    if segments == 1:
        return
    q_start = tl.load(cu_seqlens_q_ptr + seq)
    if query >= tl.load(cu_seqlens_q_ptr + seq + 1) - q_start:
        return
    first_item = tl.load(partials.segments_ptr + 2 * seq)
    row = query * GROUP + head % GROUP
    dims = tl.arange(0, HEAD_DIM_PADDED)
    dim_mask = dims < HEAD_DIM

    running_max = float("-inf")
    running_sum = 0.0
    acc = tl.zeros([HEAD_DIM_PADDED], dtype=tl.float32)
    for start in range(0, segments, SEGMENT_TILE):
        segment = start + tl.arange(0, SEGMENT_TILE)
        in_sequence = segment < segments
        index = ((first_item + segment) * NUM_KV_HEADS + head // GROUP) * BLOCK_M + row
        maxima = tl.load(partials.max_ptr + index, mask=in_sequence, other=float("-inf"))
        sums = tl.load(partials.sum_ptr + index, mask=in_sequence, other=0.0)
        # [SEGMENT_TILE, HEAD_DIM_PADDED]
        partial = tl.load(
            partials.out_ptr + index[:, None] * HEAD_DIM + dims[None, :],
            mask=in_sequence[:, None] & dim_mask[None, :],
            other=0.0,
        )
        new_max = tl.maximum(running_max, tl.max(maxima, axis=0))
        # -inf: no segment so far has a key that the query attends to.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.math.exp2(running_max - base)
        weights = tl.math.exp2(maxima - base)
        running_sum = running_sum * rescale + tl.sum(sums * weights, axis=0)
        acc = acc * rescale + tl.sum(partial * weights[:, None], axis=0)
        running_max = new_max
    acc = acc / tl.where(running_sum == 0.0, 1.0, running_sum)
    token = (q_start + query).to(tl.int64)
    target = out.ptr + token * out.stride_token + head * out.stride_head
    tl.store(target + dims, acc.to(out.ptr.dtype.element_ty), mask=dim_mask)
