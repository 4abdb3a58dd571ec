"""A small model with experts, its generations, and its logits over ranks."""

from __future__ import annotations

from torch import Tensor

from baton_protocol.topology import Generation
from support.engine.model_cases import run_threads
from support.engine.ranks.expert_ranks import (
    ThreadRank,
    generation,
    place_experts,
    run_expert_parallel,
)

NUM_LAYERS, NUM_EXPERTS = 2, 8
#: Largest difference of logits between one rank and several.
TOLERANCE = 3e-5
SEQUENCES = [[5, 6, 7, 8, 9, 10, 11], [300, 2, 1, 4, 2, 1, 9]]


def generation_of(number: int, ranks: list[ThreadRank], num_redundant: int = 0) -> Generation:
    placement = place_experts(NUM_LAYERS, NUM_EXPERTS, len(ranks), num_redundant)
    return generation(number, [rank.name for rank in ranks], placement)


def compute_logits(ranks: list[ThreadRank]) -> Tensor:
    """Run both sequences on the first rank and dummy batches on the others."""
    waves = [(14, *[0] * (len(ranks) - 1))]
    works = [
        lambda rank=rank, own=SEQUENCES if rank is ranks[0] else []: run_expert_parallel(
            rank.model, own, 7, waves
        )
        for rank in ranks
    ]
    return run_threads(works)[0]
