"""Control group: the engine cores of a generation exchange votes before each step, on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from baton_engine.distributed.group import Group
from baton_engine.distributed.process_group import join_generation
from baton_engine.elastic.rank.waves import StepVote
from baton_protocol.topology import Generation, Member, StartWave

CPU = torch.device("cpu")


class ControlGroup(Protocol):
    """The engine cores of one generation."""

    def exchange(self, vote: StepVote) -> list[StepVote]:
        """Exchange votes. Collective.

        Returns:
            The votes of all ranks, in rank order.

        Raises:
            GroupBrokenError: a member is gone, or `abort` was called.
            TimeoutError: a member does not answer.
        """

    def abort(self) -> None:
        """Fail all current and later exchanges at once. Callable from any thread. Idempotent."""

    def close(self) -> None:
        """Close the connections. Idempotent."""


class WaveCalls(Protocol):
    """Announces waves to the other ranks. Implemented by `RankLink`."""

    def set_peers(self, members: Sequence[Member]) -> None: ...

    def start_wave(self, start: StartWave) -> None:
        """Send a StartWave to all peers, and repeat it until `end_start`."""

    def end_start(self) -> None: ...


class VoteGroup:
    """A control group over a `Group`, whose exchanges run in a thread of their own.

    The main thread can handle signals while it waits.
    """

    def __init__(self, group: Group, name: str) -> None:
        self._group = group
        self._name = name
        self._lock = threading.Condition()
        self._next: tuple[StepVote, Future[list[StepVote]]] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def exchange(self, vote: StepVote) -> list[StepVote]:
        votes: Future[list[StepVote]] = Future()
        with self._lock:
            self._next = (vote, votes)
            self._lock.notify()
        return votes.result()

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._closed or self._next is not None)
                if self._next is None:
                    break
                (vote, votes), self._next = self._next, None
            try:
                # [ranks, 3]
                rows = self._group.all_gather(torch.tensor([vote], dtype=torch.int64), 0)
                votes.set_result([StepVote(*row) for row in rows.tolist()])
            except Exception as error:
                votes.set_exception(error)
        self._group.close()


def join_control_group(
    generation: Generation,
    rank: int,
    *,
    join_timeout_s: float,
    timeout_s: float,
    secret: bytes,
) -> ControlGroup:
    """Join the control group of a generation through the generation's store.

    Args:
        timeout_s: limit of an exchange. It must exceed the longest step of any member.
        secret: secret of the store.

    Raises:
        TimeoutError: the store does not answer, or a member did not join.
        GroupBrokenError: a member joined and is gone.
    """
    group = join_generation(
        "control", generation, rank, CPU, timeout_s, join_timeout_s=join_timeout_s, secret=secret
    )
    return VoteGroup(group, f"control-{generation.number}")
