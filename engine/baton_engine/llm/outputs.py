"""Results of the offline API. The classes follow the names and fields of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton_protocol.engine_messages import RoutedExperts
from baton_text.responses.openai import PromptTokenLogprob as Logprob

__all__ = [
    "BeamSearchOutput",
    "BeamSearchSequence",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "Metric",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
]


@dataclass
class CompletionOutput:
    """One sequence generated for a prompt."""

    index: int
    text: str
    #: Including the token that ended the sequence.
    token_ids: list[int]
    #: Sum of the log-probabilities of `token_ids`. None unless logprobs were requested.
    cumulative_logprob: float | None
    #: Per token of `token_ids`: log-probabilities of this token and of the most likely tokens, by
    #: token id. None unless requested.
    logprobs: list[dict[int, Logprob]] | None
    #: Why the sequence ended: stop, length or repetition.
    finish_reason: str | None
    #: The stop string or stop token id that ended the sequence. None for the model's EOS token.
    stop_reason: int | str | None = None
    #: Experts of all computed tokens, if `return_routed_experts` was set.
    routed_experts: RoutedExperts | None = None
    #: Number of NaNs in the logits of `token_ids`. 0 unless `count_nans_in_logits` is set.
    num_nans_in_logits: int = 0


@dataclass
class RequestOutput:
    """Everything generated for one prompt."""

    request_id: str
    #: Text of the prompt. None if the caller passed token ids.
    prompt: str | None
    prompt_token_ids: list[int]
    #: Per prompt token: log-probabilities of this token and of the most likely tokens, by token id.
    #: The first entry is None, because no token precedes it. None unless requested.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    #: Prompt tokens taken from the prefix cache.
    num_cached_tokens: int = 0


@dataclass
class BeamSearchSequence:
    """One beam of a beam search."""

    #: The tokens of the prompt, then the generated tokens.
    tokens: list[int]
    #: Text of `tokens`, including the prompt, as in vLLM.
    text: str
    #: Sum of the log-probabilities of the generated tokens.
    cum_logprob: float
    #: cum_logprob / number of generated tokens ** length_penalty. Beams are sorted by this score.
    score: float
    finish_reason: str
    stop_reason: int | None = None


@dataclass
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass
class EmbeddingRequestOutput:
    """The result of `LLM.embed` for one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    #: Prompt tokens taken from the prefix cache.
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass
class ScoringOutput:
    """The score of a pair of texts: higher for more similar or more relevant texts."""

    score: float


@dataclass
class ScoringRequestOutput:
    """The result of `LLM.score` for one pair."""

    request_id: str
    outputs: ScoringOutput
    #: Tokens of the prompt that joins both texts, or of both texts one after the other.
    prompt_token_ids: list[int]
    #: Prompt tokens taken from the prefix cache.
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass
class Metric:
    """One sample of a metric, named as in the engine server's /metrics endpoint."""

    name: str
    labels: dict[str, str]
    value: float
