"""Paged attention on a CPU without compiled operations: gather the blocks, then torch's scaled_dot_product_attention on them.

The keys of one block and head lie together, and so do its values: the caches are matrices whose rows are these, and whole rows
are gathered by number. Sequences with one query (decode) are computed together where they have equally many blocks; each
longer query (a prefill chunk) is a call of its own. Which rows, and what of them is visible, is the same for all layers of a
step: `AttentionPlan` finds it out once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

GROUP_BYTES = 1 << 20
"""Keys that a group of decodes gathers at most, unless one sequence alone has more: they should stay in the cache."""


def paged_attention_cpu(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan, scale: float
) -> Tensor:
    """Arguments and result as `baton_kernels.attention.paged_attention`.

    Raises:
        ValueError: the caches' strides are not those of the plan.
    """
    if not key_cache.stride() == value_cache.stride() == plan.strides:
        raise ValueError(
            "key and value cache need equal strides, those of the cache that the plan was made with: "
            f"{plan.strides}, not {key_cache.stride()} and {value_cache.stride()}"
        )
    if len(plan.groups) == 1 and plan.groups[0].queries is None:
        return _attend(query, key_cache, value_cache, plan, plan.groups[0], scale)
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)  # padding is in no group
    for group in plan.groups:
        out[group.queries] = _attend(
            query[group.queries], key_cache, value_cache, plan, group, scale
        )
    return out


def _attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    group: _Group,
    scale: float,
) -> Tensor:
    """Of the group's queries [n, num_heads, head_dim]."""
    head_dim = query.shape[2]
    gathered = (group.num_seqs, plan.num_kv_heads, -1, head_dim)
    key, value = (
        torch.index_select(
            cache.as_strided(plan.matrix, (plan.matrix[1], 1)), 0, group.rows, out=room
        ).view(gathered)
        for cache, room in zip((key_cache, value_cache), plan.room(group), strict=True)
    )
    if group.invisible is not None:
        # A slot that was never written may hold NaN, which no mask silences.
        for tensor in (key, value):
            tensor.view(-1, head_dim).index_fill_(0, group.invisible, 0)
    key, value = key[:, :, group.slots], value[:, :, group.slots]
    if group.is_decode:  # the query heads of one KV head take the place of its queries
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
    """What one call computes: a chunk's queries, or those of decodes that have equally many blocks."""

    queries: slice | Tensor | None
    """Which of the batch's queries; None: all of them."""
    num_seqs: int
    is_decode: bool
    rows: Tensor
    """int64 [num_seqs * num_kv_heads * blocks per sequence]: of the caches' matrices."""
    slots: slice
    """What is visible of the slots gathered for each sequence."""
    invisible: Tensor | None = None
    """int64: slots that not all sequences see, as rows [num_seqs * num_kv_heads * slots] of what was gathered."""
    mask: Tensor | None = None
    """Added to the scores. None: a decode sees all slots, and a chunk is causal from its first slot on."""


class _Decode(NamedTuple):
    """A sequence with one query."""

    seq: int
    query: int
    """Row of its query."""
    first: int
    """Position of the first token it sees."""
    end: int


class AttentionPlan:
    """What is the same for all layers of a step. Arguments as `baton_kernels.attention.plan_attention`.

    Raises:
        ValueError: the tokens of one block and head do not lie one after the other, as this implementation needs.
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
                f"on a CPU the cache needs strides {head_dim} and 1 within a block, equal ones for keys and values, "
                f"and otherwise multiples of {row}; it has {self.strides}"
            )
        self._rows_per_block, self._rows_per_head = per_block // row, per_head // row
        num_rows = (
            1
            + (num_blocks - 1) * self._rows_per_block
            + (self.num_kv_heads - 1) * self._rows_per_head
        )
        self.matrix = (num_rows, row)
        """Shape of a cache as a matrix, a row for each block and KV head."""
        self._dtype = key_cache.dtype
        self.groups = self._make_groups(
            block_tables, cu_seqlens_q.tolist(), seq_lens.tolist(), window
        )
        most = max((len(group.rows) for group in self.groups), default=0)
        self._room = torch.empty((2, most, row), dtype=key_cache.dtype)

    def room(self, group: _Group) -> tuple[Tensor, Tensor]:
        """Where the group's keys and values go; one place for all groups, for new memory costs more than the copies."""
        keys, values = self._room[:, : len(group.rows)].unbind()
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
        """Columns of the block table that hold positions [first, end)."""
        return slice(first // self.block_size, -(-end // self.block_size))

    def _rows(self, blocks: Tensor) -> Tensor:
        """Block ids [n, num_blocks] -> rows of the matrices [n * num_kv_heads * num_blocks]."""
        heads = torch.arange(self.num_kv_heads)[:, None] * self._rows_per_head
        return (blocks.long()[:, None] * self._rows_per_block + heads).flatten()

    def _decodes(self, decodes: list[_Decode], block_tables: Tensor, num_blocks: int) -> _Group:
        tables = torch.stack(
            [block_tables[seq, self._blocks(first, end)] for seq, _, first, end in decodes]
        )
        # Positions within what is gathered, in which sequences may begin and end at different slots.
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
        """The last tokens of one sequence; the first of them sees from position `first` on."""
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
