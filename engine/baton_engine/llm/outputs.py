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
    #: The token that ended it included.
    token_ids: list[int]
    #: Of `token_ids`; None if logprobs were not asked for.
    cumulative_logprob: float | None
    #: Per token of `token_ids`: itself and the most likely ones, by token id.
    logprobs: list[dict[int, Logprob]] | None
    #: stop, length or repetition.
    finish_reason: str | None
    #: The stop string or stop token id that ended it; None for the model's own end.
    stop_reason: int | str | None = None
    #: If `return_routed_experts` was asked for: of all tokens that were computed.
    routed_experts: RoutedExperts | None = None


@dataclass
class RequestOutput:
    """Everything generated for one prompt."""

    request_id: str
    #: None if token ids were given.
    prompt: str | None
    prompt_token_ids: list[int]
    #: Per prompt token; nothing for the first, which nothing predicts.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    #: Prompt tokens taken from the prefix cache.
    num_cached_tokens: int = 0


@dataclass
class BeamSearchSequence:
    #: The prompt's and the generated ones.
    tokens: list[int]
    #: Of `tokens`: the prompt's text is in it, as in vLLM.
    text: str
    #: Of the generated tokens.
    cum_logprob: float
    #: cum_logprob / number of generated tokens ** length_penalty: what beams are ordered by.
    score: float
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
