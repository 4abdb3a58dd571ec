"""Takes memory from running requests when others need it more, and gives it back.

The last in order loses first. By recompute: its blocks are freed, and it queues again with the tokens it has. By swap: its blocks
move to host memory; samples of one prompt that run are swapped together, for they share blocks, and so are the beams of a search
(section 4.5 of Kwon et al. 2023, PagedAttention). Whoever was swapped out comes back before anybody new is admitted.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from baton_engine.kv_cache.manager import KVCacheManager
from baton_engine.scheduling.decisions import Preempted, SwappedIn, SwappedOut
from baton_engine.scheduling.queues import RequestQueue, RunningRequests
from baton_engine.scheduling.request import Order, Request, RequestStatus

PREEMPTION_MODES = ("auto", "recompute", "swap")


class Preemptor:
    def __init__(
        self,
        mode: str,
        kv: KVCacheManager,
        running: RunningRequests,
        loaded: RequestQueue,
        *,
        max_num_seqs: int,
        can_swap: bool,
    ) -> None:
        if mode not in PREEMPTION_MODES:
            raise ValueError(f"scheduler.preemption_mode must be one of {', '.join(PREEMPTION_MODES)}, got {mode!r}")
        self._mode = mode if can_swap else "recompute"
        self._kv = kv
        self._running = running
        self._loaded = loaded
        self._max_num_seqs = max_num_seqs
        #: Requests that were swapped out together, in order; an entry is never empty.
        self.swapped: list[list[Request]] = []

    @property
    def num_swapped(self) -> int:
        return sum(map(len, self.swapped))

    def find_victim(self, index: int) -> Request | None:
        """The last running request that may lose its blocks, from place `index` on: those before it are in the step already.

        A peer may read the blocks of a PRODUCE request at any time: it is not preempted.
        """
        in_order = self._running.in_order
        for position in range(len(in_order) - 1, index - 1, -1):
            if not in_order[position].produces:
                return in_order[position]
        return None

    def find_loaded_victim(self, beneficiary: Request) -> Request | None:
        """The last loaded request, if it is behind `beneficiary`.

        Such a request holds memory without running. If it waits for the place that `beneficiary` has, neither would go on.
        """
        victim = max(self._loaded, key=_order, default=None)
        return victim if victim is not None and victim.order > beneficiary.order else None

    def preempt(self, victim: Request, *, beneficiary: Request) -> Preempted | SwappedOut:
        """Takes the victim's blocks, and with swapping those of its whole group, unless `beneficiary` is of that group."""
        if victim.group is None or victim.group is not beneficiary.group:
            members = [victim]
            if victim.group is not None:
                members = sorted(
                    (member for member in victim.group.members.values() if member.status is RequestStatus.RUNNING),
                    key=_order,
                )
            if self._wants_swap(members):
                copies = self._kv.swap_out([sequence for member in members for sequence in member.sequences])
                if copies is not None:
                    bisect.insort(self.swapped, members, key=lambda unit: unit[0].order)
                    return SwappedOut(members, copies)
        return Preempted(victim)

    def take_swapped(self) -> list[Request]:
        """All swapped requests; they are swapped no more."""
        units, self.swapped = self.swapped, []
        return [request for unit in units for request in unit]

    def discard(self, request: Request) -> None:
        """A swapped request has ended."""
        for unit in self.swapped:
            if request in unit:
                unit.remove(request)
                if not unit:
                    self.swapped.remove(unit)
                return

    def resume(self) -> Iterator[SwappedIn]:
        """Brings swapped requests back, in order, while places and memory last.

        Each decision is to be applied before the next is asked for.
        """
        while self.swapped:
            unit = self.swapped[0]
            sequences = [sequence for request in unit for sequence in request.sequences]
            num_seqs = sum(request.max_seqs for request in unit)
            if any(sequence.num_in_flight for sequence in sequences):
                return
            if self._running.num_seqs + num_seqs > self._max_num_seqs:
                return
            # Room to grow, or they would be the next ones to be swapped out: also if they are alone, for transfers hold memory.
            if len(self._running):
                keep_free = self._kv.watermark_blocks + num_seqs
            else:
                num_blocks = len({block.block_id for sequence in sequences for block in sequence.swapped_blocks})
                keep_free = min(num_seqs, self._kv.pool.num_blocks - num_blocks)
            copies = self._kv.swap_in(sequences, keep_free=keep_free)
            if copies is None:
                return
            del self.swapped[0]
            yield SwappedIn(unit, copies)

    def _wants_swap(self, members: list[Request]) -> bool:
        if self._mode == "auto":
            return sum(len(member.sequences) for member in members) > 1
        return self._mode == "swap"


def _order(request: Request) -> Order:
    return request.order
