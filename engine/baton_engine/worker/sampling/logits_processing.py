"""Applies the bias, penalties and masks of a request's sampling parameters to logits.

The parameters are applied in this order. A masked logit becomes -inf and stays -inf, so the order
of the masks does not matter.

    logit_bias            added to the logits
    repetition_penalty    prompt and generated ids: positive logits are divided by the penalty,
                          negative logits are multiplied by it
    frequency_penalty     generated ids: the penalty is subtracted once per occurrence
    presence_penalty      generated ids: the penalty is subtracted once
    allowed_token_ids     all other ids are masked
    bad_words             the last id of a word is masked if the prompt and generated ids end with
                          the word's other ids
    min_tokens            EOS and stop tokens are masked until this number of tokens is generated
    grammar bitmask       ids that the grammar does not allow are masked
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton_engine.worker.devices import to_device
from baton_protocol.sampling_params import SamplingParams

TokenIds = npt.NDArray[np.int64]


@dataclass(slots=True)
class SamplingInput:
    """The inputs that the sampler needs for one row, except the logits."""

    params: SamplingParams
    prompt_token_ids: TokenIds
    generated_token_ids: TokenIds
    sample_index: int = 0

    @property
    def position(self) -> int:
        """Index that the sampled token will have among the generated tokens."""
        return len(self.generated_token_ids)


def process_logits(
    logits: Tensor,
    inputs: Sequence[SamplingInput],
    eos_token_ids: Sequence[int],
    grammar_bitmask: Tensor | None,
) -> Tensor:
    """Apply biases, penalties and masks. Return a copy, or `logits` if no row needs a change.

    Args:
        logits: float32 [rows, vocab_size]; not changed.
        inputs: one per row.
        eos_token_ids: EOS tokens of the model.
        grammar_bitmask: int32 [rows, ceil(vocab_size / 32)]. Rows without a grammar are all -1.
    """
    if grammar_bitmask is None and not any(_needs_processing(item) for item in inputs):
        return logits
    processed = logits.clone()
    _add_bias(processed, inputs)
    _penalize_repetition(processed, inputs)
    _penalize_generated(processed, inputs)
    _mask_all_but_allowed(processed, inputs)
    _mask_bad_words(processed, inputs)
    _mask_ends(processed, inputs, eos_token_ids)
    if grammar_bitmask is not None:
        _apply_bitmask(processed, grammar_bitmask)
    return processed


def end_token_ids(params: SamplingParams, eos_token_ids: Iterable[int]) -> set[int]:
    """Return the ids of EOS tokens and of the request's stop tokens.

    EOS tokens are included even with `ignore_eos`, because `min_tokens` always masks them.
    """
    return {*eos_token_ids, *params.stop_token_ids}


class _Places:
    """Collects (row, token id, value) triples, so that one operation changes all rows.

    Token ids outside the vocabulary are dropped.
    """

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self._rows: list[npt.NDArray[np.int64]] = []
        self._token_ids: list[TokenIds] = []
        self._values: list[npt.NDArray[np.float32]] = []

    def add(self, row: int, token_ids: npt.ArrayLike, values: npt.ArrayLike = 0.0) -> None:
        ids = np.asarray(token_ids, dtype=np.int64)
        inside = (ids >= 0) & (ids < self._logits.shape[-1])
        self._token_ids.append(ids[inside])
        self._rows.append(np.full(len(self._token_ids[-1]), row))
        self._values.append(
            np.broadcast_to(np.asarray(values, dtype=np.float32), ids.shape)[inside]
        )

    def __bool__(self) -> bool:
        return bool(self._rows)

    @property
    def index(self) -> tuple[Tensor, Tensor]:
        return self._move(self._rows), self._move(self._token_ids)

    @property
    def values(self) -> Tensor:
        return self._move(self._values)

    def _move(self, arrays: Sequence[npt.NDArray[np.generic]]) -> Tensor:
        return to_device(np.concatenate(arrays), self._logits.device)


def _needs_processing(item: SamplingInput) -> bool:
    params = item.params
    return bool(
        params.logit_bias
        or item.position < params.min_tokens
        or params.repetition_penalty != 1.0
        or params.frequency_penalty
        or params.presence_penalty
        or params.allowed_token_ids is not None
        or params.bad_words_token_ids
    )


def _add_bias(logits: Tensor, inputs: Sequence[SamplingInput]) -> None:
    places = _Places(logits)
    for row, item in enumerate(inputs):
        if bias := item.params.logit_bias:
            places.add(row, list(bias), list(bias.values()))
    if places:
        logits[places.index] += places.values


def _penalize_repetition(logits: Tensor, inputs: Sequence[SamplingInput]) -> None:
    places = _Places(logits)
    for row, item in enumerate(inputs):
        penalty = item.params.repetition_penalty
        if penalty != 1.0:
            places.add(
                row,
                np.unique(np.concatenate((item.prompt_token_ids, item.generated_token_ids))),
                penalty,
            )
    if places:
        index, penalties = places.index, places.values
        values = logits[index]
        logits[index] = torch.where(values > 0, values / penalties, values * penalties)


def _penalize_generated(logits: Tensor, inputs: Sequence[SamplingInput]) -> None:
    places = _Places(logits)
    for row, item in enumerate(inputs):
        params = item.params
        if item.position and (params.frequency_penalty or params.presence_penalty):
            generated, counts = np.unique(item.generated_token_ids, return_counts=True)
            places.add(row, generated, params.presence_penalty + params.frequency_penalty * counts)
    if places:
        logits[places.index] -= places.values


def _mask_all_but_allowed(logits: Tensor, inputs: Sequence[SamplingInput]) -> None:
    places = _Places(logits)
    rows = [row for row, item in enumerate(inputs) if item.params.allowed_token_ids is not None]
    for row in rows:
        places.add(row, inputs[row].params.allowed_token_ids or [])
    if places:
        index = places.index
        allowed = logits[index]
        logits[to_device(np.array(rows), logits.device)] = -math.inf
        logits[index] = allowed


def _mask_bad_words(logits: Tensor, inputs: Sequence[SamplingInput]) -> None:
    places = _Places(logits)
    for row, item in enumerate(inputs):
        if words := item.params.bad_words_token_ids:
            longest = max(len(word) for word in words) - 1
            # Only the last `longest` ids can match a word.
            recent = (
                [*item.prompt_token_ids[-longest:], *item.generated_token_ids[-longest:]]
                if longest
                else []
            )
            places.add(
                row,
                [word[-1] for word in words if recent[len(recent) - len(word) + 1 :] == word[:-1]],
            )
    if places:
        logits[places.index] = -math.inf


def _mask_ends(
    logits: Tensor, inputs: Sequence[SamplingInput], eos_token_ids: Sequence[int]
) -> None:
    places = _Places(logits)
    for row, item in enumerate(inputs):
        if item.position < item.params.min_tokens:
            places.add(row, list(end_token_ids(item.params, eos_token_ids)))
    if places:
        logits[places.index] = -math.inf


def _apply_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    rows = (bitmask != -1).any(dim=-1).nonzero()[:, 0]
    bits = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    allowed = ((bitmask[rows][:, :, None] >> bits) & 1).bool().flatten(1)[:, : logits.shape[-1]]
    logits[rows] = logits[rows].masked_fill_(~allowed, -math.inf)
