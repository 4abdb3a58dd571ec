"""Limits of the HTTP servers of engines, fetchers and coordinators: connections, time and bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import pytest
from prometheus_client import CollectorRegistry, Metric

from baton_engine.elastic.coordinator.coordinator_http import CoordinatorServer
from baton_engine.fetch import fetch_progress
from baton_engine.http import bounded_server
from baton_engine.server.access import Access
from baton_engine.server.admin_server import AdminServer, DrainStatus, ProbeResult
from baton_protocol.process.health import Health
from baton_protocol.service_key import AdminRequest, ServiceKey
from baton_protocol.topology import TopologyRequest, TopologyStatus
from support.waiting import eventually

HOST = "127.0.0.1"
DEADLINE_S = 30.0


class Group:
    """The empty group of a coordinator."""

    def admits(self, authorization: str | None, request: AdminRequest) -> bool:
        return True

    def topology(self) -> TopologyStatus:
        return TopologyStatus(generation=0, desired=[], members=[])

    def request_topology(self, request: TopologyRequest) -> None:
        return None

    def request_rebalance(self) -> None:
        pass

    def metrics_text(self) -> bytes:
        return b""

    def is_healthy(self) -> bool:
        return True


class Engine:
    """An engine that is ready."""

    def health(self) -> ProbeResult:
        return ProbeResult(True, Health("Serving", ""))

    def readiness(self) -> ProbeResult:
        return self.health()

    def drain_status(self, *, start: bool) -> DrainStatus:
        return DrainStatus(start, 0)

    def run_admin_call(self, method: str, query: Mapping[str, Sequence[str]]) -> None:
        return None


def serve_engine(registry: CollectorRegistry | None = None) -> int:
    server = AdminServer(HOST, 0, Engine(), registry or CollectorRegistry())
    server.start()
    return server.port


def serve_fetcher() -> int:
    return fetch_progress.serve(fetch_progress.FetchProgress(), HOST, 0)


def serve_coordinator() -> int:
    server = CoordinatorServer(HOST, 0, Group())
    server.start()
    return server.port


Serve = Callable[[], int]


@pytest.fixture(params=[serve_engine, serve_fetcher, serve_coordinator])
def serve(request: pytest.FixtureRequest) -> Serve:
    """Return the function that starts a server and returns its port."""
    function: Serve = request.param
    return function


def connect(port: int) -> socket.socket:
    connection = socket.create_connection((HOST, port), DEADLINE_S)
    connection.settimeout(DEADLINE_S)
    return connection


def get(port: int) -> bytes:
    with connect(port) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n")
        return connection.recv(12)


def is_closed(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


def test_a_request_that_never_ends_is_aborted_after_the_timeout(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes arrive all the time, so no read times out."""
    monkeypatch.setattr(bounded_server, "REQUEST_TIMEOUT_S", 1.0)
    port = serve()
    with connect(port) as connection:
        started = time.monotonic()
        connection.settimeout(0.1)
        ended = False
        while not ended and time.monotonic() - started < DEADLINE_S:
            try:
                connection.sendall(b"G")
                ended = connection.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                ended = True
        assert ended
        assert time.monotonic() - started < 8.0
    assert get(port) == b"HTTP/1.1 200"


def test_the_oldest_connection_is_closed_when_there_are_too_many(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_server, "MAX_CONNECTIONS", 5)
    # Idle connections are not closed.
    monkeypatch.setattr(bounded_server.BoundedHandler, "timeout", 10 * DEADLINE_S)
    monkeypatch.setattr(bounded_server, "REQUEST_TIMEOUT_S", 10 * DEADLINE_S)
    port = serve()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(port)) for _ in range(20)]
        assert all(is_closed(each) for each in silent[:15])
        assert get(port) == b"HTTP/1.1 200"
        assert is_closed(silent[15])


def test_a_large_head_is_refused(serve: Serve) -> None:
    port = serve()
    for headers, status in ((1, b"200"), (5, b"431")):
        with connect(port) as connection:
            lines = b"".join(b"a%d: %s\r\n" % (number, b"x" * 4000) for number in range(headers))
            connection.sendall(b"GET /health HTTP/1.1\r\n%s\r\n" % lines)
            assert connection.recv(12) == b"HTTP/1.1 " + status


def test_the_body_of_a_get_request_is_not_parsed_as_the_next_request(serve: Serve) -> None:
    second = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    head = b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(second)
    response = b""
    with connect(serve()) as connection:
        connection.sendall(head + second)
        with contextlib.suppress(ConnectionResetError):  # the server closed with unread data
            while part := connection.recv(65536):
                response += part
    assert response.count(b"HTTP/1.1 ") == 1


def test_a_client_without_the_key_that_still_sends_its_body_gets_the_response() -> None:
    """Otherwise the connection would be reset, and the client might not see the status."""
    access = Access(ServiceKey(bytes(32)))
    server = AdminServer(HOST, 0, Engine(), CollectorRegistry(), access)
    server.start()
    with connect(server.port) as connection:
        connection.sendall(b"POST /drain HTTP/1.1\r\nContent-Length: 20\r\n\r\n0123456789")
        response = connection.recv(2**16)
        assert response.startswith(b"HTTP/1.1 401 ")
        while chunk := connection.recv(2**16):  # until the server has ended its response
            response += chunk
        for byte in b"0123456789":
            connection.sendall(bytes([byte]))
        assert connection.recv(1) == b"", "the connection was reset"


def test_many_simultaneous_clients_get_responses() -> None:
    """Their connections wait in the backlog, which must be larger than the default of 5."""
    server = CoordinatorServer(HOST, 0, Group())
    with contextlib.ExitStack() as stack:
        # Before the server accepts.
        waiting = [stack.enter_context(connect(server.port)) for _ in range(100)]
        server.start()
        for each in waiting:
            each.sendall(b"GET /topology HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert all(each.recv(12) == b"HTTP/1.1 200" for each in waiting)


def test_a_flood_of_requests_for_metrics_computes_them_in_one_thread_at_a_time() -> None:
    num_clients = 8
    release = threading.Semaphore(0)
    running: list[int] = []
    most: list[int] = []

    class Collector:
        def describe(self) -> list[Metric]:
            return []

        def collect(self) -> list[Metric]:
            running.append(1)
            most.append(len(running))
            release.acquire(timeout=DEADLINE_S)
            running.pop()
            return []

    registry = CollectorRegistry()
    registry.register(Collector())
    port = serve_engine(registry)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(port)) for _ in range(num_clients)]
        for each in clients:
            each.sendall(b"GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n")
        for n in range(num_clients):
            eventually(lambda n=n: len(most) > n, timeout_s=DEADLINE_S, what="the next request")
            release.release()
        assert all(each.recv(12) == b"HTTP/1.1 200" for each in clients)
    assert max(most) == 1
