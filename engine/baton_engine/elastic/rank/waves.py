"""When the ranks of a generation step together: a wave. One machine per rank, without sockets or clocks.

Experts are spread over the ranks, so inside a wave all of them take every step, with or without tokens of their own. Before a step
each tells the others its StepVote, in one exchange; what follows from the votes is the same everywhere, because it is a function
of nothing else:

    the wave ends with this step     nobody has work
    the next generation is adopted   after this step, if all vote for the same one

Outside a wave nobody exchanges anything. Whoever gets work begins the next wave and tells the others so (StartWave), who join it.
A StartWave of a wave that has ended is late and means nothing: its sender has taken part in the end of that wave. One of a wave
to come is kept: its sender saw the end of this wave before this rank did. One of the next generation is for its own Waves: who
is to adopt it keeps it until then, and knows by it that somebody has been told to.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

from baton_protocol.topology import StartWave


class StepVote(NamedTuple):
    """What a rank tells the others before a step. Integers, for they travel in one tensor."""

    num_tokens: int
    """That it runs in this step."""
    has_work: int
    """1: it runs tokens now, or could run some in the next step. Requests that are paused or wait for a transfer are no work."""
    commit: int = 0
    """`vote_for` the generation it is told to adopt; 0: none."""


class StepDecision(NamedTuple):
    num_tokens: tuple[int, ...]
    """By rank."""
    wave_ends: bool
    commit: bool
    """The generation that this rank voted for is adopted after this step."""


def vote_for(nonce: str) -> int:
    """Of the generation with this nonce; never 0."""
    return zlib.crc32(nonce.encode()) + 1


class Waves:
    """Those of one generation, as one rank sees them."""

    def __init__(self, generation: int, nonce: str) -> None:
        self.generation = generation
        self.nonce = nonce
        self.wave = 0
        """The running one, or the next."""
        self.running = False
        self._awaited = -1
        """The latest wave that somebody was seen to begin."""

    def begin(self) -> StartWave:
        """This rank has work, or wants a vote, outside a wave. Returns what to tell the others."""
        assert not self.running, "the wave runs already"
        self.running = True
        return StartWave(self.generation, self.nonce, self.wave)

    def on_start(self, start: StartWave) -> None:
        """Another rank has begun a wave. Those of another generation are not for this machine."""
        if (start.generation, start.nonce) != (self.generation, self.nonce):
            return
        self._awaited = max(self._awaited, start.wave)
        self._join()

    def decide(self, votes: Sequence[StepVote]) -> StepDecision:
        """Before a step of the wave, with the votes of all ranks, in rank order."""
        assert self.running, "votes are exchanged inside waves only"
        commit = votes[0].commit != 0 and all(vote.commit == votes[0].commit for vote in votes)
        wave_ends = not any(vote.has_work for vote in votes)
        if wave_ends:
            self.wave += 1
            self.running = False
            self._join()
        return StepDecision(tuple(vote.num_tokens for vote in votes), wave_ends, commit)

    def _join(self) -> None:
        if self._awaited >= self.wave:
            self.running = True
