"""Waves, in which the ranks of a generation step together. A state machine without I/O or clock.

The layers are expert parallel, so in a wave every rank takes every step, with or without its own
tokens. Before a step the ranks exchange their StepVotes. Each rank computes the same decision,
because it depends only on the votes:

- the wave ends with this step if no rank has work;
- the next generation is committed after this step if all ranks vote for the same one.

Outside a wave ranks exchange nothing. A rank that gets work starts the next wave and sends
StartWave to the others, which join it. A StartWave may be

- of a wave that has ended: ignored, because the wave has ended for its sender too;
- of a later wave: recorded, because the current wave has already ended for its sender;
- of the next generation: kept for that generation's Waves. It shows that a rank has received the
  commit.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

from baton_protocol.topology import StartWave


class StepVote(NamedTuple):
    """A rank's values for one step. They are integers, because they are sent in one tensor."""

    #: Tokens of this rank in the step.
    num_tokens: int
    #: 1 if the rank has tokens for this or the next step. Paused or loading requests do not count.
    has_work: int
    #: Result of `vote_for` for the generation to commit; 0 if there is none.
    commit: int = 0


class StepDecision(NamedTuple):
    """The result of a step's votes, equal on all ranks."""

    #: Tokens by rank.
    num_tokens: tuple[int, ...]
    #: Whether the generation of this rank's vote is committed after this step.
    commit: bool


def vote_for(nonce: str) -> int:
    """Return the vote for the generation with this nonce, which is never 0."""
    return zlib.crc32(nonce.encode()) + 1


class Waves:
    """The waves of one generation on one rank."""

    def __init__(self, generation: int, nonce: str) -> None:
        self.generation = generation
        self.nonce = nonce
        #: Number of the current wave, or of the next one outside a wave.
        self.wave = 0
        self.running = False
        #: Highest wave number in a received StartWave; -1 before the first one.
        self._awaited = -1

    def begin(self) -> StartWave:
        """Start a wave, because this rank has work or a vote. Return the message for the others."""
        assert not self.running, "the wave is already running"
        self.running = True
        return StartWave(self.generation, self.nonce, self.wave)

    def on_start(self, start: StartWave) -> None:
        """Join a wave that another rank has started. Ignore other generations."""
        if (start.generation, start.nonce) != (self.generation, self.nonce):
            return
        self._awaited = max(self._awaited, start.wave)
        self._join()

    def decide(self, votes: Sequence[StepVote]) -> StepDecision:
        """Compute the decision from the votes of all ranks, in rank order, before a step."""
        assert self.running, "votes are exchanged inside waves only"
        commit = votes[0].commit != 0 and all(vote.commit == votes[0].commit for vote in votes)
        if not any(vote.has_work for vote in votes):
            self.wave += 1
            self.running = False
            self._join()
        return StepDecision(tuple(vote.num_tokens for vote in votes), commit)

    def _join(self) -> None:
        if self._awaited >= self.wave:
            self.running = True
