"""Where requests stand: waiting ones in heaps, running ones in a sorted list."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator

from baton_engine.scheduling.request import Order, Request

#: Dead heap entries that are never worth the work of taking them out.
_MIN_DEAD = 64


class RequestQueue:
    """Requests by `order`. Removal from the middle is lazy: the heap entry dies when it surfaces, or when most are dead."""

    def __init__(self) -> None:
        self._heap: list[tuple[Order, Request]] = []
        self._members: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return self._members.get(request.request_id) is request

    def __iter__(self) -> Iterator[Request]:
        """In no particular order."""
        return iter(list(self._members.values()))

    def push(self, request: Request) -> None:
        assert request.request_id not in self._members
        self._members[request.request_id] = request
        heapq.heappush(self._heap, (request.order, request))

    def peek(self) -> Request | None:
        """The first request, or None."""
        while self._heap and self._heap[0][1] not in self:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def first_before(self, request: Request) -> Request | None:
        """The first request, if it precedes `request`."""
        first = self.peek()
        return first if first is not None and first.order < request.order else None

    def pop(self) -> Request:
        """Takes the first request. Raises IndexError if there is none."""
        request = self.peek()
        if request is None:
            raise IndexError("queue is empty")
        heapq.heappop(self._heap)
        del self._members[request.request_id]
        return request

    def discard(self, request: Request) -> None:
        """Takes `request` out, wherever it stands, if it is in."""
        if request in self:
            del self._members[request.request_id]
            if len(self._heap) > 2 * len(self._members) + _MIN_DEAD:
                # Behind a first one that waits for long, nothing would ever surface.
                self._heap = [(member.order, member) for member in self._members.values()]
                heapq.heapify(self._heap)


class WaitingRequests:
    """The queues for memory and a place in the batch. Requests that wait for anything else are not in them."""

    def __init__(self) -> None:
        self.waiting = RequestQueue()
        #: CONSUME requests whose blocks came. They hold all the memory they need to start, so they
        #: go before `waiting`: behind a request that waits for memory they would keep it from
        #: coming free.
        self.loaded = RequestQueue()
        #: CONSUME requests without blocks yet. Those with blocks wait in `loading`, in nobody's
        #: way.
        self.waiting_to_load = RequestQueue()
        self.loading: dict[str, Request] = {}

    def discard(self, request: Request) -> None:
        """The request has ended."""
        self.waiting.discard(request)
        self.loaded.discard(request)
        self.waiting_to_load.discard(request)
        self.loading.pop(request.request_id, None)

    @property
    def num_without_memory(self) -> int:
        return len(self.waiting) + len(self.waiting_to_load)


class RunningRequests:
    """The requests that hold a place in the batch, always sorted by `order`: nothing is sorted in a step."""

    def __init__(self) -> None:
        #: To be read only; its tail is preempted first.
        self.in_order: list[Request] = []
        #: Places taken in the worker's batch: a beam search has taken as many as it may have beams.
        self.num_seqs = 0

    def __len__(self) -> int:
        return len(self.in_order)

    def __iter__(self) -> Iterator[str]:
        return (request.request_id for request in self.in_order)

    def values(self) -> list[Request]:
        """In order."""
        return list(self.in_order)

    def add(self, request: Request) -> None:
        bisect.insort(self.in_order, request, key=_order)
        self.num_seqs += request.max_seqs

    def discard(self, request: Request) -> None:
        """Takes `request` out, if it is in."""
        index = bisect.bisect_left(self.in_order, request.order, key=_order)
        if index < len(self.in_order) and self.in_order[index] is request:
            del self.in_order[index]
            self.num_seqs -= request.max_seqs


def _order(request: Request) -> Order:
    return request.order
