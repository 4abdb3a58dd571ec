"""Collections of waiting, swapped and running requests, each sorted by `Request.order`."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator

from baton_engine.scheduling.request import Order, Request

#: The heap is not rebuilt while it has fewer dead entries (of removed requests) than this number.
_MIN_DEAD = 64


class RequestQueue:
    """A priority queue of requests, sorted by `Request.order`.

    A removed request leaves a dead heap entry, which is dropped when it reaches the top of the
    heap, or when most entries are dead.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Order, Request]] = []
        self._members: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return self._members.get(request.request_id) is request

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests, in no particular order."""
        return iter(list(self._members.values()))

    def push(self, request: Request) -> None:
        assert request.request_id not in self._members
        self._members[request.request_id] = request
        heapq.heappush(self._heap, (request.order, request))

    def peek(self) -> Request | None:
        """Return the first request without removing it, or None if the queue is empty."""
        while self._heap and self._heap[0][1] not in self:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def first_before(self, request: Request) -> Request | None:
        """Return the first queued request if it precedes `request` in order, else None."""
        first = self.peek()
        return first if first is not None and first.order < request.order else None

    def discard(self, request: Request) -> None:
        """Remove `request` from any position. Do nothing if `request` is not queued."""
        if request in self:
            del self._members[request.request_id]
            if len(self._heap) > 2 * len(self._members) + _MIN_DEAD:
                # While the first request waits, the dead entries behind it do not reach the top.
                self._heap = [(member.order, member) for member in self._members.values()]
                heapq.heapify(self._heap)


class WaitingRequests:
    """The queues of requests that wait for remote KV, for memory or for a place in the batch.

    Other classes hold the requests that wait for a grammar, for the prompt of their `SampleGroup`
    or for their steps in flight.
    """

    def __init__(self) -> None:
        self.waiting = RequestQueue()
        #: Requests whose KV was loaded from a peer. They hold all memory that they need to start,
        #: so they precede `waiting`. In one queue with them, a request could wait for memory that a
        #: loaded request behind it holds.
        self.loaded = RequestQueue()
        #: Requests that will load their KV from a peer and have no blocks yet. A request moves to
        #: `loading` when it gets blocks. Requests in `loading` do not delay other requests.
        self.waiting_to_load = RequestQueue()
        self.loading: dict[str, Request] = {}

    def discard(self, request: Request) -> None:
        """Remove a request that has ended from all queues."""
        self.waiting.discard(request)
        self.loaded.discard(request)
        self.waiting_to_load.discard(request)
        self.loading.pop(request.request_id, None)

    @property
    def num_without_memory(self) -> int:
        """Number of requests in these queues that hold no KV blocks."""
        return len(self.waiting) + len(self.waiting_to_load)


class SwappedRequests:
    """Requests whose KV is in host memory. A unit is a list of requests swapped out together."""

    def __init__(self) -> None:
        #: Sorted by the order of the first request of each unit. No unit is empty.
        self._units: list[list[Request]] = []

    def __len__(self) -> int:
        return sum(map(len, self._units))

    def add(self, unit: list[Request]) -> None:
        bisect.insort(self._units, unit, key=lambda unit: unit[0].order)

    def first(self) -> list[Request] | None:
        """Return the unit to resume next, or None if no request is swapped."""
        return self._units[0] if self._units else None

    def remove(self, unit: list[Request]) -> None:
        self._units.remove(unit)

    def discard(self, request: Request) -> None:
        """Remove `request` from its unit. Do nothing if `request` is not swapped."""
        for unit in self._units:
            if request in unit:
                unit.remove(request)
                if not unit:
                    self._units.remove(unit)
                return

    def take_all(self) -> list[Request]:
        """Remove and return all swapped requests, in the order in which they would resume."""
        units, self._units = self._units, []
        return [request for unit in units for request in unit]


class RunningRequests:
    """Requests that have a place in the batch, always sorted by `Request.order`."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        #: Only this class changes the list. The last request is preempted first.
        self.in_order: list[Request] = []
        #: Places taken in the worker's batch. A beam search takes `beam_width` places.
        self.num_seqs = 0

    def __len__(self) -> int:
        return len(self.in_order)

    def values(self) -> list[Request]:
        """Return a copy of the list of requests, in order."""
        return list(self.in_order)

    def has_places(self, num_seqs: int) -> bool:
        """Return whether the batch has places for `num_seqs` more sequences."""
        return self.num_seqs + num_seqs <= self._max_num_seqs

    def add(self, request: Request) -> None:
        bisect.insort(self.in_order, request, key=by_order)
        self.num_seqs += request.max_seqs

    def discard(self, request: Request) -> None:
        """Remove `request`. Do nothing if `request` is not running."""
        index = bisect.bisect_left(self.in_order, request.order, key=by_order)
        if index < len(self.in_order) and self.in_order[index] is request:
            del self.in_order[index]
            self.num_seqs -= request.max_seqs


def by_order(request: Request) -> Order:
    return request.order
