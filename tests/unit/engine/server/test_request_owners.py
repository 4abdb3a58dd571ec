"""The owners of requests: only they end requests and get outputs."""

from __future__ import annotations

import queue

from baton_engine.server.engine_io import Abort
from baton_engine.server.request_owners import RequestOwners
from baton_protocol.engine_messages import EngineCoreOutput, FinishReason


def two_clients() -> tuple[RequestOwners, queue.SimpleQueue[Abort]]:
    aborts: queue.SimpleQueue[Abort] = queue.SimpleQueue()
    owners = RequestOwners(aborts)
    owners.add("a1", b"a")
    owners.add("a2", b"a")
    owners.add("b1", b"b")
    return owners, aborts


def test_a_client_aborts_its_own_requests_and_ended_ones_only() -> None:
    owners, aborts = two_clients()
    some, every = Abort(b"a", ["a1", "b1", "ended"]), Abort(b"a", None)
    for abort in (some, every):
        aborts.put(abort)
    assert owners.ids_to_abort(some) == ["a1", "ended"]
    assert owners.ids_to_abort(every) == ["a1", "a2"]


def test_an_abort_that_was_taken_during_a_step_is_not_taken_again() -> None:
    owners, aborts = two_clients()
    first, second = Abort(b"a", ["a1"]), Abort(b"b", ["b1"])
    for abort in (first, second):
        aborts.put(abort)
    assert owners.take_aborts() == ["a1", "b1"]
    assert owners.ids_to_abort(first) == ["a1"]  # reads nothing from the empty queue
    assert owners.take_aborts() == []


def test_outputs_go_to_the_owner_until_the_request_has_ended() -> None:
    owners, _ = two_clients()
    token = EngineCoreOutput("a1", [7])
    last = EngineCoreOutput("a1", [8], finish_reason=FinishReason.LENGTH)
    other = EngineCoreOutput("b1", [9])
    assert dict(owners.group_by_client([token, other, last])) == {
        b"a": [token, last],
        b"b": [other],
    }
    assert dict(owners.group_by_client([token])) == {}
    assert owners.may_act_on("a1", b"b")
    assert not owners.may_act_on("a2", b"b")
