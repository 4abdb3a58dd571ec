"""Beam search as a pure function: selects the beams that continue and the beams that are finished.

A step ranks the continuations of all live beams by cumulative log-probability. A continuation ends
with a stop token or at `max_tokens`. The first `width` continuations that do not end become the
live beams. A continuation that ends becomes a finished hypothesis if it ranks among the first
`width`. The `width` finished hypotheses with the best scores are kept. A score is
cumulative log-probability / number of tokens ** length_penalty.

The semantics are those of `transformers`' generate(num_beams=width, early_stopping=True or False).
Ties go to the earlier beam, then to the lower token id, so that a search repeats exactly on any
machine.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from baton_protocol.engine_messages import FinishReason

T = TypeVar("T")

#: (token id, log-probability given the beam).
Candidate = tuple[int, float]


@dataclass(frozen=True, slots=True)
class BeamConfig:
    """Parameters of one beam search."""

    width: int
    #: Limit of generated tokens: SamplingParams.max_tokens, or less if max_model_len requires it.
    max_tokens: int
    #: Tokens that end a hypothesis, including the model's EOS tokens unless ignore_eos is set.
    stop_token_ids: frozenset[int] = frozenset()
    length_penalty: float = 1.0
    early_stopping: bool = False

    def score(self, cumulative_logprob: float, num_tokens: int) -> float:
        """Return the length-normalized score by which finished hypotheses are ranked.

        Args:
            num_tokens: number of generated tokens, including the stop token.
        """
        return float(cumulative_logprob / num_tokens**self.length_penalty)


@dataclass(frozen=True, slots=True)
class BeamState:
    """Log-probability and length of a live beam before a step."""

    cumulative_logprob: float = 0.0
    #: Number of generated tokens, equal for all beams of a search.
    num_tokens: int = 0


class LiveBeam(NamedTuple):
    """A continuation that becomes a live beam."""

    #: Index of the parent among the `beams` that were passed to `advance`.
    parent: int
    token_id: int
    cumulative_logprob: float


class FinishedBeam(NamedTuple):
    """A continuation that becomes a finished hypothesis."""

    parent: int
    #: The last token of the hypothesis: the stop token, if a stop token ended the hypothesis.
    token_id: int
    cumulative_logprob: float
    #: STOP or LENGTH.
    finish_reason: FinishReason
    score: float


@dataclass(frozen=True, slots=True)
class BeamStep:
    """Result of one step of a beam search."""

    #: At most `width`, best first. A parent may have several children, or none. Empty if the search
    #: is over: no live beam can improve the result, or no token was possible.
    live: list[LiveBeam]
    #: New hypotheses among the best `width`, best first. The caller adds them to FinishedBeams.
    finished: list[FinishedBeam]


class FinishedBeams(Generic[T]):
    """The best `width` finished hypotheses, best first.

    Hypotheses with equal scores stand in the order in which they were added.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._entries: list[tuple[float, T]] = []

    def add(self, score: float, hypothesis: T) -> None:
        """Insert `hypothesis` by `score`. Keep only the best `width` hypotheses."""
        place = bisect.bisect_right(self._entries, -score, key=lambda entry: -entry[0])
        self._entries.insert(place, (score, hypothesis))
        del self._entries[self._width :]

    @property
    def scores(self) -> list[float]:
        return [score for score, _ in self._entries]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return (hypothesis for _, hypothesis in self._entries)


def advance(
    beams: Sequence[BeamState],
    candidates: Sequence[Sequence[Candidate]],
    config: BeamConfig,
    finished_scores: Sequence[float] = (),
) -> BeamStep:
    """Compute one step of a beam search.

    Args:
        beams: live beams: one at the start, at most `width` later.
        candidates: continuations of each live beam, best first. A beam needs at least 2 * width
            continuations, of which at least `width` are not stop tokens. If the vocabulary is too
            small, all its tokens are enough. Continuations with log-probability -inf are skipped.
        finished_scores: scores of the hypotheses that are already finished, at most `width`, in
            any order.
    """
    num_tokens = beams[0].num_tokens + 1
    ranked = sorted(
        (-(beam.cumulative_logprob + logprob), parent, token_id)
        for parent, (beam, continuations) in enumerate(zip(beams, candidates, strict=True))
        for token_id, logprob in continuations
        if logprob > -math.inf
    )
    at_limit = num_tokens >= config.max_tokens
    live: list[LiveBeam] = []
    finished: list[FinishedBeam] = []
    for rank, (loss, parent, token_id) in enumerate(ranked):
        stops = token_id in config.stop_token_ids
        if stops or at_limit:
            # Continuations of lower rank may only become live beams. As finished hypotheses, they
            # would favor short hypotheses.
            if rank < config.width:
                reason = FinishReason.STOP if stops else FinishReason.LENGTH
                finished.append(
                    FinishedBeam(parent, token_id, -loss, reason, config.score(-loss, num_tokens))
                )
        elif len(live) < config.width:
            live.append(LiveBeam(parent, token_id, -loss))

    best = sorted([*finished_scores, *(beam.score for beam in finished)], reverse=True)[
        : config.width
    ]
    if len(best) == config.width:
        finished = [beam for beam in finished if beam.score >= best[-1]]
    over = not live or _cannot_improve(live[0], num_tokens, best, config)
    return BeamStep([] if over else live, finished)


def _cannot_improve(
    best_live: LiveBeam, num_tokens: int, best_scores: Sequence[float], config: BeamConfig
) -> bool:
    """Return whether the search is over although live beams are left.

    A search with fewer than `width` finished hypotheses continues. With `early_stopping`, any other
    search is over. Without `early_stopping`, the search is over if no live beam scores better than
    the worst of the `width` best finished hypotheses. A live beam is scored at its length after the
    step, as in `transformers`. With a positive length penalty, a longer continuation could still
    score better.
    """
    if len(best_scores) < config.width:
        return False
    return (
        config.early_stopping
        or config.score(best_live.cumulative_logprob, num_tokens) <= best_scores[-1]
    )
