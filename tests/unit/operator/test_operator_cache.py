"""The store against a server whose answers, watch events and lists come late and in every order that is possible."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton_operator.cache import OVERDUE_S, Listing, Request, Store
from baton_operator.names import LABEL_MANAGED_BY, LABEL_SERVICE, MANAGER
from baton_operator.workqueue import Key

Object = dict[str, Any]
NAMESPACE = "ns"
NAMES = ["a", "b"]
SERVICE = Key(NAMESPACE, "svc")


def pod(name: str, uid: str, version: str, service: str = SERVICE.name) -> Object:
    labels = {LABEL_SERVICE: service, LABEL_MANAGED_BY: MANAGER}
    metadata = {"name": name, "namespace": NAMESPACE, "uid": uid, "resourceVersion": version, "labels": labels}
    return {"metadata": {**metadata, "managedFields": [{"manager": "x"}]}, "spec": {}}


@dataclass(eq=False)
class Pending:
    """A request of ours: begun, then done by the server, then answered."""

    name: str
    what: str
    span: AbstractContextManager[Request]
    request: Request
    done_at: int | None = None
    answer: Object | None = None
    uid: str = ""


class Server:
    """Objects, and every change to them in order. Versions are opaque: their order cannot be read from them."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.log: list[tuple[str, Object]] = []

    @property
    def now(self) -> int:
        return len(self.log)

    def version(self, at: int) -> str:
        return hashlib.blake2b(str(at).encode(), digest_size=4).hexdigest()

    def when(self, obj: Object) -> int:
        return next(at for at in range(self.now + 1) if self.version(at) == obj["metadata"]["resourceVersion"])

    def write(self, name: str) -> Object:
        present = self.objects.get(name)
        uid = present["metadata"]["uid"] if present else f"uid{self.now}"
        self.objects[name] = obj = pod(name, uid, self.version(self.now))
        self.log.append(("MODIFIED" if present else "ADDED", obj))
        return obj

    def delete(self, name: str) -> None:
        obj = self.objects.pop(name)
        self.log.append(("DELETED", pod(name, obj["metadata"]["uid"], self.version(self.now))))


class CacheMachine(RuleBasedStateMachine):
    """The store never shows less than our last answered write, and agrees with the server when all has arrived."""

    @initialize()
    def begin(self) -> None:
        self.server = Server()
        self.clock = 0.0
        self.told: set[Key] = set()
        self.store = Store("Pod", "v1", self.told.add, clock=lambda: self.clock)
        self.pending: list[Pending] = []
        self.floor: dict[str, int] = {}
        """By name: when the server did the last write of ours that was answered."""
        self.streamed = 0
        self.listing: tuple[AbstractContextManager[Listing], Listing] | None = None
        self.read: tuple[int, list[Object]] | None = None
        self.lost = False

    # Others.

    @rule(name=st.sampled_from(NAMES))
    def someone_writes(self, name: str) -> None:
        self.server.write(name)

    @rule(name=st.sampled_from(NAMES))
    def someone_deletes(self, name: str) -> None:
        if name in self.server.objects:
            self.server.delete(name)

    # We, one request per name at a time, as the work queue has it; and reads of what is overdue.

    @rule(name=st.sampled_from(NAMES), what=st.sampled_from(["write", "delete", "no-op"]))
    def we_ask(self, name: str, what: str) -> None:
        if any(p.name == name and p.what != "read" for p in self.pending):
            return
        known = self.store.get(NAMESPACE, name)
        if what == "delete" and known is None:
            return
        self._ask(name, what, known["metadata"]["uid"] if known else "")

    @rule(name=st.sampled_from(NAMES), what=st.sampled_from(["write", "delete"]))
    def we_are_answered_at_once(self, name: str, what: str) -> None:
        before = set(map(id, self.pending))
        self.we_ask(name, what)
        for pending in [p for p in self.pending if id(p) not in before]:
            self._do(pending)
            self._answer(pending)

    @rule(name=st.sampled_from(NAMES))
    def we_read(self, name: str) -> None:
        self._ask(name, "read", "")

    def _ask(self, name: str, what: str, uid: str) -> None:
        span = self.store.request(NAMESPACE, name)
        self.pending.append(Pending(name, what, span, span.__enter__(), uid=uid))

    @precondition(lambda self: any(p.done_at is None for p in self.pending))
    @rule(data=st.data())
    def server_does(self, data: st.DataObject) -> None:
        self._do(data.draw(st.sampled_from([p for p in self.pending if p.done_at is None])))

    def _do(self, pending: Pending) -> None:
        present = self.server.objects.get(pending.name)
        if pending.what == "write":
            pending.answer = self.server.write(pending.name)
        elif pending.what == "delete":
            if present is not None and present["metadata"]["uid"] == pending.uid:
                self.server.delete(pending.name)
                pending.answer = {"kind": "Status"}
        else:
            pending.answer = present
        pending.done_at = self.server.now

    @precondition(lambda self: any(p.done_at is not None for p in self.pending))
    @rule(data=st.data(), arrives=st.booleans())
    def answer_comes(self, data: st.DataObject, arrives: bool) -> None:
        self._answer(data.draw(st.sampled_from([p for p in self.pending if p.done_at is not None])), arrives)

    def _answer(self, pending: Pending, arrives: bool = True) -> None:
        self.pending.remove(pending)
        if arrives and pending.what == "read":
            self.store.verified(pending.request, pending.answer)
        elif arrives and pending.what == "delete" and pending.answer:
            self.store.removed(pending.request, pending.uid)
            assert pending.done_at is not None
            self.floor[pending.name] = pending.done_at - 1
        elif arrives and pending.answer and pending.what != "delete":
            self.store.wrote(pending.request, pending.answer)
            self.floor[pending.name] = self.server.when(pending.answer)
        pending.span.__exit__(None, None, None)

    # The watch, and lists between two watches.

    @precondition(lambda self: self.listing is None and self.streamed < self.server.now)
    @rule(lost=st.sampled_from([False] * 9 + [True]))
    def event_comes(self, lost: bool) -> None:
        if lost:
            self.lost = True
        else:
            self.told.clear()
            type_, obj = self.server.log[self.streamed]
            before = self.store.get(NAMESPACE, obj["metadata"]["name"])
            self.store.event(type_, obj)
            if self.store.get(NAMESPACE, obj["metadata"]["name"]) != before:
                assert self.told == {SERVICE}, "a change that nobody is told about"
        self.streamed += 1

    @precondition(lambda self: self.listing is None)
    @rule()
    def list_begins(self) -> None:
        span = self.store.listing(None)
        self.listing, self.read = (span, span.__enter__()), None

    @precondition(lambda self: self.listing is not None)
    @rule()
    def server_lists(self) -> None:
        self.read = self.server.now, list(self.server.objects.values())

    @precondition(lambda self: self.read is not None)
    @rule()
    def list_comes(self) -> None:
        assert self.listing is not None
        assert self.read is not None
        span, listing = self.listing
        self.streamed, items = self.read
        self.store.listed(listing, items)
        span.__exit__(None, None, None)
        self.listing, self.read, self.lost = None, None, False

    @rule()
    def time_passes(self) -> None:
        self.clock += OVERDUE_S

    @invariant()
    def our_writes_are_seen(self) -> None:
        for name, floor in self.floor.items():
            known = self.store.get(NAMESPACE, name)
            if known is not None:
                assert self.server.when(known) >= floor, f"{name} is older than what our write returned"
            else:
                later = self.server.log[floor:]
                assert any(t == "DELETED" and o["metadata"]["name"] == name for t, o in later), f"{name} is missing"

    @invariant()
    def the_index_agrees(self) -> None:
        found = self.store.of_service(SERVICE)
        assert found == self.store.all(NAMESPACE) == self.store.all()
        assert all("managedFields" not in obj["metadata"] and obj["kind"] == "Pod" for obj in found)

    def teardown(self) -> None:
        if not hasattr(self, "server"):
            return
        for pending in list(self.pending):
            if pending.done_at is None:
                self._do(pending)
            self._answer(pending)
        if self.listing is not None:
            self.server_lists()
            self.list_comes()
        if self.lost:  # what the resync is for
            self.list_begins()
            self.server_lists()
            self.list_comes()
        while self.streamed < self.server.now:
            self.event_comes(lost=False)
        self.clock += OVERDUE_S
        for namespace, name in self.store.overdue():
            with self.store.request(namespace, name) as request:
                self.store.verified(request, self.server.objects.get(name))
        assert self.store.overdue() == [], "a version that was awaited is still not known"
        shown = {obj["metadata"]["name"]: obj["metadata"]["resourceVersion"] for obj in self.store.all()}
        assert shown == {name: obj["metadata"]["resourceVersion"] for name, obj in self.server.objects.items()}


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


def test_an_object_that_changes_hands_is_told_to_both_services() -> None:
    told: list[Key] = []
    store = Store("Pod", "v1", told.append)
    store.event("ADDED", pod("a", "1", "x"))
    store.event("MODIFIED", pod("a", "1", "y", service="other"))
    assert told == [SERVICE, SERVICE, Key(NAMESPACE, "other")], "one lost it, one has it"
    assert store.of_service(SERVICE) == []
    assert [obj["metadata"]["name"] for obj in store.of_service(Key(NAMESPACE, "other"))] == ["a"]


def test_an_answer_that_the_watch_overtook_is_not_waited_for() -> None:
    now = 0.0
    store = Store("Pod", "v1", lambda key: None, clock=lambda: now)
    with store.request(NAMESPACE, "a") as request:
        store.event("ADDED", pod("a", "1", "ours"))
        store.event("MODIFIED", pod("a", "1", "theirs"))
        store.wrote(request, pod("a", "1", "ours"))
    found = store.get(NAMESPACE, "a")
    assert found is not None
    assert found["metadata"]["resourceVersion"] == "theirs"
    now = 2 * OVERDUE_S
    assert store.overdue() == []


def test_a_pod_that_is_deleted_at_once_does_not_come_back_by_an_older_event() -> None:
    store = Store("Pod", "v1", lambda key: None)
    store.event("ADDED", pod("a", "1", "x"))
    with store.request(NAMESPACE, "a") as request:
        store.removed(request, "1")
    store.event("MODIFIED", pod("a", "1", "y"))
    assert store.get(NAMESPACE, "a") is None
    store.event("DELETED", pod("a", "1", "z"))
    store.event("ADDED", pod("a", "2", "w"))
    assert store.get(NAMESPACE, "a") is not None


def test_what_was_created_while_a_list_was_under_way_survives_it() -> None:
    store = Store("Pod", "v1", lambda key: None)
    with store.listing(None) as listing:
        with store.request(NAMESPACE, "a") as request:
            store.wrote(request, pod("a", "1", "x"))
        store.listed(listing, [])
    assert store.get(NAMESPACE, "a") is not None, "it would be created twice"


def test_an_answer_to_a_read_that_began_before_our_write_is_not_believed() -> None:
    store = Store("Pod", "v1", lambda key: None)
    store.event("ADDED", pod("a", "1", "old"))
    with store.request(NAMESPACE, "a") as reading:
        with store.request(NAMESPACE, "a") as writing:
            store.wrote(writing, pod("a", "1", "new"))
        store.verified(reading, pod("a", "1", "old"))
    found = store.get(NAMESPACE, "a")
    assert found is not None
    assert found["metadata"]["resourceVersion"] == "new"


def test_what_is_not_labelled_as_ours_is_not_kept() -> None:
    store = Store("Pod", "v1", lambda key: None)
    foreign = pod("a", "1", "x")
    foreign["metadata"]["labels"] = {}
    with store.request(NAMESPACE, "a") as request:
        store.verified(request, foreign)
    assert store.get(NAMESPACE, "a") is None, "no watch would ever tell that it is gone"


def test_a_list_of_one_namespace_says_nothing_about_another() -> None:
    store = Store("Pod", "v1", lambda key: None)
    store.event("ADDED", pod("a", "1", "x"))
    with store.listing("elsewhere") as listing:
        store.listed(listing, [])
    assert store.get(NAMESPACE, "a") is not None
    with store.listing(NAMESPACE) as listing:
        store.listed(listing, [])
    assert store.get(NAMESPACE, "a") is None
