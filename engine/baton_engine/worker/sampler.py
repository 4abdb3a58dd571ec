"""Sampling as a pure function of (logits, sampling params, prompt ids, generated ids, seed, sample index).

No generator holds state: the noise of a candidate token is a hash of (seed, position, sample index, token id), so any pod that
continues a request draws what the first pod would have drawn, whatever else is in its batch.

    greedy    argmax of the processed logits                                     temperature 0
    random    argmax of (processed logits / temperature + Gumbel noise)          Gumbel-max: a sample of their softmax

Noise: SplitMix64 (Steele, Lea and Flood 2014) as a counter-based generator. `key` chains the mixer over seed, position and sample
index; token t gets mix(key + (t + 1) * GAMMA). Integer operations only, so the bits are the same on every device; their upper 52
become u in (0, 1), and the noise is -log(-log(u)) in float64.

Processed: logit bias, then EOS and stop tokens masked before min_tokens, then repetition penalty (prompt and generated ids),
frequency and presence penalties (generated ids); after the temperature min_p, top_k and top_p. Reported logprobs are of the
raw logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton_engine.protocol.messages import TokenLogprobs
from baton_engine.protocol.sampling import SamplingParams

TokenIds = npt.NDArray[np.int64]

MIN_TEMPERATURE = 1e-5
"""Lower ones count as this: the most likely token wins anyway, and nothing overflows."""

_MASK64 = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MANTISSA_BITS = 52  # one less than a double has, so that u + 1/2 ulp stays below 1


@dataclass(slots=True)
class SamplingInput:
    """What one row's sample depends on, besides its logits."""

    params: SamplingParams
    prompt_token_ids: TokenIds
    generated_token_ids: TokenIds
    sample_index: int = 0

    @property
    def position(self) -> int:
        """Index in the generated sequence of the token to be sampled."""
        return len(self.generated_token_ids)


@dataclass(slots=True)
class SamplerOutput:
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    """None for rows that did not ask."""


def sample(logits: Tensor, inputs: Sequence[SamplingInput], eos_token_ids: Sequence[int]) -> SamplerOutput:
    """Samples one token per row.

    Args:
        logits: raw, float32, of shape [rows, vocab_size]; not changed.
        inputs: one per row.
        eos_token_ids: the model's own end tokens, masked before min_tokens.
    """
    processed = logits.clone()
    for row, item in enumerate(inputs):
        if _needs_processing(item):
            _process_row(processed[row], item, eos_token_ids)
    token_ids = processed.argmax(dim=-1)
    random_rows = [row for row, item in enumerate(inputs) if item.params.temperature > 0]
    if random_rows:
        index = torch.tensor(random_rows, device=logits.device)
        token_ids[index] = _sample_random(processed[index], [inputs[row] for row in random_rows])
    sampled: list[int] = token_ids.tolist()
    return SamplerOutput(sampled, _gather_logprobs(logits, inputs, sampled))


def gumbel_noise(keys: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """Standard Gumbel noise per (key, token id), float64 of shape [len(keys), vocab_size]."""
    counters = torch.arange(1, vocab_size + 1, device=device) * _signed(_GAMMA)
    bits = torch.tensor([_signed(key) for key in keys], device=device)[:, None] + counters
    bits = (bits ^ _shift_right(bits, 30)) * _signed(_MIX_1)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(_MIX_2)
    bits = bits ^ _shift_right(bits, 31)
    uniform = (_shift_right(bits, 64 - _MANTISSA_BITS).double() + 0.5) * 2.0**-_MANTISSA_BITS
    return -torch.log(-torch.log(uniform))


def noise_key(seed: int, position: int, sample_index: int) -> int:
    """64 bits that select the noise of one sampled position."""
    return _mix(_mix(_mix(seed) + position) + sample_index)


def _mix(value: int) -> int:
    """SplitMix64's step on Python integers; the tensor form is in gumbel_noise."""
    value = (value + _GAMMA) & _MASK64
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK64
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK64
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    """The int64 with the bits of a uint64: torch multiplies and adds int64 modulo 2**64."""
    value &= _MASK64
    return value - 2**64 if value >= 2**63 else value


def _shift_right(bits: Tensor, by: int) -> Tensor:
    """Logical shift: torch's own copies the sign bit."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _needs_processing(item: SamplingInput) -> bool:
    params = item.params
    return bool(
        params.logit_bias
        or item.position < params.min_tokens
        or params.repetition_penalty != 1.0
        or params.frequency_penalty
        or params.presence_penalty
    )


def _process_row(logits: Tensor, item: SamplingInput, eos_token_ids: Sequence[int]) -> None:
    """Bias, mask and penalties of one row, in place."""
    params = item.params
    vocab_size = logits.shape[0]
    if params.logit_bias:
        # Ids past the vocabulary name no token: nothing to bias.
        biased = [(token, bias) for token, bias in params.logit_bias.items() if token < vocab_size]
        if biased:
            ids = torch.tensor([token for token, _ in biased], device=logits.device)
            logits[ids] += torch.tensor([bias for _, bias in biased], dtype=logits.dtype, device=logits.device)
    if item.position < params.min_tokens:
        ends = [token for token in {*eos_token_ids, *params.stop_token_ids} if 0 <= token < vocab_size]
        logits[ends] = -math.inf
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate((item.prompt_token_ids, item.generated_token_ids)))
        ids = torch.from_numpy(seen).to(logits.device)
        values = logits[ids]
        logits[ids] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.frequency_penalty or params.presence_penalty) and item.position:
        generated, counts = np.unique(item.generated_token_ids, return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * counts
        logits[torch.from_numpy(generated).to(logits.device)] -= torch.from_numpy(penalty).to(logits)


def _sample_random(logits: Tensor, inputs: Sequence[SamplingInput]) -> Tensor:
    """Gumbel-max over the tokens that min_p, top_k and top_p keep; [rows, vocab_size] -> [rows]."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    scaled = logits.double() / column([max(item.params.temperature, MIN_TEMPERATURE) for item in inputs])
    _restrict(scaled, [item.params for item in inputs])
    keys = [noise_key(item.params.seed, item.position, item.sample_index) for item in inputs]
    return (scaled + gumbel_noise(keys, logits.shape[-1], logits.device)).argmax(dim=-1)


def _restrict(scaled: Tensor, params: Sequence[SamplingParams]) -> None:
    """Masks in place what min_p, top_k and top_p leave out. The most likely token always stays."""
    vocab_size = scaled.shape[-1]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=scaled.dtype, device=scaled.device)[:, None]

    if any(p.min_p > 0 for p in params):
        least = column([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params])
        scaled.masked_fill_(scaled < scaled.amax(dim=-1, keepdim=True) + least, -math.inf)
    filtered = [row for row, p in enumerate(params) if p.top_p < 1 or 0 < p.top_k < vocab_size]
    if not filtered:
        return
    rows = torch.tensor(filtered, device=scaled.device)
    top_k = column([params[row].top_k if 0 < params[row].top_k < vocab_size else vocab_size for row in filtered])
    top_p = column([params[row].top_p if params[row].top_p < 1 else math.inf for row in filtered])
    values, ids = scaled[rows].sort(dim=-1, descending=True, stable=True)
    values.masked_fill_(torch.arange(vocab_size, device=scaled.device) >= top_k, -math.inf)
    probs = values.softmax(dim=-1)
    drop = probs.cumsum(dim=-1) - probs >= top_p  # a token stays if those ahead of it do not reach top_p yet
    drop[:, 0] = False
    values.masked_fill_(drop, -math.inf)
    scaled[rows] = torch.empty_like(values).scatter_(-1, ids, values)


def _gather_logprobs(
    logits: Tensor, inputs: Sequence[SamplingInput], token_ids: Sequence[int]
) -> list[TokenLogprobs | None]:
    result: list[TokenLogprobs | None] = [None] * len(inputs)
    for row, item in enumerate(inputs):
        num_top = item.params.logprobs
        if num_top is None:
            continue
        logprobs = logits[row].log_softmax(dim=-1)
        chosen = logprobs[token_ids[row]]
        values, ids = logprobs.topk(min(num_top, logprobs.shape[0]))
        result[row] = TokenLogprobs(
            token_id=token_ids[row],
            logprob=float(chosen),
            rank=int((logprobs > chosen).sum()) + 1,
            top=list(zip(ids.tolist(), values.tolist(), strict=True)),
        )
    return result
