"""Places of requests: heaps of waiting ones, sorted lists of swapped and running ones."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator

from baton_engine.scheduling.request import Order, Request

#: Dead heap entries below which the heap is not rebuilt.
_MIN_DEAD = 64


class RequestQueue:
    """Requests by `order`.

    Removal from the middle is lazy: the heap entry is dropped when it surfaces, or when most
    entries are dead.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Order, Request]] = []
        self._members: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return self._members.get(request.request_id) is request

    def __iter__(self) -> Iterator[Request]:
        """Iterate in no particular order."""
        return iter(list(self._members.values()))

    def push(self, request: Request) -> None:
        assert request.request_id not in self._members
        self._members[request.request_id] = request
        heapq.heappush(self._heap, (request.order, request))

    def peek(self) -> Request | None:
        """Return the first request, or None."""
        while self._heap and self._heap[0][1] not in self:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def first_before(self, request: Request) -> Request | None:
        """Return the first request if it precedes `request`."""
        first = self.peek()
        return first if first is not None and first.order < request.order else None

    def discard(self, request: Request) -> None:
        """Remove `request` from any position, if it is queued."""
        if request in self:
            del self._members[request.request_id]
            if len(self._heap) > 2 * len(self._members) + _MIN_DEAD:
                # While the first request waits, no dead entry behind it would surface.
                self._heap = [(member.order, member) for member in self._members.values()]
                heapq.heapify(self._heap)


class WaitingRequests:
    """The queues for memory and a place in the batch.

    Requests that wait for a grammar, their group's prompt or steps in flight are not here.
    """

    def __init__(self) -> None:
        self.waiting = RequestQueue()
        #: CONSUME requests whose blocks are loaded. They hold all memory they need to start, so
        #: they precede `waiting`. If they queued behind a request that waits for memory, they would
        #: hold the memory that it waits for.
        self.loaded = RequestQueue()
        #: CONSUME requests without blocks. Once they have blocks, they are in `loading`, where they
        #: do not delay other requests.
        self.waiting_to_load = RequestQueue()
        self.loading: dict[str, Request] = {}

    def discard(self, request: Request) -> None:
        """Drop a request that has ended."""
        self.waiting.discard(request)
        self.loaded.discard(request)
        self.waiting_to_load.discard(request)
        self.loading.pop(request.request_id, None)

    @property
    def num_without_memory(self) -> int:
        return len(self.waiting) + len(self.waiting_to_load)


class SwappedRequests:
    """Requests whose KV is in host memory, in units that were swapped out together."""

    def __init__(self) -> None:
        #: By the order of their first request. No unit is empty.
        self._units: list[list[Request]] = []

    def __len__(self) -> int:
        return sum(map(len, self._units))

    def add(self, unit: list[Request]) -> None:
        bisect.insort(self._units, unit, key=lambda unit: unit[0].order)

    def first(self) -> list[Request] | None:
        """Return the unit that is resumed first, or None."""
        return self._units[0] if self._units else None

    def remove(self, unit: list[Request]) -> None:
        self._units.remove(unit)

    def discard(self, request: Request) -> None:
        """Remove `request`, if it is swapped."""
        for unit in self._units:
            if request in unit:
                unit.remove(request)
                if not unit:
                    self._units.remove(unit)
                return

    def take_all(self) -> list[Request]:
        """Remove and return all requests, in order."""
        units, self._units = self._units, []
        return [request for unit in units for request in unit]


class RunningRequests:
    """Requests with a place in the batch, always sorted by `order`, so that steps need not sort."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        #: Read-only for others. The tail is preempted first.
        self.in_order: list[Request] = []
        #: Places taken in the worker's batch. A beam search takes one for each possible beam.
        self.num_seqs = 0

    def __len__(self) -> int:
        return len(self.in_order)

    def values(self) -> list[Request]:
        """Return the requests in order."""
        return list(self.in_order)

    def has_places(self, num_seqs: int) -> bool:
        """Return whether the batch has places for this many sequences."""
        return self.num_seqs + num_seqs <= self._max_num_seqs

    def add(self, request: Request) -> None:
        bisect.insort(self.in_order, request, key=by_order)
        self.num_seqs += request.max_seqs

    def discard(self, request: Request) -> None:
        """Remove `request`, if it is running."""
        index = bisect.bisect_left(self.in_order, request.order, key=by_order)
        if index < len(self.in_order) and self.in_order[index] is request:
            del self.in_order[index]
            self.num_seqs -= request.max_seqs


def by_order(request: Request) -> Order:
    return request.order
