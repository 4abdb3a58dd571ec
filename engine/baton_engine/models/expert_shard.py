"""Runs a sparse layer in an expert-parallel group, whose ranks each hold some of the experts.

A slot is the place of one expert on a rank. An expert may have copies on several ranks.

    route      Choose a rank and a slot for each expert of a token. Use a copy on this rank if one
               exists. Otherwise alternate between the copies.
    dispatch   Send one row per token to each rank that runs experts for the token.
    experts    Run each rank's experts on the received rows, and sum the weighted outputs per row.
    combine    Send the sums back, and add the sums of each token in rank order.

Every rank calls `ExpertShard.mix` for the same layers in the same order, even without tokens. All
ranks know each rank's number of tokens, and choose the same layout from these numbers:

    masked       Each rank sends the same number of rows to every rank: the number of tokens of the
                 largest batch. Rows that the receiver does not need are masked. The host does not
                 wait for the device. Used for decode.
    contiguous   Ranks first exchange the numbers of rows, then only the needed rows. Used for
                 prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baton_engine.distributed.group import Group
from baton_engine.distributed.group_errors import GroupBrokenError
from baton_kernels.moe import ExpertWeights, run_experts

#: Maximum number of rows that a rank sends in the masked layout. Above this number, padding costs
#: more than an exchange of the numbers of rows.
MASKED_ROWS = 256
ALIGNMENT = 8  # bytes; each row is padded to a multiple of this size
ELSEWHERE = -1  # slot of an expert on another rank

LayerPlacement = Sequence[Sequence[int]]  # [rank][slot]: the expert in the slot


class ExpertShard:
    """This rank's experts of one sparse layer, in one generation of the expert-parallel group.

    A generation is a fixed set of ranks with a placement of experts on these ranks.

    Attributes:
        tokens: number of this rank's tokens routed to each expert since the shard was created,
            int64 [num_experts].
        slots: expert id in each slot of this rank.
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
        """Create the shard.

        Args:
            group: the ranks that share the layer's experts.
            placement: expert id in each slot of each rank, as `placement[rank][slot]`.
            num_experts: number of experts of the layer.
            gate_up: gate and up projections of this rank's slots, as for
                `baton_kernels.moe.run_experts`.
            down: down projections of this rank's slots, as for `run_experts`.
            device: device of the weights and of the tokens.

        Raises:
            ValueError: an expert is on no rank.
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
        """Return the weighted sum of each token's expert outputs. All ranks must call this method.

        Args:
            x: hidden states of this rank's tokens, [num_tokens, hidden]. num_tokens may be 0.
            weights: routing weights of shape [num_tokens, top_k], from
                `baton_kernels.moe.route_top_k`.
            expert_ids: chosen experts of shape [num_tokens, top_k], from `route_top_k`.
            wave_tokens: each rank's number of tokens in this step. Unused in a group of one rank.

        Returns:
            A tensor of the same shape as x.

        Raises:
            GroupBrokenError: a member is gone or does not respond, or the group was aborted.
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
                f"rank {self.group.rank} of {size} runs {num_tokens} tokens in a step of "
                f"{list(wave_tokens)} tokens by rank"
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
        """Return the result of `mix` in the masked layout, which sends all tokens to every rank.

        Row t holds token t. Rows after the last token are padding. In the rows for a rank, slots of
        experts on other ranks are masked (ELSEWHERE).

        Args:
            most: number of rows sent to each rank: the largest entry of `wave_tokens`.
        """
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
        """Run this rank's experts on received rows.

        Returns:
            The weighted sum of the expert outputs of each row, [len(rows), hidden].
        """
        slots, weights, x = format_.read(rows)
        if not len(x):
            return x
        return run_experts(x, self.gate_up, self.down, weights, slots)


def uses_masked_layout(wave_tokens: Sequence[int]) -> bool:
    """Return whether a step uses the masked layout, which sends all tokens to every rank.

    In other steps, a rank receives only the tokens that need its experts.

    Args:
        wave_tokens: each rank's number of tokens in the step.
    """
    return max(wave_tokens) * len(wave_tokens) <= MASKED_ROWS


class _Copies(NamedTuple):
    """For each expert, the copies to which one rank sends tokens.

    If that rank itself has copies, it uses only the first of these.
    """

    ranks: Tensor  # int64 [num_experts, max copies]: rank of the copy
    slots: Tensor  # int64 [num_experts, max copies]: slot of the copy on that rank
    numbers: Tensor  # int64 [num_experts]: number of valid copies
    first: int  # copy for the first token, modulo the number of copies

    def choose(self, expert_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Choose a copy of the expert for each entry of `expert_ids`.

        Entries of the same expert use its copies in turn.

        Returns:
            (ranks, slots) of the chosen copies, each in the shape of `expert_ids`.
        """
        if self.ranks.shape[1] == 1:
            return self.ranks[expert_ids, 0], self.slots[expert_ids, 0]
        experts = expert_ids.flatten()
        copy = ((_turns(experts, len(self.numbers)) + self.first) % self.numbers[experts]).view(
            expert_ids.shape
        )
        return self.ranks[expert_ids, copy], self.slots[expert_ids, copy]


def _turns(experts: Tensor, num_experts: int) -> Tensor:
    """Return, for each entry of `experts`, the number of equal entries before that entry."""
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
    """Byte layout of a row sent between ranks: slots (int32), weights (float32), hidden state."""

    def __init__(self, top_k: int, hidden: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._ends = (4 * top_k, 8 * top_k, 8 * top_k + hidden * dtype.itemsize)
        self.nbytes = -(-self._ends[-1] // ALIGNMENT) * ALIGNMENT

    def write(self, rows: Tensor, slots: Tensor, weights: Tensor, x: Tensor) -> None:
        """Write slots into all rows, and weights and hidden states into the first `num_tokens`.

        Args:
            rows: memory to write to, uint8 [..., num_rows, nbytes].
            slots: slots of all rows, [..., num_rows, top_k].
            weights: routing weights of the tokens, [num_tokens, top_k].
            x: hidden states of the tokens, [num_tokens, hidden].
        """
        weights_start, hidden_start, end = self._ends
        rows[..., :weights_start].view(torch.int32).copy_(slots)
        rows[..., : len(x), weights_start:hidden_start].view(torch.float32).copy_(weights)
        rows[..., : len(x), hidden_start:end].view(self.dtype).copy_(x)

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (slots, weights, hidden states) of rows [num_rows, nbytes]. Slots are int64."""
        weights_start, hidden_start, end = self._ends
        slots = rows[:, :weights_start].view(torch.int32).long()
        weights = rows[:, weights_start:hidden_start].view(torch.float32).to(self.dtype)
        return slots, weights, rows[:, hidden_start:end].contiguous().view(self.dtype)
