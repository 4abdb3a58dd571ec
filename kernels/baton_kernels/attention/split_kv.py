"""Divides long sequences into segments, so that few sequences occupy the whole GPU (split-KV).

The method is Flash-Decoding (Dao et al. 2023). The key tiles of a sequence are divided among
segments. Each segment is one program per KV head. A second launch joins the results of the segments
(`split_kv_triton`). The host decides from shapes whether to split, and sets a target number of
segments. The device divides the sequences by their lengths:

    tiles_per_segment = max(MIN_TILES, ceil(tiles of all sequences / target_segments))
    segments of a sequence = max(1, round(tiles of the sequence / tiles_per_segment))

A batch has at most target_segments + num_seqs segments. This number bounds the grid. The host
therefore reads no lengths from the device.
"""

from __future__ import annotations

#: Number of rows that always fit into one query block. A row is one query head of one query.
#: Sequences are split only if the queries of each sequence fit into one query block.
FEW_ROWS = 64
#: With this number of (sequence, KV head) pairs per SM, the GPU is busy, and no sequence is split.
ENOUGH_PROGRAMS_PER_SM = 4
MIN_TILES = 4  #: Minimum number of KV tiles of a segment, unless the sequence has fewer.
SCAN = 128  #: Number of sequences that a program reads at once to find its segment.


def fits_one_block(max_seqlen_q: int | None, group: int) -> bool:
    """Return whether the queries of each sequence fit into one query block of the kernel.

    Args:
        max_seqlen_q: upper bound of the number of queries of a sequence. None: unknown, so the
            result is False.
        group: number of query heads per KV head.
    """
    one_query = 1 << (group - 1).bit_length()  # rows of a block with one query
    return max_seqlen_q is not None and max_seqlen_q * group <= max(FEW_ROWS, one_query)


def target_segments(
    num_seqs: int, num_kv_heads: int, max_tiles: int, num_sms: int, programs_per_sm: int
) -> int:
    """Return the target number of KV segments of a batch, or 0 if no sequence is to be split.

    A segment is a range of a sequence's KV tiles, which one program per KV head processes.

    Args:
        num_seqs: number of sequences, each with queries that fit into one query block.
        num_kv_heads: number of KV heads, each of which has its own programs.
        max_tiles: number of KV tiles of the longest sequence that the block tables can hold.
        num_sms: number of streaming multiprocessors (SMs) of the GPU.
        programs_per_sm: number of programs that each SM should run.
    """
    is_busy = num_seqs * num_kv_heads >= ENOUGH_PROGRAMS_PER_SM * num_sms
    is_short = 2 * max_tiles < 3 * MIN_TILES  # even the longest sequence would be one segment
    return 0 if is_busy or is_short else max(1, num_sms * programs_per_sm // num_kv_heads)
