"""A coordinator with untrusted clients: invalid requests, floods, and forged log lines."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from baton_engine.elastic.coordinator.controller_config import ControllerConfig
from baton_engine.elastic.coordinator.coordinator import Coordinator
from baton_engine.elastic.coordinator.topology_controller import TopologyController
from baton_engine.elastic.coordinator.topology_validation import (
    MAX_MEMBERS,
    check_request,
    check_status,
)
from baton_engine.elastic.rank.rank_link import RankLink
from baton_engine.http.bounded_server import MAX_BODY_BYTES
from baton_protocol.topology import (
    ExpertLoads,
    Generation,
    Placement,
    RankPhase,
    StartWave,
    Status,
    TopologyMember,
    TopologyRequest,
)
from support.elastic.coordinator_process import DEADLINE_S, HOST, CoordinatorProcess, LiveRanks
from support.elastic.rank_statuses import status
from support.waiting import eventually

RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    process = CoordinatorProcess(tmp_path_factory.mktemp("coordinator"))
    yield process
    process.kill()


def connect(port: int) -> socket.socket:
    connection = socket.create_connection((HOST, port), DEADLINE_S)
    connection.settimeout(DEADLINE_S)
    return connection


def send_request(coordinator: CoordinatorProcess, request: bytes) -> tuple[int, dict[str, str]]:
    """Return the response's status and JSON. The server must close the connection."""
    with connect(coordinator.http_port) as connection:
        connection.sendall(request)
        answer = b""
        while data := connection.recv(2**16):
            answer += data
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head, answer[:300]
    assert answer.count(b"HTTP/1.1") == 1, "several responses"
    return int(head.split()[1]), json.loads(body)


def put(*headers: bytes, body: bytes = b"") -> bytes:
    return b"\r\n".join([b"PUT /topology HTTP/1.1", b"Host: x", *headers, b"", body])


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (put(b"Content-Length: -1"), 400),
        (put(b"Content-Length: 1_0"), 400),
        (put(b"Content-Length: " + "\u0661".encode()), 400),
        (put(b"Content-Length: 2", b"Content-Length: 90", body=b"{}"), 400),
        (put(b"Content-Length: " + b"9" * 5000), 413),
        (put(b"Content-Length: %d" % (MAX_BODY_BYTES + 1), body=b"x" * 3_000_000), 413),
        (put(b"Transfer-Encoding: chunked", body=b"2\r\n{}\r\n0\r\n\r\n"), 411),
        (put(b"Transfer-Encoding: chunked", b"Content-Length: 2", body=b"{}"), 411),
        (b"DELETE /topology HTTP/1.1\r\n\r\n", 405),
        (b"POST /topology HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 405),
        (b"OPTIONS * HTTP/1.1\r\n\r\n", 405),
        (b"CONNECT \x1b[2J:1 HTTP/1.1\r\n\r\n", 405),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET /topology HTTP/1.1\r\n" + b"a: b\r\n" * 300 + b"\r\n", 431),
        (b"GET /topology HTTP/9.9\r\n\r\n", 505),
        (b"\x16\x03\x01\x02\x00\x01 \x00\x01 \xfc\x03\x03 x\r\n\r\n", 400),
        (b"GET /nothing HTTP/1.1\r\nContent-Length: 5\r\n\r\nGET /", 404),
    ],
)
def test_an_invalid_request_gets_a_json_error_and_its_connection_is_closed(
    request_: bytes, status: int, coordinator: CoordinatorProcess
) -> None:
    answered, body = send_request(coordinator, request_)
    assert answered == status, body
    assert body.keys() == {"reason", "message"}


@pytest.mark.parametrize(
    "body",
    [
        b'{"operation_id":"\xff","members":["a"]}',
        b'{"operation_id":"o","members":["\xc3("]}',
        b'{"operation_id":"\\ud800","members":["a"]}',
        b'{"operation_id":"a","members":' + b"[" * 20_000,
        json.dumps({"operation_id": "n" * 65, "members": ["a"]}).encode(),
        json.dumps({"operation_id": "o\n2026-01-01 ERROR forged", "members": ["a"]}).encode(),
        json.dumps({"operation_id": "o", "members": ["a\nb"]}).encode(),
        json.dumps({"operation_id": "o", "members": ["A"]}).encode(),
        json.dumps({"operation_id": "o", "members": ["a."]}).encode(),
        json.dumps({"operation_id": "o", "members": ["a" * 64]}).encode(),
        json.dumps({"operation_id": "o", "members": ["-a"]}).encode(),
        json.dumps(
            {"operation_id": "o", "members": [f"m{n}" for n in range(MAX_MEMBERS + 1)]}
        ).encode(),
    ],
)
def test_an_invalid_topology_is_refused(body: bytes, coordinator: CoordinatorProcess) -> None:
    length = b"Content-Length: %d" % len(body)
    answered, said = send_request(coordinator, put(length, b"Connection: close", body=body))
    assert (answered, said["reason"]) == (400, "BadRequest")
    assert said["message"].isprintable()
    assert coordinator.topology().desired == []


def test_the_largest_valid_topology_is_accepted() -> None:
    members = [f"{number:063}" for number in range(MAX_MEMBERS)]
    request = TopologyRequest(operation_id="Az0._:-" + "x" * 57, members=members)
    assert check_request(request, None) is None
    assert len(msgspec.json.encode(request)) <= MAX_BODY_BYTES


def test_clients_that_disconnect_during_a_request_cause_no_traceback(
    coordinator: CoordinatorProcess,
) -> None:
    for said in (
        put(b"Content-Length: 500", body=b'{"op'),
        b"GET /metrics HTTP/1.1\r\n\r\n" * 50,
        b"GET /he",
    ):
        with connect(coordinator.http_port) as connection:
            connection.sendall(said)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    for said in (put(b"Content-Length: 500", body=b'{"op'), b""):
        with connect(coordinator.http_port) as connection:
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
    for _ in range(20):
        assert coordinator.http("GET", "/health")[0] == 200
    log = coordinator.log.read_text()
    assert "Traceback" not in log
    assert "\x1b" not in log


def test_requests_on_one_connection_do_not_wait_for_acknowledgements(
    coordinator: CoordinatorProcess,
) -> None:
    """Without TCP_NODELAY a response of two parts takes 40 ms."""
    took_s = []
    with connect(coordinator.http_port) as connection:
        for _ in range(50):
            started = time.monotonic()
            connection.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            answer = b""
            while b"loop that answers ranks is running" not in answer:
                answer += connection.recv(2**16)
            took_s.append(time.monotonic() - started)
    assert min(took_s[-25:]) < 0.03, "all requests are slow, not only some as on a busy machine"


# Messages of ranks


PLACEMENT = (((0, 1), (2, 3)),) * 2
A, B = (TopologyMember(name, f"{name}#0", HOST, 1, 2, 3) for name in "ab")


@pytest.mark.parametrize(
    ("members", "placement", "num_experts"),
    [
        ((A, B), (((0, 1), (2, 99)),) * 2, 4),
        ((A, B), (((0, 1), (2, -99)),) * 2, 4),
        ((A, B), (((0, 1, 2), (3, 4, 5)),) * 2, 6),
        ((A, B), PLACEMENT + PLACEMENT, 4),
        ((A, A), PLACEMENT, 4),
    ],
    ids=["unknown expert", "negative expert", "more experts", "more layers", "one member twice"],
)
def test_ranks_that_contradict_each_other_do_not_end_the_coordinator(
    members: tuple[TopologyMember, ...], placement: Placement, num_experts: int
) -> None:
    controller = TopologyController(
        lambda: "n",
        ControllerConfig(settle_s=0.0, rebalance_threshold=1.1, rebalance_window_s=1.0),
    )

    def report(member: TopologyMember, generation: Generation, num_experts: int, now: int) -> None:
        layer = (now * 10**6, *[now] * (num_experts - 1))
        status = Status(
            member,
            RankPhase.SERVING,
            num_experts,
            len(generation.placement),
            generation=generation,
            loads=ExpertLoads((layer,) * len(generation.placement)),
        )
        check_status(status)
        controller.on_status(status, float(now))

    right = Generation(1, "1.x", (A, B), PLACEMENT, HOST, 3)
    wrong = msgspec.structs.replace(right, members=members, placement=placement)
    for now in range(5):
        report(A, right, 4, now)
        report(B, wrong, num_experts, now)
        controller.tick(float(now))
    assert controller.status(5.0).generation == 1


def test_a_turn_reads_a_bounded_number_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = Coordinator(HOST, 0, 0, ControllerConfig())
    link = RankLink(HOST, f"{HOST}:{coordinator.port}", deliver=lambda message: None)
    monkeypatch.setattr(coordinator, "_receive", lambda: False)

    class Endless:
        def recv_multipart(self, flags: int) -> list[bytes]:
            return [b"junk"]

    def take_turns() -> None:
        coordinator._turn()
        link._receive(Endless(), msgspec.msgpack.Decoder(StartWave))

    turns = threading.Thread(target=take_turns, daemon=True)
    turns.start()
    turns.join(DEADLINE_S)
    assert not turns.is_alive()
    link.close()
    coordinator._close_sockets()


def test_a_sender_of_16_mib_is_disconnected(coordinator: CoordinatorProcess) -> None:
    """Decoded, such a message takes up to 0.5 GB."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
        sender.linger = 0
        monitor = sender.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        sender.connect(f"tcp://{HOST}:{coordinator.port}")
        sender.send(bytes(2**24))
        assert monitor.poll(DEADLINE_S * 1000), "still connected"
        sender.disable_monitor()
        monitor.close()


def test_a_rank_that_floods_the_coordinator_does_not_delay_the_others(
    coordinator: CoordinatorProcess,
) -> None:
    """The flood does not fill the log."""
    ranks = LiveRanks(coordinator)
    stop = threading.Event()

    def flood(message: bytes) -> None:
        sender: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        sender.setsockopt(zmq.LINGER, 0)
        sender.connect(f"tcp://{HOST}:{coordinator.port}")
        while not stop.is_set():
            with contextlib.suppress(zmq.Again):
                sender.send(message, zmq.NOBLOCK)
        sender.close()

    forged = msgspec.msgpack.encode(
        status(member=TopologyMember("forged\n2026 ERROR forged", "e#0", HOST, 1, 2, 3))
    )
    flooding = threading.Thread(target=flood, args=(forged,))
    flooding.start()
    try:
        ranks.form("a", "b")
        assert coordinator.http("GET", "/health")[0] == 200
        eventually(
            lambda: (
                "baton:topology_bad_messages_total 0.0"
                not in coordinator.http("GET", "/metrics")[1]
            ),
            timeout_s=DEADLINE_S,
            what="bad messages",
        )
    finally:
        stop.set()
        flooding.join()
        ranks.close()
    log = coordinator.log.read_text()
    assert not any(line.startswith("2026 ERROR") for line in log.splitlines())
    assert log.count("dropped a message") < 10
