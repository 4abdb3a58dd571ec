"""Sampling parameters: what a client may ask of one sequence, checked once at the edge."""

from __future__ import annotations

import msgspec

MAX_LOGPROBS = 20


class SamplingParams(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Field names and meanings are OpenAI's and vLLM's.

    Sampling is a pure function of (logits, these params, prompt ids, generated ids, seed, sample index): nothing else.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all."""
    min_p: float = 0.0
    """Tokens less likely than min_p times the most likely one are left out."""
    seed: int = 0
    """Keys the noise. The gateway draws one when the client gives none, so that any pod can continue the request."""
    max_tokens: int | None = None
    """Generated tokens in all, those of generated_token_ids included. None: up to max_model_len."""
    min_tokens: int = 0
    """EOS and stop tokens are not sampled before."""
    stop_token_ids: list[int] = []
    """Besides the model's own EOS."""
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    """How many of the most likely tokens to report per position; 0: only the sampled one; None: nothing."""

    def validate(self) -> None:
        """Raises ValueError naming the field and the bound."""
        _bound("temperature", self.temperature, 0.0, 1e6)
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be -1, 0 or positive, got {self.top_k}")
        _bound("min_p", self.min_p, 0.0, 1.0)
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must fit 64 bits, got {self.seed}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must not be negative, got {self.min_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}")
        _bound("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _bound("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not 0.0 < self.repetition_penalty <= 1e3:
            raise ValueError(f"repetition_penalty must be positive, got {self.repetition_penalty}")
        for token_id, bias in (self.logit_bias or {}).items():
            if token_id < 0:
                raise ValueError(f"logit_bias keys must be token ids, got {token_id}")
            _bound("logit_bias", bias, -100.0, 100.0)
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(f"logprobs must be in [0, {MAX_LOGPROBS}], got {self.logprobs}")


def _bound(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # refuses NaN as well
        raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {value}")
