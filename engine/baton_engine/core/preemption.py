"""Takes memory from running requests when others need it more, and gives it back.

The last in order loses first. By recompute: its blocks are freed, and it queues again with the tokens it has. By swap: its blocks
move to host memory; samples of one prompt that run are swapped together, for they share blocks, and so are the beams of a search
(section 4.5 of Kwon et al. 2023, PagedAttention). Whoever was swapped out comes back before anybody new is admitted.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

from baton_engine.core.beam_group import BeamSearches
from baton_engine.core.kv_cache_manager import KVCacheManager
from baton_engine.core.request import Order, Request, RequestStatus
from baton_engine.core.request_outputs import RequestOutputs
from baton_engine.core.request_queue import RequestQueue, RunningRequests
from baton_engine.core.stats import EngineStats
from baton_engine.core.step_builder import StepBuilder
from baton_engine.core.worker_mirror import WorkerMirror
from baton_engine.protocol.messages import EngineCoreEventType

PREEMPTION_MODES = ("auto", "recompute", "swap")


class Preemptor:
    def __init__(
        self,
        mode: str,
        kv: KVCacheManager,
        running: RunningRequests,
        loaded: RequestQueue,
        outputs: RequestOutputs,
        counters: EngineStats,
        worker: WorkerMirror,
        beams: BeamSearches,
        *,
        requeue: Callable[[Request], None],
        max_num_seqs: int,
        can_swap: bool,
    ) -> None:
        """
        Args:
            requeue: lets a request that lost its KV queue again.
        """
        if mode not in PREEMPTION_MODES:
            raise ValueError(f"scheduler.preemption_mode must be one of {', '.join(PREEMPTION_MODES)}, got {mode!r}")
        self._mode = mode if can_swap else "recompute"
        self._kv = kv
        self._running = running
        self._loaded = loaded
        self._outputs = outputs
        self._counters = counters
        self._worker = worker
        self._beams = beams
        self._requeue = requeue
        self._max_num_seqs = max_num_seqs
        self.swapped: list[list[Request]] = []
        """Requests that were swapped out together, in order; an entry is never empty."""

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

    def preempt(self, victim: Request, step: StepBuilder, *, beneficiary: Request) -> None:
        """Takes the victim's blocks, and with swapping those of its whole group, unless `beneficiary` is of that group."""
        if victim.group is None or victim.group is not beneficiary.group:
            members = [victim]
            if victim.group is not None:
                members = sorted(
                    (member for member in victim.group.members.values() if member.status is RequestStatus.RUNNING),
                    key=_order,
                )
            if self._wants_swap(members) and self._swap_out(members, step):
                return
        self.recompute(victim)
        step.num_preempted += 1

    def take_from_loaded(self, beneficiary: Request, step: StepBuilder) -> bool:
        """Takes the blocks of the last loaded request behind `beneficiary`; False if there is none.

        Such a request holds memory without running. If it waits for the place that `beneficiary` has, neither would go on.
        """
        victim = max(self._loaded, key=_order, default=None)
        if victim is None or victim.order < beneficiary.order:
            return False
        self.requeue_loaded(victim)
        step.num_preempted += 1
        return True

    def requeue_loaded(self, request: Request) -> None:
        """A request whose KV came from a peer loses it, and queues like any other."""
        self._loaded.discard(request)
        self.drop_kv(request)
        self._count(request)
        self._requeue(request)

    def recompute(self, request: Request) -> None:
        """A running request loses its KV and queues again."""
        self._running.discard(request)
        if request.beams is not None:
            self._beams.count_blocks_wanted(request)
            self._beams.restart(request)
        self.drop_kv(request)
        self._count(request)
        self._requeue(request)

    def recompute_swapped(self) -> None:
        """All swapped requests lose their KV and queue again."""
        units, self.swapped = self.swapped, []
        for request in (request for unit in units for request in unit):
            if request.beams is not None:
                self._beams.restart(request)
            self.drop_kv(request)
            self._requeue(request)

    def drop_kv(self, request: Request) -> None:
        """Frees the request's blocks, wherever they are: it will be computed again."""
        self._kv.free(request)
        request.num_computed_tokens = 0
        self._worker.forget(request)

    def discard(self, request: Request) -> None:
        """A swapped request has ended."""
        for unit in self.swapped:
            if request in unit:
                unit.remove(request)
                if not unit:
                    self.swapped.remove(unit)
                return

    def resume(self, step: StepBuilder) -> list[Request]:
        """Brings swapped requests back, in order, while places and memory last. They run from the next step on."""
        resumed: list[Request] = []
        while self.swapped:
            unit = self.swapped[0]
            sequences = [sequence for request in unit for sequence in request.sequences]
            num_seqs = sum(request.max_seqs for request in unit)
            if any(sequence.num_in_flight for sequence in sequences):
                break
            if self._running.num_seqs + num_seqs > self._max_num_seqs:
                break
            # Room to grow, or they would be the next ones to be swapped out: also if they are alone, for transfers hold memory.
            if len(self._running):
                keep_free = self._kv.watermark_blocks + num_seqs
            else:
                num_blocks = len({block.block_id for sequence in sequences for block in sequence.swapped_blocks})
                keep_free = min(num_seqs, self._kv.pool.num_blocks - num_blocks)
            copies = self._kv.swap_in(sequences, keep_free=keep_free)
            if copies is None:
                break
            del self.swapped[0]
            step.output.swap_in += copies
            self._counters.num_swapped_in_blocks += len(copies)
            for sequence in sequences:
                sequence.status = RequestStatus.RUNNING
            for request in unit:
                request.status = RequestStatus.RUNNING
                self._running.add(request)
                self._outputs.event(request, EngineCoreEventType.SCHEDULED)
            resumed += unit
        return resumed

    def _wants_swap(self, members: list[Request]) -> bool:
        if self._mode == "auto":
            return sum(len(member.sequences) for member in members) > 1
        return self._mode == "swap"

    def _swap_out(self, members: list[Request], step: StepBuilder) -> bool:
        sequences = [sequence for member in members for sequence in member.sequences]
        copies = self._kv.swap_out(sequences)
        if copies is None:
            return False
        step.output.swap_out += copies
        self._counters.num_swapped_out_blocks += len(copies)
        for sequence in sequences:
            sequence.status = RequestStatus.SWAPPED
            sequence.num_preemptions += sequence.root is not None
            self._worker.forget(sequence)
        for member in members:
            self._running.discard(member)
            member.status = RequestStatus.SWAPPED
            self._count(member)
        bisect.insort(self.swapped, members, key=lambda unit: unit[0].order)
        step.num_preempted += len(members)
        return True

    def _count(self, request: Request) -> None:
        request.num_preemptions += 1
        self._counters.num_preemptions += 1
        self._outputs.event(request, EngineCoreEventType.PREEMPTED)


def _order(request: Request) -> Order:
    return request.order
