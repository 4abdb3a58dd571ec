"""How the admin port answers calls: results, waits that take long, and every kind of failure."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton_engine.core.admin_server import AdminServer, Condition, DrainStatus, Pending


class FakeAdmin:
    """Answers every call with `answer`, raising it if it is an exception."""

    answer: Any = None
    called: tuple[str, Mapping[str, Sequence[str]]] | None = None

    def health(self) -> Condition:
        return Condition(True, "Serving", "")

    def readiness(self) -> Condition:
        return Condition(False, "Loading", "loading x")

    def drain_status(self, *, start: bool) -> DrainStatus:
        return DrainStatus(start, 0)

    def call_utility(self, method: str, query: Mapping[str, Sequence[str]]) -> Any:
        self.called = (method, query)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def admin() -> FakeAdmin:
    return FakeAdmin()


@pytest.fixture
def server(admin: FakeAdmin) -> Iterator[AdminServer]:
    server = AdminServer("127.0.0.1", 0, admin, CollectorRegistry())
    server.start()
    yield server
    server.close()


def ask(server: AdminServer, method: str, path: str) -> tuple[int, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_call_passes_its_query_on_and_returns_the_result(server, admin):
    admin.answer = True
    assert ask(server, "POST", "/wake_up?tags=weights&tags=kv_cache") == (200, {"result": True})
    assert admin.called == ("wake_up", {"tags": ["weights", "kv_cache"]})


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        (Pending(), 202, "Pending"),
        (ValueError("mode must be one of"), 400, "BadRequest"),
        (TimeoutError("no answer"), 503, "Unresponsive"),
        (RuntimeError("the engine sleeps"), 409, "Failed"),
    ],
)
def test_what_does_not_end_well_has_a_status_and_a_reason(server, admin, answer, status, reason):
    admin.answer = answer
    got, body = ask(server, "POST", "/pause?mode=wait")
    assert (got, body["reason"]) == (status, reason)
    assert body["message"]


def test_what_changes_something_is_no_get_and_unknown_paths_list_the_known(server, admin):
    for method, path in (("GET", "/pause"), ("POST", "/is_paused"), ("POST", "/abort_all"), ("GET", "/")):
        status, body = ask(server, method, path)
        assert (status, body["reason"]) == (404, "NotFound")
        assert "/wake_up" in body["message"]
    assert admin.called is None
