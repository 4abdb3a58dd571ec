"""Answers of the admin port: results, pending calls, failures, and access with a service key."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton_engine.server.access import Access
from baton_engine.server.admin_server import AdminCallPending, AdminServer, DrainStatus, ProbeResult
from baton_protocol.kv_compatibility import KVCompatibility
from baton_protocol.process import metrics_text
from baton_protocol.process.health import Health, LoadProgress
from baton_protocol.service_key import AdminRequest, ServiceKey
from support.waiting import eventually


class FakeAdmin:
    """Answers every call with `answer`, or raises it if it is an exception."""

    answer: Any = None
    called: tuple[str, Mapping[str, Sequence[str]]] | None = None

    def health(self) -> ProbeResult:
        return ProbeResult(True, Health("Serving", ""))

    def readiness(self) -> ProbeResult:
        return ProbeResult(False, Health("Loading", "loading x", LoadProgress(1, 4)))

    def drain_status(self, *, start: bool) -> DrainStatus:
        return DrainStatus(start, 0)

    def run_admin_call(self, method: str, query: Mapping[str, Sequence[str]]) -> Any:
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


def test_an_early_disconnect_of_a_client_is_not_logged_as_an_error(server, capfd, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.sendall(b"GET /hea")
    connection.close()  # resets the connection while the server reads the request
    eventually(
        lambda: "an HTTP client disconnected" in caplog.text,
        timeout_s=30,
        what="the end of that request",
    )
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]
    assert capfd.readouterr().err == ""


def test_a_request_that_fails_is_logged(server, admin, capfd, caplog, monkeypatch) -> None:
    monkeypatch.setattr(admin, "health", lambda: 1 / 0)
    with pytest.raises(ConnectionError):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=30)
    eventually(
        lambda: "ZeroDivisionError" in caplog.text, timeout_s=30, what="the error in the log"
    )
    assert capfd.readouterr().err == ""


KEY = ServiceKey(b"the key of this service")


def ask(
    server: AdminServer, method: str, path: str, authorization: str | None = None
) -> tuple[int, Any]:
    headers = {} if authorization is None else {"Authorization": authorization}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}", method=method, headers=headers
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_readiness_reports_the_progress_of_loading(server) -> None:
    loading = {
        "reason": "Loading",
        "message": "loading x",
        "progress": {"done_bytes": 1, "total_bytes": 4},
    }
    assert ask(server, "GET", "/ready") == (503, loading)
    assert ask(server, "GET", "/health") == (200, {"reason": "Serving", "message": ""})


def test_health_reports_the_kv_compatibility(server, admin) -> None:
    kv = KVCompatibility(
        version=2, checkpoint="c", dtype="float32", quantization="none", layout="NHL2BD",
        block_size=16, num_layers=2, num_kv_heads=4, head_dim=8, transport="ucx",
    )  # fmt: skip
    admin.health = lambda: ProbeResult(True, Health("Serving", "", kv=kv))
    status, body = ask(server, "GET", "/health")
    assert (status, body["kv"]) == (200, msgspec.to_builtins(kv))


def test_health_reports_the_kv_bytes_of_every_transport(server, admin) -> None:
    admin.health = lambda: ProbeResult(True, Health("Serving", "", kv_bytes={"ucx tcp/lo": 7}))
    assert ask(server, "GET", "/health")[1]["kv_bytes"] == {"ucx tcp/lo": 7}


def test_a_call_passes_its_query_to_the_method_and_returns_the_result(server, admin) -> None:
    admin.answer = True
    assert ask(server, "POST", "/wake_up?tags=weights&tags=kv_cache") == (200, {"result": True})
    assert admin.called == ("wake_up", {"tags": ["weights", "kv_cache"]})


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        (AdminCallPending(), 202, "Pending"),
        (ValueError("mode must be one of"), 400, "BadRequest"),
        (TimeoutError("no answer"), 503, "Unresponsive"),
        (RuntimeError("the engine sleeps"), 409, "Failed"),
    ],
)
def test_a_pending_or_failed_call_has_a_status_and_a_reason(
    server, admin, answer, status, reason
) -> None:
    admin.answer = answer
    got, body = ask(server, "POST", "/pause?mode=wait")
    assert (got, body["reason"]) == (status, reason)
    assert body["message"]


def test_unknown_paths_and_wrong_methods_are_answered_with_the_known_paths(server, admin) -> None:
    for method, path in (
        ("GET", "/pause"),
        ("POST", "/is_paused"),
        ("POST", "/no_such_call"),
        ("GET", "/"),
    ):
        status, body = ask(server, method, path)
        assert (status, body["reason"]) == (404, "NotFound")
        assert "/wake_up" in body["message"]
    assert admin.called is None


def test_an_absolute_url_with_an_invalid_host_is_refused(server, admin, caplog) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"GET http://[/is_paused HTTP/1.1\r\nConnection: close\r\n\r\n")
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["reason"] == "BadRequest"
    assert admin.called is None
    assert not caplog.records


# With a service key


@pytest.fixture
def access() -> Access:
    return Access(KEY)


@pytest.fixture
def locked(admin: FakeAdmin, access: Access) -> Iterator[AdminServer]:
    server = AdminServer("127.0.0.1", 0, admin, CollectorRegistry(), access)
    server.start()
    yield server
    server.close()


def refusals(access: Access, door: str) -> float:
    registry = CollectorRegistry()
    registry.register(access.refusals)
    return registry.get_sample_value("baton:access_refused_total", {"door": door})


@pytest.mark.parametrize("path", ["/drain", "/pause?mode=wait", "/sleep", "/no_such_thing"])
@pytest.mark.parametrize(
    "authorization", [None, "Bearer wrong", ServiceKey(b"another service's key").bearer]
)
def test_a_post_without_the_service_key_is_refused(
    locked, admin, access, path, authorization
) -> None:
    status, body = ask(locked, "POST", path, authorization)
    assert (status, body["reason"]) == (401, "Unauthorized")
    assert "Authorization" in body["message"]
    assert admin.called is None
    assert refusals(access, "http") == 1
    assert refusals(access, "engine") == 0


def test_a_post_with_the_service_key_is_accepted(locked, admin, access) -> None:
    admin.answer = True
    assert ask(locked, "POST", "/pause", KEY.bearer) == (200, {"result": True})
    assert ask(locked, "POST", "/drain", KEY.bearer) == (200, {"draining": True, "unfinished": 0})
    assert refusals(access, "http") == 0


def test_a_request_signed_for_a_pod_cannot_be_sent_to_another_one(locked, admin, access) -> None:
    """A pod with a recycled address may receive the operator's request, and send it on."""
    admin.answer = True
    request = AdminRequest("POST", "/pause", "127.0.0.1")
    assert ask(locked, "POST", "/pause", KEY.sign(request)) == (200, {"result": True})
    for captured in (request._replace(pod_ip="127.0.0.2"), request._replace(target="/drain")):
        assert ask(locked, "POST", "/pause", KEY.sign(captured))[0] == 401
    assert refusals(access, "http") == 2


def test_reads_need_no_service_key(locked) -> None:
    for path in ("/health", "/ready", "/metrics"):
        with contextlib.suppress(urllib.error.HTTPError, json.JSONDecodeError):
            assert ask(locked, "GET", path)[0] != 401
    assert ask(locked, "GET", "/drain")[0] == 200


def test_a_flood_of_requests_for_metrics_computes_them_30_times_per_second(
    admin: FakeAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counting(Collector):
        count = 0

        def collect(self) -> Iterator[Metric]:
            self.count += 1
            yield GaugeMetricFamily("computed", "", self.count)

    now = 100.0
    monkeypatch.setattr(metrics_text, "monotonic", lambda: now)
    registry, counting = CollectorRegistry(auto_describe=False), Counting()
    registry.register(counting)
    server = AdminServer("127.0.0.1", 0, admin, registry)
    server.start()

    def read() -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as got:
            return bytes(got.read())

    try:
        assert b"computed 30.0" in [read() for _ in range(100)][-1]
        now += 0.03
        assert b"computed 30.0" in read()
        now += 0.01
        assert b"computed 31.0" in read()
        assert counting.count == 31
    finally:
        server.close()


def test_the_body_of_a_refused_request_is_not_parsed_as_the_next_request(locked, admin) -> None:
    """The server closes the connection instead."""
    smuggled = (
        b"POST /drain HTTP/1.1\r\nHost: x\r\nAuthorization: " + KEY.bearer.encode() + b"\r\n\r\n"
    )
    head = b"POST /pause HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(smuggled)
    with socket.create_connection(("127.0.0.1", locked.port), timeout=30) as connection:
        connection.sendall(head + smuggled)
        response = b""
        with contextlib.suppress(ConnectionResetError):  # the server closed with unread data
            while part := connection.recv(65536):
                response += part
    assert response.count(b"HTTP/1.1 ") == 1
    assert response.startswith(b"HTTP/1.1 401 ")
    assert b"WWW-Authenticate: Bearer" in response
