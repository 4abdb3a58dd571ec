"""A batch of sequences over a paged KV cache in the engine's layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import costs
import torch
from torch import Tensor

from baton_kernels.attention import (
    AttentionPlan,
    Implementation,
    paged_attention,
    plan_attention,
)

#: The sizes that the goals refer to.
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
SCALE = HEAD_DIM**-0.5


@dataclass
class Paged:
    """A batch of sequences with shuffled blocks, and its reference attention.

    Args:
        cache: of shape [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim].
        query_lens: number of queries of each sequence. The queries are the sequence's last tokens.
        seq_lens: number of tokens of each sequence.
    """

    cache: Tensor
    query_lens: list[int]
    seq_lens: list[int]

    def __post_init__(self) -> None:
        blocks = [-(-length // BLOCK_SIZE) for length in self.seq_lens]
        order = torch.randperm(self.cache.shape[0])[: sum(blocks)].int().split(blocks)
        tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
        for row, ids in zip(tables, order, strict=True):
            row[: len(ids)] = ids
        self.block_tables = tables.to(self.device)
        starts = torch.tensor([0, *self.query_lens]).cumsum(0)
        self.cu_seqlens_q = starts.int().to(self.device)
        self.lengths = torch.tensor(self.seq_lens, dtype=torch.int32, device=self.device)
        self.query = torch.randn(
            sum(self.query_lens), NUM_HEADS, self.cache.shape[-1], device=self.device
        ).to(self.cache.dtype)

    @property
    def device(self) -> torch.device:
        return self.cache.device

    @property
    def scale(self) -> float:
        return float(self.cache.shape[-1] ** -0.5)

    @property
    def num_layers(self) -> int:
        return self.cache.shape[2]

    def attend(self, layer: int, plan: AttentionPlan | None = None) -> Tensor:
        """Return the attention of one layer, computed as the model does.

        Args:
            layer: the layer.
            plan: the attention plan; None: the plan that all layers share.
        """
        key, value = self.cache[:, :, layer, 0], self.cache[:, :, layer, 1]
        return paged_attention(self.query, key, value, plan or self.plan, self.scale)

    @cached_property
    def plan(self) -> AttentionPlan:
        return self.new_plan()

    def new_plan(self, implementation: Implementation | None = None) -> AttentionPlan:
        return plan_attention(
            self.query,
            self.cache[:, :, 0, 0],
            self.block_tables,
            self.cu_seqlens_q,
            self.lengths,
            max_seqlen_q=max(self.query_lens),
            implementation=implementation,
        )

    def gathered(self, layer: int, seq: int) -> tuple[Tensor, Tensor]:
        """Return a sequence's keys and values in one layer, as contiguous tensors.

        Both have the shape [num_kv_heads, seq_len, head_dim].
        """
        length = self.seq_lens[seq]
        table = self.block_tables[seq, : -(-length // BLOCK_SIZE)].long()
        both = self.cache[table, :, layer].permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :length]
        return both[0], both[1]

    def expected(self, layer: int, seq: int, rows: Tensor) -> Tensor:
        """Return the reference attention of some of a sequence's queries, computed in float32.

        Args:
            layer: the layer.
            seq: the sequence.
            rows: indices of queries within the sequence.

        Returns:
            Tensor of shape [len(rows), num_heads, head_dim].
        """
        key, value = (
            tensor.float().repeat_interleave(NUM_HEADS // self.cache.shape[1], 0)
            for tensor in self.gathered(layer, seq)
        )
        query = self.query[int(self.cu_seqlens_q[seq]) + rows].float().transpose(0, 1)
        scores = self.scale * query @ key.transpose(1, 2)  # [num_heads, rows, seq_len]
        last = self.seq_lens[seq] - self.query_lens[seq] + rows
        hidden = torch.arange(self.seq_lens[seq], device=self.device) > last[:, None]
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(0, 1)

    @cached_property
    def cost(self) -> costs.Cost:
        """The cost of one layer's attention."""
        return costs.attention(
            self.query,
            self.cache[:, :, 0, 0],
            self.query_lens,
            self.seq_lens,
            self.plan.window,
        )


def random_cache(
    num_tokens: int,
    num_layers: int,
    dtype: torch.dtype,
    device: torch.device,
    head_dim: int = HEAD_DIM,
) -> Tensor:
    """Return a KV cache for `num_tokens` tokens, filled with random numbers."""
    shape = (-(-num_tokens // BLOCK_SIZE), NUM_KV_HEADS, num_layers, 2, BLOCK_SIZE, head_dim)
    cache = torch.empty(shape, dtype=dtype, device=device)
    for block in cache.split(max(1, 2**30 // cache[0].numel())):
        block.normal_()
    return cache
