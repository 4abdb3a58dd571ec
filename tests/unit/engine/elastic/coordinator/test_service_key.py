"""With a service key, coordinators and ranks accept only messages with this key."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from baton_engine.elastic.rank.rank_link import RankLink
from baton_protocol.service_key import AdminRequest, ServiceKey
from baton_protocol.topology import Directive, RankPhase, StartWave, Status, TopologyMember
from support.elastic.coordinator_process import DEADLINE_S, HOST, CoordinatorProcess, LiveRanks
from support.waiting import eventually

WRONG = ServiceKey(b"another key than theirs")


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text(secrets.token_hex(32) + "\n")
    return file


@pytest.fixture(scope="module")
def key(key_file: Path) -> ServiceKey:
    return ServiceKey.load(str(key_file))


@pytest.fixture(scope="module")
def coordinator(
    tmp_path_factory: pytest.TempPathFactory, key_file: Path
) -> Iterator[CoordinatorProcess]:
    process = CoordinatorProcess(tmp_path_factory.mktemp("coordinator"), key_file)
    yield process
    process.kill()


def status(name: str, link_port: int = 1) -> Status:
    return Status(
        TopologyMember(name, f"instance-{name}", HOST, 1, link_port, 2), RankPhase.STANDBY, 4, 2
    )


def metric(coordinator: CoordinatorProcess, name: str) -> float:
    lines = coordinator.http("GET", "/metrics", headers={})[1].splitlines()
    return float(next(line for line in lines if line.startswith(name)).split()[-1])


@pytest.mark.parametrize(
    "authorization", [{}, {"Authorization": "Bearer x"}, {"Authorization": WRONG.bearer}]
)
def test_a_client_without_the_bearer_token_can_only_read(
    authorization: dict[str, str], coordinator: CoordinatorProcess
) -> None:
    before = metric(coordinator, 'baton:topology_refused_total{door="http"}')
    body = {"operation_id": "forged", "members": ["a"]}
    for method, path, sent in (
        ("PUT", "/topology", body),
        ("POST", "/rebalance", None),
        ("PUT", "/nothing", {}),
    ):
        code, text = coordinator.http(method, path, sent, authorization)
        assert (code, json.loads(text)["reason"]) == (401, "Unauthorized")
    assert coordinator.http("GET", "/topology", headers=authorization)[0] == 200
    assert coordinator.http("GET", "/ready", headers=authorization)[0] == 200
    assert coordinator.topology().desired == []
    assert metric(coordinator, 'baton:topology_refused_total{door="http"}') == before + 3


def test_a_signed_request_is_accepted_with_its_own_body_only(
    key: ServiceKey, coordinator: CoordinatorProcess
) -> None:
    body = json.dumps({"operation_id": "", "members": []}).encode()
    signed = {"Authorization": key.sign(AdminRequest("PUT", "/topology", body=body))}
    code, text = coordinator.http("PUT", "/topology", body, signed)
    assert code == 400, text  # the key was accepted, and the request is invalid
    for method, path, other in (
        ("PUT", "/topology", body.replace(b"[]", b'["a"]')),
        ("POST", "/rebalance", body),
    ):
        assert coordinator.http(method, path, other, signed)[0] == 401
    assert coordinator.topology().desired == []


@pytest.mark.parametrize("theirs", [None, WRONG], ids=["no key", "another key"])
def test_a_rank_without_the_key_is_refused_and_both_sides_log_it(
    theirs: ServiceKey | None, coordinator: CoordinatorProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    before = metric(coordinator, 'baton:topology_refused_total{door="ranks"}')
    received: queue.SimpleQueue[Directive | StartWave] = queue.SimpleQueue()
    link = RankLink(HOST, f"{HOST}:{coordinator.port}", deliver=received.put, key=theirs)
    link.publish(status("untrusted", link.port))
    link.start()
    try:
        eventually(
            lambda: f"the coordinator at {HOST}:{coordinator.port} " in caplog.text,
            timeout_s=DEADLINE_S,
            what="a line in the rank's log",
        )
        eventually(
            lambda: metric(coordinator, 'baton:topology_refused_total{door="ranks"}') > before,
            timeout_s=DEADLINE_S,
            what="a refusal in the coordinator's metrics",
        )
    finally:
        link.close()
    assert received.empty()
    assert coordinator.topology().members == []
    eventually(
        lambda: "refused" in coordinator.log.read_text(),
        timeout_s=DEADLINE_S,
        what="a line in the coordinator's log",
    )


def test_ranks_with_the_key_form_grow_and_recover(coordinator: CoordinatorProcess) -> None:
    ranks = LiveRanks(coordinator)
    try:
        group = ranks.form("a", "b")
        group["c"] = ranks.add("c")
        coordinator.ask("more", "a", "b", "c")
        ranks.until(lambda: ranks.serve_together("a", "b", "c"), "three ranks")
        group["b"].alive = False
        ranks.until(lambda: ranks.serve_together("a", "c"), "the survivors")
    finally:
        ranks.close()


class UntrustedPeer:
    """A DEALER connected to a rank's link."""

    def __init__(self, port: int, key: ServiceKey | None) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if key is not None:
            key.protect_client(self.socket)
        self.socket.connect(f"tcp://{HOST}:{port}")

    def send(self, start: StartWave) -> None:
        # ZMQ drops the connection after a refusal, and a blocking send would wait forever.
        with contextlib.suppress(zmq.Again):
            self.socket.send(msgspec.msgpack.encode(start), zmq.NOBLOCK)


def test_a_rank_accepts_waves_only_from_peers_with_the_key(key: ServiceKey) -> None:
    received: queue.SimpleQueue[Directive | StartWave] = queue.SimpleQueue()
    listener = RankLink(HOST, f"{HOST}:9", deliver=received.put, key=key)
    trusted = RankLink(HOST, f"{HOST}:9", deliver=lambda message: None, key=key)
    listener.start()
    trusted.start()
    untrusted = [UntrustedPeer(listener.port, None), UntrustedPeer(listener.port, WRONG)]
    try:
        for peer in untrusted:
            peer.send(StartWave(9, "forged", 9))
        trusted.set_peers([status("listener", listener.port).member])
        for wave in range(3):
            trusted.start_wave(StartWave(1, "1.x", wave))
            while (start := received.get(timeout=DEADLINE_S)) != StartWave(1, "1.x", wave):
                assert isinstance(start, StartWave)
                assert start.generation == 1, "a wave without the key was accepted"
    finally:
        for peer in untrusted:
            peer.socket.close()
        listener.close()
        trusted.close()


def test_a_rank_with_a_key_refuses_a_coordinator_without_one(
    tmp_path: Path, key: ServiceKey
) -> None:
    coordinator = CoordinatorProcess(tmp_path)
    received: queue.SimpleQueue[Directive | StartWave] = queue.SimpleQueue()
    link = RankLink(HOST, f"{HOST}:{coordinator.port}", deliver=received.put, key=key)
    other = RankLink(HOST, f"{HOST}:{coordinator.port}", deliver=received.put)
    try:
        for each, name in ((link, "locked"), (other, "open")):
            each.publish(status(name, each.port))
            each.start()
        eventually(
            lambda: coordinator.topology().members,
            timeout_s=DEADLINE_S,
            what="the rank without a key",
        )
        assert isinstance(received.get(timeout=DEADLINE_S), Directive)
        assert [member.name for member in coordinator.topology().members] == ["open"]
    finally:
        link.close()
        other.close()
        coordinator.kill()


@pytest.mark.parametrize("content", [None, "", "too short"])
def test_a_missing_or_invalid_key_file_ends_the_coordinator(
    content: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_text(content)
    command = [
        sys.executable,
        "-m",
        "baton_engine.elastic.coordinator.coordinator_cli",
        "--port",
        "0",
        "--http-port",
        "0",
    ]
    ended = subprocess.run(
        [*command, "--service-key-file", str(file)],
        env={"POD_IP": HOST},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert ended.returncode == 78
    assert ended.stderr.splitlines()[-1].startswith("FATAL ConfigurationError: ")
    assert str(file) in ended.stderr
