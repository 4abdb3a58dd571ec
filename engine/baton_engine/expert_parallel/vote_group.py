"""The vote group, in which the ranks of a generation exchange votes before each step."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from baton_engine.distributed.group import Group
from baton_engine.distributed.process_group import join_generation
from baton_engine.elastic.rank.waves import StepVote
from baton_protocol.topology import Generation, StartWave, TopologyMember

CPU = torch.device("cpu")


class VoteGroup:
    """A CPU process group in which the engine cores of one generation exchange votes.

    Exchanges run in a separate thread, so that the waiting main thread can handle signals.
    """

    def __init__(self, group: Group, name: str) -> None:
        self._group = group
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def exchange(self, vote: StepVote) -> list[StepVote]:
        """Send this rank's vote to all ranks, and return the votes of all ranks in rank order.

        All ranks must call this method.

        Raises:
            GroupBrokenError: a member is gone, or `abort` was called.
            TimeoutError: a member does not respond.
        """
        return self._thread.submit(self._exchange, vote).result()

    def abort(self) -> None:
        """Make all current and later exchanges fail at once. Thread-safe and idempotent."""
        self._group.abort()

    def close(self) -> None:
        """Close the connections after the current exchange. Idempotent."""
        with contextlib.suppress(RuntimeError):  # it is closed
            self._thread.submit(self._group.close)
        self._thread.shutdown(wait=False)

    def _exchange(self, vote: StepVote) -> list[StepVote]:
        # [ranks, 3]
        rows = self._group.all_gather(torch.tensor([vote], dtype=torch.int64), 0)
        return [StepVote(*row) for row in rows.tolist()]


class WaveSender(Protocol):
    """Sends the start of a wave to the other ranks. Implemented by `RankLink`.

    A wave is a period in which all ranks step together.
    """

    def set_peers(self, members: Sequence[TopologyMember]) -> None: ...

    def start_wave(self, start: StartWave) -> None:
        """Send a StartWave to all peers, and repeat it until `end_start` is called."""

    def end_start(self) -> None: ...


def join_vote_group(
    generation: Generation,
    rank: int,
    *,
    join_timeout_s: float,
    timeout_s: float,
    secret: bytes,
) -> VoteGroup:
    """Join the vote group of a generation.

    The members find each other through the store whose address is in `generation`.

    Args:
        generation: the generation to join.
        rank: this engine's rank in the generation.
        join_timeout_s: timeout of the join.
        timeout_s: timeout of an exchange. It must exceed the longest step of any member.
        secret: secret that all clients of the store and its server must have.

    Raises:
        TimeoutError: the store does not respond, or a member did not join.
        GroupBrokenError: a member joined, but has ended or disconnected.
    """
    # "control" is the group's name in the store. Ranks of earlier builds also join by this name.
    group = join_generation(
        "control", generation, rank, CPU, timeout_s, join_timeout_s=join_timeout_s, secret=secret
    )
    return VoteGroup(group, f"votes-{generation.number}")
