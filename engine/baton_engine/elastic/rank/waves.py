"""Waves: periods in which the ranks of a generation step together. No I/O and no clock.

The layers are expert parallel, so in a wave every rank takes every step, with or without tokens of
its own. Before a step, the ranks exchange their StepVotes. All ranks compute the same decision,
because it depends only on the votes:

- The wave ends with this step if no rank has work.
- The next generation is committed after this step if all ranks vote for the same generation.

Outside a wave, ranks exchange nothing. A rank that gets work starts the next wave: it sends
StartWave to the other ranks, which then join. A received StartWave may belong to

- a wave that has ended. The message is ignored, because the wave has ended for the sender too.
- a later wave. The current wave has already ended for the sender. The message is recorded, and this
  rank joins the later wave when the current wave ends.
- the next generation. The message is kept for the Waves of that generation, and shows that a rank
  has received the commit.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

from baton_protocol.topology import StartWave


class StepVote(NamedTuple):
    """A rank's vote before a step: integers that are sent to all ranks as one tensor."""

    #: Tokens of this rank in the step.
    num_tokens: int
    #: 1 if the rank has tokens for this or the next step, else 0. Requests that are paused or wait
    #: for a KV load do not count.
    has_work: int
    #: Result of `vote_for` for the generation to commit. 0: no generation to commit.
    commit: int = 0


class StepDecision(NamedTuple):
    """The decision that follows from the votes of a step, equal on all ranks."""

    #: Number of tokens in the step, by rank.
    num_tokens: tuple[int, ...]
    #: Whether the generation of this rank's vote is committed after this step.
    commit: bool


def vote_for(nonce: str) -> int:
    """Return the value of `StepVote.commit` for the generation with this nonce. Never 0."""
    return zlib.crc32(nonce.encode()) + 1


class Waves:
    """State machine of the waves of one generation on one rank.

    A wave is a period in which all ranks step together.
    """

    def __init__(self, generation: int, nonce: str) -> None:
        self.generation = generation
        self.nonce = nonce
        #: Number of the current wave. Outside a wave: number of the next wave.
        self.wave = 0
        self.running = False
        #: Highest wave number in a received StartWave; -1 before the first one.
        self._awaited = -1

    def begin(self) -> StartWave:
        """Start a wave, and return the StartWave to send.

        Call this method if this rank has work or must vote.
        """
        assert not self.running, "the wave is already running"
        self.running = True
        return StartWave(self.generation, self.nonce, self.wave)

    def on_start(self, start: StartWave) -> None:
        """Join a wave that another rank has started. Ignore a StartWave of another generation."""
        if (start.generation, start.nonce) != (self.generation, self.nonce):
            return
        self._awaited = max(self._awaited, start.wave)
        self._join()

    def decide(self, votes: Sequence[StepVote]) -> StepDecision:
        """Return the decision for the step that was voted on. End the wave if no rank has work.

        Args:
            votes: the votes of all ranks, in rank order.
        """
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
