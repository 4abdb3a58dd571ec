"""Beam search as a pure function: which beams continue, and which are finished.

One step ranks the continuations of all live beams by cumulative log-probability. The first `width`
of them that do not end stay live. A continuation that ends (a stop token, or the last token
allowed) is finished if it ranks among the first `width`. The best `width` finished hypotheses are
kept, by cumulative log-probability / number of tokens ** length_penalty.

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

from baton_protocol.messages import FinishReason

T = TypeVar("T")

#: (token id, log-probability given the beam).
Candidate = tuple[int, float]


@dataclass(frozen=True, slots=True)
class BeamConfig:
    """Parameters of one search."""

    width: int
    #: Limit of generated tokens: SamplingParams.max_tokens, or less if max_model_len requires it.
    max_tokens: int
    #: Tokens that end a hypothesis, including the model's EOS tokens unless ignore_eos is set.
    stop_token_ids: frozenset[int] = frozenset()
    length_penalty: float = 1.0
    early_stopping: bool = False

    def score(self, cumulative_logprob: float, num_tokens: int) -> float:
        """Return the score that orders finished hypotheses.

        Args:
            num_tokens: generated tokens, including the stop token.
        """
        return float(cumulative_logprob / num_tokens**self.length_penalty)


@dataclass(frozen=True, slots=True)
class BeamState:
    """A live beam."""

    cumulative_logprob: float = 0.0
    #: Generated tokens. The same number for all beams of a search.
    num_tokens: int = 0


class LiveBeam(NamedTuple):
    """A continuation that stays live."""

    #: Index of the beam it continues.
    parent: int
    token_id: int
    cumulative_logprob: float


class FinishedBeam(NamedTuple):
    """A continuation that ends its hypothesis."""

    parent: int
    #: The last token: the stop token, if one ended it.
    token_id: int
    cumulative_logprob: float
    #: STOP or LENGTH.
    finish_reason: FinishReason
    score: float


@dataclass(frozen=True, slots=True)
class BeamStep:
    """Result of one step of a search."""

    #: At most `width`, best first. A parent may have several children, or none. Empty if the search
    #: is over: no later hypothesis can count, or no token was possible.
    live: list[LiveBeam]
    #: New hypotheses among the best `width`, best first. The caller adds them to FinishedBeams.
    finished: list[FinishedBeam]


class FinishedBeams(Generic[T]):
    """The best `width` finished hypotheses, best first. Of equal ones the earlier comes first."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._entries: list[tuple[float, T]] = []

    def add(self, score: float, hypothesis: T) -> None:
        """Keep `hypothesis` if it is among the best `width`, and drop the worst one beyond that."""
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
    """Compute one step of the search.

    Args:
        beams: live beams: one at the start, at most `width` later.
        candidates: continuations per live beam, best first. At least 2 * width of them, with
            `width` that are not stop tokens, unless the vocabulary has fewer. Those with
            log-probability -inf are skipped.
        finished_scores: scores of the best finished hypotheses, at most `width`, in any order.
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
            # Lower ranks only serve to find `width` live beams. Ending them would favour short
            # hypotheses.
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
    """Return whether `width` hypotheses are finished that no live beam is expected to beat.

    A live beam is scored at its present length, as in `transformers`. With a positive length
    penalty a longer one could still score better, but rarely does.
    """
    if len(best_scores) < config.width:
        return False
    return (
        config.early_stopping
        or config.score(best_live.cumulative_logprob, num_tokens) <= best_scores[-1]
    )
