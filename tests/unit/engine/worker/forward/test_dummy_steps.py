"""Warm-up steps are within the limits of a step."""

from __future__ import annotations

import torch

from baton_engine.worker.forward import dummy_steps


def test_warm_up_steps_are_within_the_limits_of_a_step() -> None:
    for max_num_seqs, budget in ((1, 8), (2, 33), (40, 64)):
        steps = dummy_steps.typical(50, max_num_seqs, budget, torch.device("cuda"))
        assert max(len(query_lens) for query_lens, _ in steps) <= max_num_seqs
        assert max(sum(query_lens) for query_lens, _ in steps) <= budget
        assert max(seq_len for _, seq_len in steps) == 50
        assert len(steps) >= 4
