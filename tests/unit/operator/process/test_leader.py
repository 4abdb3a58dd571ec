"""Leader election: never two holders for any network and clocks within the bounds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kubernetes.aio import client

from baton_kube.client import KubeClient, KubeError, WritesForbiddenError
from baton_operator.kube.objects import Kube
from baton_operator.process.leader import Election, Elector, LeaseLostError, Record
from support.waiting import until

LEASE_S = 15.0
#: Clocks may run this much too fast or too slow.
DRIFT = 0.05


@dataclass(eq=False)
class Candidate:
    """One process with its clock and at most one write in flight."""

    rate: float
    offset: float
    election: Election = field(init=False)
    writing: tuple[Record, float] | None = None
    #: The server's response, which has not arrived yet.
    stored: Record | None = None
    refused: bool = False
    stopped: bool = False


class ElectionMachine(RuleBasedStateMachine):
    """Candidates with their own clocks. Reads and writes of the Lease are delayed or lost."""

    @initialize(
        rates=st.lists(st.floats(1 - DRIFT, 1 + DRIFT), min_size=2, max_size=3), data=st.data()
    )
    def begin(self, rates: list[float], data: st.DataObject) -> None:
        self.now = 0.0
        self.version = 0
        self.record: Record | None = None
        self.candidates = []
        for number, rate in enumerate(rates):
            candidate = Candidate(rate, data.draw(st.floats(0, 1e6)))
            candidate.election = Election(f"c{number}", LEASE_S, clock=self._clock(candidate))
            self.candidates.append(candidate)

    def _clock(self, candidate: Candidate) -> Any:
        return lambda: candidate.offset + candidate.rate * self.now

    def _one(self, data: st.DataObject) -> Candidate:
        return data.draw(st.sampled_from(self.candidates))

    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0, LEASE_S * (1 + 2 * DRIFT)]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(data=st.data())
    def it_freezes_or_resumes(self, data: st.DataObject) -> None:
        candidate = self._one(data)
        candidate.stopped = not candidate.stopped

    @rule(data=st.data())
    def it_is_answered_at_once(self, data: st.DataObject) -> None:
        candidate = self._one(data)
        if candidate.stopped or candidate.writing:
            return
        candidate.election.observe(self.record)
        self._send(candidate)
        if candidate.writing:
            self._store(candidate)
            self._answer(candidate, arrives=True)

    @rule(data=st.data())
    def it_reads(self, data: st.DataObject) -> None:
        candidate = self._one(data)
        if not candidate.stopped:
            candidate.election.observe(self.record)

    @rule(data=st.data())
    def it_sends_a_write(self, data: st.DataObject) -> None:
        self._send(self._one(data))

    def _send(self, candidate: Candidate) -> None:
        election = candidate.election
        if candidate.stopped or candidate.writing or not election.may_take():
            return
        seen = election.seen
        record = Record(
            holder=election.identity,
            duration_s=LEASE_S,
            renewed=str(self.now),
            version=_version(seen),
        )
        candidate.writing, candidate.stored, candidate.refused = (
            (record, election.now()),
            None,
            False,
        )

    @rule(data=st.data())
    def the_server_gets_it(self, data: st.DataObject) -> None:
        self._store(self._one(data))

    def _store(self, candidate: Candidate) -> None:
        if not candidate.writing or candidate.stored or candidate.refused:
            return
        record, _ = candidate.writing
        if record.version != _version(self.record):
            candidate.refused = True
            return
        self.version += 1
        self.record = candidate.stored = msgspec.structs.replace(record, version=str(self.version))

    @rule(data=st.data(), arrives=st.sampled_from([True, True, True, False]))
    def its_answer_comes(self, data: st.DataObject, arrives: bool) -> None:
        self._answer(self._one(data), arrives)

    def _answer(self, candidate: Candidate, arrives: bool) -> None:
        if candidate.stopped or not candidate.writing:
            return
        if arrives and candidate.stored:
            candidate.election.record_write(candidate.stored, candidate.writing[1])
        if candidate.stored or candidate.refused or not arrives:
            candidate.writing = candidate.stored = None

    @precondition(lambda self: hasattr(self, "candidates"))
    @invariant()
    def at_most_one_believes(self) -> None:
        believing = [c.election.identity for c in self.candidates if c.election.held_s > 0]
        assert len(believing) <= 1, f"{believing} at {self.now}"

    @precondition(lambda self: hasattr(self, "candidates"))
    @invariant()
    def no_write_outlives_the_lease(self) -> None:
        for candidate in self.candidates:
            if candidate.election.held_s > 0:
                others = [c for c in self.candidates if c is not candidate and not c.stopped]
                at = self.now + candidate.election.write_timeout_s / candidate.rate
                for other in others:
                    seen = other.election.seen
                    if (
                        seen is not None
                        and seen.holder == candidate.election.identity
                        and seen == self.record
                    ):
                        then = other.offset + other.rate * at
                        assert then <= other.election._seen_at + seen.duration_s, (
                            "another candidate may hold the Lease"
                        )


def _version(record: Record | None) -> str:
    return record.version if record else ""


TestElection = ElectionMachine.TestCase
TestElection.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


class Leases(Kube):
    """A fake API server with one Lease, optimistic locking, and failing requests on demand."""

    def __init__(self) -> None:
        super().__init__(client.ApiClient())
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.failure: Exception | None = None
        self.writes: list[str] = []

    async def read(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        assert (kind, namespace, name) == ("Lease", "ns", "operator")
        if self.failure:
            raise self.failure
        return self.lease

    async def create(self, obj: dict[str, Any]) -> dict[str, Any]:
        return self._store(obj, self.lease is None)

    async def replace(self, obj: dict[str, Any]) -> dict[str, Any]:
        present = self.lease and self.lease["metadata"]["resourceVersion"]
        return self._store(obj, obj["metadata"]["resourceVersion"] == present)

    def _store(self, obj: dict[str, Any], allowed: bool) -> dict[str, Any]:
        if self.failure:
            raise self.failure
        if not allowed:
            raise KubeError(409, "Conflict", "not the newest")
        self.version += 1
        self.lease = obj | {"metadata": obj["metadata"] | {"resourceVersion": str(self.version)}}
        self.writes.append(obj["spec"]["holderIdentity"])
        return self.lease


def elector(leases: Leases, identity: str, lease_s: float = 1.0) -> tuple[Elector, Election]:
    election = Election(identity, lease_s)
    return Elector(leases, election, "ns", "operator"), election


async def test_a_second_candidate_waits_until_the_lease_is_released() -> None:
    leases = Leases()
    (first, held), (second, waiting) = (
        elector(leases, "a", lease_s=30),
        elector(leases, "b", lease_s=3),
    )
    await first.acquire()
    assert held.held_s > 0
    assert held.write_timeout_s > held.held_s
    standing_by = asyncio.create_task(second.acquire())
    await asyncio.sleep(0.5)  # time for several attempts to acquire, which nothing shows
    assert not standing_by.done()
    await first.release()
    assert held.held_s < 0
    assert held.write_timeout_s == 0
    async with asyncio.timeout(60):
        await standing_by
    assert waiting.held_s > 0
    assert leases.writes == ["a", "", "b"]
    assert leases.lease["spec"]["leaseTransitions"] == 1


async def test_a_holder_that_cannot_renew_stops_before_another_takes_over() -> None:
    leases = Leases()
    (first, held), (second, _) = elector(leases, "a"), elector(leases, "b")
    await first.acquire()
    keeping = asyncio.create_task(first.keep())
    await until(lambda: len(leases.writes) >= 4, "three renewals")
    leases.failure = OSError("no route")
    with pytest.raises(LeaseLostError, match="in time"):
        async with asyncio.timeout(60):
            await keeping
    assert held.held_s <= 0
    leases.failure = None
    async with asyncio.timeout(60):
        await second.acquire()
    assert leases.writes[-1] == "b"


async def test_a_holder_that_was_frozen_too_long_stops() -> None:
    leases = Leases()
    (first, held), (second, _) = elector(leases, "a"), elector(leases, "b")
    await first.acquire()
    async with asyncio.timeout(60):
        await second.acquire()
    assert held.held_s < 0, "it must stop by its own clock, without a request"
    with pytest.raises(LeaseLostError):
        await first.keep()
    await first.release()
    assert leases.writes[-1] == "b", "it released a Lease of another holder"


async def test_a_candidate_without_the_lease_writes_nothing() -> None:
    asked: list[str] = []
    async with client.ApiClient() as api:
        kube = Kube(KubeClient(api))
        kube.client.on_request = lambda verb, path, code: asked.append(verb)
        kube.client.write_timeout_s = lambda: 0.0
        pod = {"kind": "Pod", "metadata": {"namespace": "ns", "name": "x"}}
        for write in (
            lambda: kube.create(pod),
            lambda: kube.apply(pod),
            lambda: kube.merge("Pod", "ns", "x", {}),
            lambda: kube.delete("Pod", "ns", "x", "uid"),
        ):
            with pytest.raises(WritesForbiddenError):
                await write()
    assert asked == []


def test_a_late_response_does_not_extend_the_lease() -> None:
    now = 0.0
    election = Election("a", LEASE_S, clock=lambda: now)
    sent_at = election.now()
    now = LEASE_S / 2
    election.record_write(Record(holder="a", duration_s=LEASE_S, version="1"), sent_at)
    assert 0 < election.held_s < LEASE_S - now, (
        "the duration must begin before the request was sent"
    )
    now = LEASE_S
    assert election.held_s <= 0, "another candidate may hold the Lease now"
