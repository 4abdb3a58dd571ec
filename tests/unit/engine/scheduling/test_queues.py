"""The queues of requests: their order, and requests that are removed from any position."""

from __future__ import annotations

import random

from baton_engine.scheduling.queues import RequestQueue, RunningRequests, SwappedRequests
from baton_engine.scheduling.request import Request
from baton_protocol.engine_messages import EngineCoreRequest
from baton_protocol.sampling_params import SamplingParams


def new_request(name: str, priority: int = 0) -> Request:
    return Request(EngineCoreRequest(name, [1], SamplingParams(), priority=priority))


def test_a_queue_returns_requests_by_order_for_any_pushes_and_removals() -> None:
    draw = random.Random(0)
    queue, members = RequestQueue(), {}
    for number in range(2000):
        if members and draw.random() < 0.45:
            request = draw.choice(list(members.values()))
            del members[request.request_id]
            queue.discard(request)
            queue.discard(request)
            assert request not in queue
        else:
            request = new_request(str(number), draw.randrange(5))
            members[request.request_id] = request
            queue.push(request)
        assert len(queue) == len(members)
        assert queue.peek() is min(members.values(), key=lambda each: each.order, default=None)


def test_removed_requests_do_not_fill_a_queue_whose_first_request_waits() -> None:
    queue = RequestQueue()
    queue.push(new_request("first", priority=-1))
    for number in range(1000):
        request = new_request(str(number))
        queue.push(request)
        queue.discard(request)
    assert len(queue._heap) < 100


def test_a_queued_request_precedes_only_later_ones() -> None:
    early, queued, late = (new_request(name) for name in "abc")
    queue = RequestQueue()
    queue.push(queued)
    assert queue.first_before(late) is queued
    assert queue.first_before(early) is None


def test_swapped_units_resume_in_order_and_lose_their_aborted_requests() -> None:
    a, b, c = (new_request(name) for name in "abc")
    swapped = SwappedRequests()
    swapped.add([c])
    swapped.add([a, b])
    assert swapped.first() == [a, b]
    swapped.discard(a)
    assert (swapped.first(), len(swapped)) == ([b], 2)
    swapped.discard(b)
    assert swapped.take_all() == [c]
    assert swapped.first() is None


def test_running_requests_are_in_order_and_take_their_places() -> None:
    late, early = new_request("late", priority=1), new_request("early")
    running = RunningRequests(max_num_seqs=2)
    running.add(late)
    running.add(early)
    assert running.in_order == [early, late]
    assert not running.has_places(1)
    running.discard(new_request("other"))
    running.discard(early)
    assert running.in_order == [late]
    assert running.has_places(1)
    assert not running.has_places(2)
