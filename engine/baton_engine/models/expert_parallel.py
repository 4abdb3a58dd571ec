"""A sparse layer whose experts are spread over the ranks of a group: tokens travel to them, what they make of them travels back.

    router -> (token, choice) -> slot of a rank      a copy on this rank if there is one, else the copies take turns
    dispatch                                         one row per token and rank that it goes to
    the slots' experts                               weighted, summed over the slots of this rank
    combine                                          the same way back, summed per token in the order of the ranks

Every rank calls `ExpertShard.mix` for the same layers in the same order, also those without tokens. Two layouts, chosen from what
all of them know, the numbers of tokens:

    masked       every rank sends as many rows to every rank as the one with most tokens has; those that do not go there are marked.
                 One exchange each way, and nothing waits for the device. For decode.
    contiguous   rows are sent where they go only, after their numbers. For prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baton_engine.distributed.group import Group
from baton_engine.distributed.group_errors import GroupBrokenError
from baton_kernels.moe import ExpertWeights, run_experts

MASKED_ROWS = 256
"""Rows that a rank may send in the masked layout: beyond, padding costs more than an exchange of numbers."""
ALIGNMENT = 8
"""Bytes: rows are viewed as numbers of up to this size."""
ELSEWHERE = -1
"""In the place of a slot: not on this rank."""

LayerPlacement = Sequence[Sequence[int]]
"""[rank][slot]: the expert in the slot."""


class ExpertShard:
    """One layer's experts on this rank, in one generation, and the way to the others.

    Attributes:
        tokens: int64 [num_experts]: how often this rank's own tokens chose each expert.
    """

    def __init__(
        self,
        group: Group,
        placement: LayerPlacement,
        num_experts: int,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        device: torch.device,
    ) -> None:
        """Args:
            group: the ranks of `placement`.
            gate_up, down: of this rank's slots, as of `baton_kernels.moe.run_experts`.
            device: of the weights and of what is mixed.

        Raises:
            ValueError: an expert is nowhere.
        """
        self.group = group
        self.slots = tuple(placement[group.rank])
        self.tokens = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.gate_up, self.down = gate_up, down
        self._device = device
        self._copies = _copies_seen_from(group.rank, placement, num_experts, device)

    def mix(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, wave_tokens: Sequence[int]
    ) -> Tensor:
        """Weighted sum of each token's experts, wherever they are. Collective.

        Args:
            x: of shape [num_tokens, hidden], this rank's tokens; perhaps none.
            weights, expert_ids: of shape [num_tokens, top_k], as of `baton_kernels.moe.route_top_k`.
            wave_tokens: of each rank. A group of one needs none.

        Returns:
            Like x.

        Raises:
            GroupBrokenError: a member is gone, does not answer, or the group was aborted.
        """
        num_tokens, size = len(x), self.group.size
        if num_tokens:
            chosen = expert_ids.flatten()
            self.tokens.scatter_add_(0, chosen, torch.ones_like(chosen))
        ranks, slots = self._copies.choose(expert_ids)
        if size == 1:
            return run_experts(x, self.gate_up, self.down, weights, slots) if num_tokens else x
        if len(wave_tokens) != size or wave_tokens[self.group.rank] != num_tokens:
            raise RuntimeError(
                f"rank {self.group.rank} of {size} runs {num_tokens} tokens in a step of {list(wave_tokens)} tokens"
            )
        most = max(wave_tokens)
        if most == 0:
            return x
        try:
            if uses_masked_layout(wave_tokens):
                return self._mix_masked(x, weights, ranks, slots, most)
            return self._mix_contiguous(x, weights, ranks, slots)
        except TimeoutError as error:
            raise GroupBrokenError(str(error)) from error

    def _mix_masked(
        self, x: Tensor, weights: Tensor, ranks: Tensor, slots: Tensor, most: int
    ) -> Tensor:
        """Row t of the `most` rows for a rank is token t."""
        (num_tokens, hidden), size = x.shape, self.group.size
        format_ = _RowFormat(slots.shape[1], hidden, x.dtype)
        there = ranks == torch.arange(size, device=self._device).view(size, 1, 1)
        by_rank = slots.new_full((size, most, slots.shape[1]), ELSEWHERE)
        by_rank[:, :num_tokens] = torch.where(there, slots, ELSEWHERE)
        rows = torch.zeros((size, most, format_.nbytes), dtype=torch.uint8, device=self._device)
        format_.write(rows, by_rank, weights, x)
        counts = [most] * size
        received = self.group.all_to_all(rows.view(size * most, -1), counts, counts)
        sums = self.group.all_to_all(self._run(format_, received), counts, counts)
        return sums.view(size, most, hidden)[:, :num_tokens].sum(0, dtype=torch.float32).to(x.dtype)

    def _mix_contiguous(self, x: Tensor, weights: Tensor, ranks: Tensor, slots: Tensor) -> Tensor:
        (num_tokens, hidden), size = x.shape, self.group.size
        format_ = _RowFormat(slots.shape[1], hidden, x.dtype)
        goes = torch.zeros((num_tokens, size), dtype=torch.bool, device=self._device).scatter_(
            1, ranks, True
        )
        target, token = goes.T.nonzero(as_tuple=True)  # by rank, then by token
        send_numbers = goes.sum(0)
        ones = [1] * size
        received_numbers = self.group.all_to_all(send_numbers.view(size, 1), ones, ones)
        send_counts: list[int] = send_numbers.tolist()
        recv_counts: list[int] = received_numbers.flatten().tolist()
        rows = torch.zeros((len(token), format_.nbytes), dtype=torch.uint8, device=self._device)
        there = ranks[token] == target[:, None]
        format_.write(rows, torch.where(there, slots[token], ELSEWHERE), weights[token], x[token])
        received = self.group.all_to_all(rows, send_counts, recv_counts)
        sums = self.group.all_to_all(self._run(format_, received), recv_counts, send_counts)
        total = torch.zeros((num_tokens, hidden), dtype=torch.float32, device=self._device)
        for tokens_of_rank, sums_of_rank in zip(
            token.split(send_counts), sums.split(send_counts), strict=True
        ):
            total.index_add_(0, tokens_of_rank, sums_of_rank.float())
        return total.to(x.dtype)

    def _run(self, format_: _RowFormat, rows: Tensor) -> Tensor:
        """What this rank's experts make of the rows that came, [len(rows), hidden]."""
        slots, weights, x = format_.read(rows)
        if not len(x):
            return x
        return run_experts(x, self.gate_up, self.down, weights, slots)


def uses_masked_layout(wave_tokens: Sequence[int]) -> bool:
    """Of a step in which the ranks run so many tokens."""
    return max(wave_tokens) * len(wave_tokens) <= MASKED_ROWS


class _Copies(NamedTuple):
    """Where one rank finds each expert."""

    ranks: Tensor
    """int64 [num_experts, most copies]."""
    slots: Tensor
    """Likewise: of that rank."""
    numbers: Tensor
    """int64 [num_experts]: how many copies count."""
    first: int
    """Which copy takes the first token."""

    def choose(self, expert_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(ranks, slots), each like `expert_ids`. The tokens of an expert take turns over its copies."""
        if self.ranks.shape[1] == 1:
            return self.ranks[expert_ids, 0], self.slots[expert_ids, 0]
        experts = expert_ids.flatten()
        copy = ((_turns(experts, len(self.numbers)) + self.first) % self.numbers[experts]).view(
            expert_ids.shape
        )
        return self.ranks[expert_ids, copy], self.slots[expert_ids, copy]


def _turns(experts: Tensor, num_experts: int) -> Tensor:
    """Of each entry, how many equal ones come before it."""
    order = experts.argsort(stable=True)
    in_order = experts[order]
    numbers = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
    numbers.scatter_add_(0, experts, torch.ones_like(experts))
    first_of = numbers.cumsum(0) - numbers
    turns = torch.empty_like(experts)
    turns[order] = torch.arange(len(experts), device=experts.device) - first_of[in_order]
    return turns


def _copies_seen_from(
    rank: int, placement: LayerPlacement, num_experts: int, device: torch.device
) -> _Copies:
    copies: list[list[tuple[int, int]]] = [[] for _ in range(num_experts)]
    for owner, slots in enumerate(placement):
        for slot, expert in enumerate(slots):
            copies[expert].append((owner, slot))
    for expert, found in enumerate(copies):
        if not found:
            raise ValueError(f"expert {expert} is on no rank")
        own = [copy for copy in found if copy[0] == rank]
        copies[expert] = own[:1] or found
    most = max(map(len, copies))
    padded = torch.tensor(
        [found + found[:1] * (most - len(found)) for found in copies], dtype=torch.int64
    )
    ranks, slots_of = padded.to(device).unbind(2)
    numbers = torch.tensor([len(found) for found in copies], dtype=torch.int64, device=device)
    return _Copies(ranks.contiguous(), slots_of.contiguous(), numbers, rank)


class _RowFormat:
    """A token on its way, as bytes: slots (int32), weights (float32), hidden state."""

    def __init__(self, top_k: int, hidden: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._ends = (4 * top_k, 8 * top_k, 8 * top_k + hidden * dtype.itemsize)
        self.nbytes = -(-self._ends[-1] // ALIGNMENT) * ALIGNMENT

    def write(self, rows: Tensor, slots: Tensor, weights: Tensor, x: Tensor) -> None:
        """Args:
        rows: uint8 [..., number of rows, nbytes].
        slots: [..., number of rows, top_k].
        weights, x: [tokens, top_k] and [tokens, hidden]: of the first rows.
        """
        weights_start, hidden_start, end = self._ends
        rows[..., :weights_start].view(torch.int32).copy_(slots)
        rows[..., : len(x), weights_start:hidden_start].view(torch.float32).copy_(weights)
        rows[..., : len(x), hidden_start:end].view(self.dtype).copy_(x)

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(slots int64, weights, x) of rows [n, nbytes]."""
        weights_start, hidden_start, end = self._ends
        slots = rows[:, :weights_start].view(torch.int32).long()
        weights = rows[:, weights_start:hidden_start].view(torch.float32).to(self.dtype)
        return slots, weights, rows[:, hidden_start:end].contiguous().view(self.dtype)
