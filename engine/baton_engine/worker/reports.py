"""Reports of a step for requests that want them: prompt log-probabilities, routed experts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from baton_engine.worker.input_batch import InputBatch, ScheduledRows
from baton_engine.worker.sampling.logprobs import prompt_logprobs
from baton_protocol.messages import PromptLogprobs, RoutedExperts

#: Limit of the prompt logits in memory at one time. They are many times larger than the hidden
#: states.
MAX_LOGITS_BYTES = 64 * 2**20


def prompt_logprobs_of(
    hidden: Tensor,
    scheduled: ScheduledRows,
    batch: InputBatch,
    compute_logits: Callable[[Tensor], Tensor],
    vocab_size: int,
) -> dict[str, PromptLogprobs]:
    """Return log-probabilities of the prompt tokens that the step's positions predict.

    They begin at position `starts[i] + 1`.

    Args:
        hidden: hidden states of the step's tokens, [num_tokens, hidden_size].
        scheduled: the step's rows.
        batch: the rows' requests.
        compute_logits: [n, hidden_size] -> float32 [n, vocab_size]. It is collective, so all ranks
            call it with the same slices.
        vocab_size: size of the model's vocabulary.
    """
    slice_size = max(1, MAX_LOGITS_BYTES // (4 * vocab_size))
    first_tokens = scheduled.first_tokens.tolist()
    found: dict[str, PromptLogprobs] = {}
    for index in np.flatnonzero(batch.wants_prompt_logprobs[scheduled.rows]).tolist():
        row, start, end = (
            int(of[index]) for of in (scheduled.rows, scheduled.starts, scheduled.ends)
        )
        # The prompt's last token predicts a generated one.
        end = min(end, int(batch.num_prompt_tokens[row]) - 1)
        if start >= end:
            continue
        num_top = batch.sampling_input(row).params.prompt_logprobs
        assert num_top is not None
        own = hidden[first_tokens[index] : first_tokens[index] + end - start]
        next_ids = batch.token_ids[row, start + 1 : end + 1].tolist()
        entries: PromptLogprobs = []
        for first in range(0, len(own), slice_size):
            part = slice(first, first + slice_size)
            entries += prompt_logprobs(compute_logits(own[part]), next_ids[part], num_top)
        found[scheduled.request_ids[index]] = entries
    return found


def routed_experts_of(
    layers: list[Tensor], scheduled: ScheduledRows, batch: InputBatch
) -> dict[str, RoutedExperts]:
    """Return the experts of each request's tokens, for requests that want them.

    Args:
        layers: one tensor per sparse layer, in order, with the experts of every token: int
            [num_tokens, experts per token].
        scheduled: the step's rows.
        batch: the rows' requests.
    """
    if not layers:
        return {}
    experts = torch.stack(layers, dim=1).to("cpu", torch.int32).numpy().astype("<u2")
    first_tokens = scheduled.first_tokens.tolist()
    found = {}
    for index in np.flatnonzero(batch.wants_routed_experts[scheduled.rows]).tolist():
        own = experts[first_tokens[index] : first_tokens[index + 1]]
        num_tokens, num_layers, per_token = own.shape
        found[scheduled.request_ids[index]] = RoutedExperts(
            (num_tokens, num_layers, per_token), own.tobytes()
        )
    return found
