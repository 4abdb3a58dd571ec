"""Paged attention on a CPU without compiled operations: gather blocks, then call torch's SDPA.

The keys of one block and head are contiguous, and so are the values. Each cache is therefore a
matrix with one row per block and head, and whole rows are gathered by index. Sequences with one
query (decode) share a call if they have the same number of blocks. Each prefill chunk has its own
call. `GatherPlan` computes rows and masks once for all layers of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

#: Maximum size in bytes of the keys that a group of decode sequences gathers, so that the keys stay
#: in the CPU's cache. A single sequence may exceed this limit.
GROUP_BYTES = 1 << 20


def paged_attention_cpu(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: GatherPlan, scale: float
) -> Tensor:
    """Implement `baton_kernels.attention.paged_attention` in torch, with a `GatherPlan`.

    Raises:
        ValueError: the caches' strides differ from the strides in the plan.
    """
    if not key_cache.stride() == value_cache.stride() == plan.strides:
        raise ValueError(
            f"key and value cache need equal strides, those of the plan's cache, {plan.strides}, "
            f"not {key_cache.stride()} and {value_cache.stride()}"
        )
    if len(plan.groups) == 1 and plan.groups[0].queries is None:
        return _attend(query, key_cache, value_cache, plan, plan.groups[0], scale)
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)  # padding stays 0
    for group in plan.groups:
        out[group.queries] = _attend(
            query[group.queries], key_cache, value_cache, plan, group, scale
        )
    return out


def _attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: GatherPlan,
    group: _Group,
    scale: float,
) -> Tensor:
    """Return the attention outputs of a group's queries, of shape [n, num_heads, head_dim]."""
    head_dim = query.shape[2]
    gathered = (group.num_seqs, plan.num_kv_heads, -1, head_dim)
    key, value = (
        torch.index_select(
            cache.as_strided(plan.matrix, (plan.matrix[1], 1)), 0, group.rows, out=memory
        ).view(gathered)
        for cache, memory in zip((key_cache, value_cache), plan.scratch(group), strict=True)
    )
    if group.invisible is not None:
        # A slot that was never written may hold NaN, which a mask does not remove.
        for tensor in (key, value):
            tensor.view(-1, head_dim).index_fill_(0, group.invisible, 0)
    key, value = key[:, :, group.slots], value[:, :, group.slots]
    if group.is_decode:  # SDPA gets the query heads of one KV head as its queries
        by_kv_head = query.reshape(group.num_seqs, plan.num_kv_heads, -1, head_dim)
        attended = scaled_dot_product_attention(
            by_kv_head, key, value, attn_mask=group.mask, scale=scale
        )
        return attended.reshape(query.shape)
    attended = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key,
        value,
        attn_mask=group.mask,
        is_causal=group.mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != plan.num_kv_heads,
    )
    return attended[0].transpose(0, 1)


@dataclass(slots=True)
class _Group:
    """The queries of one SDPA call: a prefill chunk, or sequences with one query each (decodes).

    All decodes of a group attend to the same number of cache blocks.
    """

    queries: slice | Tensor | None  #: Indices into the batch's queries; None for all.
    num_seqs: int
    is_decode: bool
    rows: Tensor  #: int64 [num_seqs * num_kv_heads * blocks per sequence]: rows of the caches.
    slots: slice  #: The visible part of each sequence's gathered slots.
    #: int64: gathered slots that their sequence does not attend to, as indices into [num_seqs *
    #: num_kv_heads * slots].
    invisible: Tensor | None = None
    #: Mask added to the scores. None means for decodes that each query attends to all `slots`. For
    #: a chunk, None means a causal mask from the first slot on.
    mask: Tensor | None = None


class _Decode(NamedTuple):
    """A sequence with one query."""

    seq: int
    query: int  #: Row of the query.
    first: int  #: Position of the first token that the query attends to.
    end: int  #: Number of tokens of the sequence.


class GatherPlan:
    """The cache rows to gather and the attention masks of a step, which all layers share.

    The arguments are described at `baton_kernels.attention.plan_attention`.

    Raises:
        ValueError: the tokens of a block and head are not contiguous in the cache, or another
            stride is not a multiple of block_size * head_dim.
    """

    def __init__(
        self,
        key_cache: Tensor,
        block_tables: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        window: int | None,
    ) -> None:
        num_blocks, self.num_kv_heads, self.block_size, head_dim = key_cache.shape
        self.strides = key_cache.stride()
        row = self.block_size * head_dim
        per_block, per_head, *within = self.strides
        if tuple(within) != (head_dim, 1) or per_block % row or per_head % row:
            raise ValueError(
                f"on a CPU the cache needs strides {head_dim} and 1 within a block, and otherwise "
                f"multiples of {row}; it has {self.strides}"
            )
        self._rows_per_block, self._rows_per_head = per_block // row, per_head // row
        num_rows = (
            1
            + (num_blocks - 1) * self._rows_per_block
            + (self.num_kv_heads - 1) * self._rows_per_head
        )
        self.matrix = (num_rows, row)  #: Shape of a cache as a matrix: a row per block and KV head.
        self._dtype = key_cache.dtype
        self.groups = self._make_groups(
            block_tables, cu_seqlens_q.tolist(), seq_lens.tolist(), window
        )
        most = max((len(group.rows) for group in self.groups), default=0)
        self._scratch = torch.empty((2, most, row), dtype=key_cache.dtype)

    def scratch(self, group: _Group) -> tuple[Tensor, Tensor]:
        """Return scratch memory for the gathered keys and values of a group.

        All groups share this memory, because an allocation takes longer than the copies of the
        keys and values.
        """
        keys, values = self._scratch[:, : len(group.rows)].unbind()
        return keys, values

    def _make_groups(
        self, block_tables: Tensor, starts: list[int], ends: list[int], window: int | None
    ) -> list[_Group]:
        groups: list[_Group] = []
        decodes: dict[int, list[_Decode]] = {}
        for seq, end in enumerate(ends):
            queries = slice(starts[seq], starts[seq + 1])
            num_queries = queries.stop - queries.start
            if end == 0:
                continue
            first = 0 if window is None else max(0, end - num_queries - window + 1)
            if num_queries == 1:
                num_blocks = self._blocks(first, end).stop - self._blocks(first, end).start
                decodes.setdefault(num_blocks, []).append(_Decode(seq, queries.start, first, end))
            elif num_queries > 1:
                groups.append(self._chunk(queries, block_tables[seq], first, end, window))
        bytes_per_block = self.num_kv_heads * self.matrix[1] * self._dtype.itemsize
        for num_blocks, alike in decodes.items():
            most = max(1, GROUP_BYTES // (num_blocks * bytes_per_block))
            groups += [
                self._decodes(alike[start : start + most], block_tables, num_blocks)
                for start in range(0, len(alike), most)
            ]
        if len(groups) == 1 and groups[0].num_seqs == len(ends):
            groups[0].queries = None
        return groups

    def _blocks(self, first: int, end: int) -> slice:
        """Return the columns of the block table that hold positions [first, end)."""
        return slice(first // self.block_size, -(-end // self.block_size))

    def _rows(self, blocks: Tensor) -> Tensor:
        """Map block ids [n, num_blocks] to row numbers [n * num_kv_heads * num_blocks].

        A row of a cache contains the tokens of one block and KV head (`matrix`).
        """
        heads = torch.arange(self.num_kv_heads)[:, None] * self._rows_per_head
        return (blocks.long()[:, None] * self._rows_per_block + heads).flatten()

    def _decodes(self, decodes: list[_Decode], block_tables: Tensor, num_blocks: int) -> _Group:
        tables = torch.stack(
            [block_tables[seq, self._blocks(first, end)] for seq, _, first, end in decodes]
        )
        # Visible slots of each gathered sequence. Sequences may begin and end at different slots.
        visible = [
            (first % self.block_size, first % self.block_size + end - first)
            for *_, first, end in decodes
        ]
        if len(decodes) == 1:
            query = decodes[0].query
            return _Group(slice(query, query + 1), 1, True, self._rows(tables), slice(*visible[0]))
        queries = torch.tensor([decode.query for decode in decodes])
        group = _Group(queries, len(decodes), True, self._rows(tables), slice(None))
        first_slot, end_slot = torch.tensor(visible).T[:, :, None]
        slot = torch.arange(num_blocks * self.block_size)
        invisible = (slot < first_slot) | (slot >= end_slot)  # [num_seqs, slots]
        if invisible.any():
            group.mask = torch.zeros(invisible.shape, dtype=self._dtype).masked_fill_(
                invisible, -torch.inf
            )
            group.mask = group.mask[:, None, None]
            group.invisible = (
                invisible[:, None].expand(-1, self.num_kv_heads, -1).flatten().nonzero()[:, 0]
            )
        return group

    def _chunk(
        self, queries: slice, table: Tensor, first: int, end: int, window: int | None
    ) -> _Group:
        """Return the group of a prefill chunk that attends only to positions [first, end)."""
        num_queries = queries.stop - queries.start
        start = first % self.block_size
        rows = self._rows(table[None, self._blocks(first, end)])
        group = _Group(queries, 1, False, rows, slice(start, start + end - first))
        if num_queries < end or (window is not None and num_queries > window):
            distance = torch.arange(end - num_queries, end)[:, None] - torch.arange(first, end)
            hidden = distance < 0
            if window is not None:
                hidden |= distance >= window
            group.mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(
                hidden, -torch.inf
            )
        return group
