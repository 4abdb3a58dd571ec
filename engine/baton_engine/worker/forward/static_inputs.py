"""Input tensors of captured graphs, at fixed addresses and padded to the size of a graph.

KV and attention kernels skip padding. A padding token has slot -1. A padding sequence has no
queries and no tokens. The output of a padding token is undefined and may be NaN, but affects no
other token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton_engine.compilation.cudagraph_dispatcher import BatchDescriptor
from baton_engine.models.forward_context import ForwardBatch, ForwardContext


class StaticInputs:
    """Input tensors that all graphs of one model share."""

    def __init__(
        self,
        max_tokens: int,
        max_seqs: int,
        max_blocks: int,
        device: torch.device,
        hidden: Tensor | None,
    ) -> None:
        """Allocate the tensors.

        Args:
            max_tokens: number of tokens of the largest graph.
            max_seqs: number of sequences of the largest graph.
            max_blocks: maximum number of blocks of one sequence.
            device: device of the model.
            hidden: buffer for the output of the previous pipeline stage,
                [max_tokens, hidden_size]. None on the first stage.
        """
        # One allocation each: compiled code copies tensors that are not aligned to 16 bytes.
        self.input_ids, self.positions, self.slot_mapping = (
            torch.zeros(max_tokens, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.block_tables = torch.zeros((max_seqs, max_blocks), dtype=torch.int32, device=device)
        self.cu_seqlens_q = torch.zeros(max_seqs + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(max_seqs, dtype=torch.int32, device=device)
        self.hidden = hidden

    def clear(self) -> None:
        """Fill the tensors with padding, before a graph is captured."""
        for tensor in (
            self.input_ids,
            self.positions,
            self.block_tables,
            self.cu_seqlens_q,
            self.seq_lens,
        ):
            tensor.zero_()
        self.slot_mapping.fill_(-1)

    def batch(self, descriptor: BatchDescriptor, kv_cache: Tensor) -> ForwardBatch:
        """Return a batch of views of these tensors, with the sizes that `descriptor` contains."""
        num_seqs = 1 if descriptor.num_seqs is None else descriptor.num_seqs
        return ForwardBatch(
            self.input_ids[: descriptor.num_tokens],
            self.positions[: descriptor.num_tokens],
            ForwardContext(
                slot_mapping=self.slot_mapping[: descriptor.num_tokens],
                block_tables=self.block_tables[:num_seqs],
                cu_seqlens_q=self.cu_seqlens_q[: num_seqs + 1],
                seq_lens=self.seq_lens[:num_seqs],
                kv_cache=kv_cache,
                max_seqlen_q=1 if descriptor.uniform_decode else descriptor.num_tokens,
            ),
        )

    def hidden_of(self, num_tokens: int) -> Tensor | None:
        return None if self.hidden is None else self.hidden[:num_tokens]

    def fill_tokens(
        self, num_padded: int, batch: ForwardBatch, hidden: Tensor | None
    ) -> ForwardBatch:
        """Copy a step's tokens into the inputs of graphs without attention. Return a padded batch.

        Attention runs outside these graphs, so the returned batch keeps the context of `batch`.
        """
        num_tokens = len(batch.input_ids)
        _fill(self.input_ids[:num_padded], batch.input_ids, 0)
        _fill(self.positions[:num_padded], batch.positions, 0)
        if hidden is not None:
            assert self.hidden is not None
            self.hidden[:num_tokens].copy_(hidden)
        return ForwardBatch(self.input_ids[:num_padded], self.positions[:num_padded], batch.context)

    def fill(self, descriptor: BatchDescriptor, batch: ForwardBatch, hidden: Tensor | None) -> None:
        """Copy a step into the inputs of graphs that contain the whole forward."""
        assert descriptor.num_seqs is not None
        context, num_seqs = batch.context, len(batch.context.seq_lens)
        self.fill_tokens(descriptor.num_tokens, batch, hidden)
        _fill(self.slot_mapping[: descriptor.num_tokens], context.slot_mapping, -1)
        _fill(self.seq_lens[: descriptor.num_seqs], context.seq_lens, 0)
        _fill(
            self.cu_seqlens_q[: descriptor.num_seqs + 1], context.cu_seqlens_q, len(batch.input_ids)
        )
        # Kernels read no table of a padded sequence, and no entry past a sequence's blocks.
        self.block_tables[:num_seqs, : context.block_tables.shape[1]].copy_(context.block_tables)


def _fill(target: Tensor, values: Tensor, padding: int) -> None:
    target[: len(values)].copy_(values, non_blocking=True)
    if len(values) < len(target):
        target[len(values) :].fill_(padding)
