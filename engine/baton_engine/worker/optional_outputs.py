"""Optional outputs of a step: log-probabilities of prompt tokens, and routed experts.

`RequestOutputs.join_optional_outputs` in the scheduler joins the outputs of a request's steps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from baton_engine.worker.input_batch import InputBatch, ScheduledRows
from baton_engine.worker.sampling.logprobs import prompt_logprobs
from baton_protocol.engine_messages import PromptLogprobs, RoutedExperts

#: Limit on the prompt logits in memory at one time. Logits are many times larger than hidden
#: states.
MAX_LOGITS_BYTES = 64 * 2**20


def prompt_logprobs_of(
    hidden: Tensor,
    scheduled: ScheduledRows,
    batch: InputBatch,
    compute_logits: Callable[[Tensor], Tensor],
    vocab_size: int,
) -> dict[str, PromptLogprobs]:
    """Return the log-probabilities of prompt tokens, from the hidden states of a step.

    The result is by request id. Each position predicts the next token, so the entry of request i
    begins with the prompt token at position `starts[i] + 1`. Requests without `prompt_logprobs`,
    and requests for which the step predicts no prompt token, are left out.

    Args:
        hidden: hidden states of the step's tokens, [num_tokens, hidden_size].
        scheduled: rows and positions that the step ran.
        batch: batch that holds the rows.
        compute_logits: maps [n, hidden_size] to float32 [n, vocab_size]. The call is collective:
            all tensor ranks pass the same slices of `hidden`.
        vocab_size: size of the model's vocabulary.
    """
    slice_size = max(1, MAX_LOGITS_BYTES // (4 * vocab_size))
    first_tokens = scheduled.first_tokens.tolist()
    found: dict[str, PromptLogprobs] = {}
    for index in np.flatnonzero(batch.wants_prompt_logprobs[scheduled.rows]).tolist():
        row, start, end = (
            int(values[index]) for values in (scheduled.rows, scheduled.starts, scheduled.ends)
        )
        # The prompt's last token is left out, because it predicts a generated token.
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
    """Return the experts to which a step's tokens were routed, by request id.

    Requests without `return_routed_experts` are left out.

    Args:
        layers: expert ids of every token, one tensor per sparse layer, in order: int
            [num_tokens, experts per token].
        scheduled: rows and positions that the step ran.
        batch: batch that holds the rows.
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
