"""What the offline API returns, in the shapes vLLM's users know."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton_protocol.messages import RoutedExperts
from baton_text.responses import PromptTokenLogprob as Logprob

__all__ = [
    "BeamSearchOutput",
    "BeamSearchSequence",
    "CompletionOutput",
    "Logprob",
    "Metric",
    "RequestOutput",
]


@dataclass
class CompletionOutput:
    """One sequence generated for a prompt."""

    index: int
    text: str
    token_ids: list[int]
    """The token that ended it included."""
    cumulative_logprob: float | None
    """Of `token_ids`; None if logprobs were not asked for."""
    logprobs: list[dict[int, Logprob]] | None
    """Per token of `token_ids`: itself and the most likely ones, by token id."""
    finish_reason: str | None
    """stop, length or repetition."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for the model's own end."""
    routed_experts: RoutedExperts | None = None
    """If `return_routed_experts` was asked for: of all tokens that were computed."""


@dataclass
class RequestOutput:
    """Everything generated for one prompt."""

    request_id: str
    prompt: str | None
    """None if token ids were given."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Per prompt token; nothing for the first, which nothing predicts."""
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""


@dataclass
class BeamSearchSequence:
    tokens: list[int]
    """The prompt's and the generated ones."""
    text: str
    """Of `tokens`: the prompt's text is in it, as in vLLM."""
    cum_logprob: float
    """Of the generated tokens."""
    score: float
    """cum_logprob / number of generated tokens ** length_penalty: what beams are ordered by."""
    finish_reason: str
    stop_reason: int | None = None


@dataclass
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass
class Metric:
    """One sample of a metric, as the engine's /metrics has it."""

    name: str
    labels: dict[str, str]
    value: float
