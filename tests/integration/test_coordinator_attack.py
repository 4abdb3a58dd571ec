"""Processes without the service key attack a running expert-parallel group.

They try the coordinator, the links between ranks, and the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
import zmq
from torch.distributed import DistNetworkError
from zmq.utils.monitor import recv_monitor_message

from baton_engine.distributed.store.handshake import store_secret
from baton_engine.distributed.store.socket_store import connect_store
from baton_engine.distributed.store.wire import StoreAddress
from baton_engine.random_checkpoint import create_checkpoint
from baton_protocol.options.config import ENGINE_PORT
from baton_protocol.service_key import HANDSHAKE_FAILED, ServiceKey
from baton_protocol.topology import (
    COORDINATOR_HTTP_PORT,
    COORDINATOR_PORT,
    Generation,
    RankPhase,
    StartWave,
    Status,
    TopologyMember,
)
from support.elastic.expert_group import SHAPE, VOCAB_SIZE, ExpertGroup
from support.load import Load, Stream
from support.parity import reference_model
from support.pods import Pod, pods
from support.waiting import eventually

DEADLINE_S = 120.0
NUM_LAYERS, NUM_EXPERTS = SHAPE["num_layers"], SHAPE["num_experts"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_checkpoint(tmp_path_factory.mktemp("experts") / "qwen3_moe", "qwen3_moe", **SHAPE)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> torch.nn.Module:
    return reference_model(checkpoint)


def write_key(file: Path) -> str:
    file.write_text(secrets.token_hex(32))
    return str(file)


@pytest.fixture
def group(checkpoint: Path, tmp_path: Path) -> Iterator[ExpertGroup]:
    with pods(tmp_path, 44) as processes:
        group = ExpertGroup(processes, checkpoint, service_key_file=write_key(tmp_path / "key"))
        group.start(2)
        yield group


class Attacker:
    """Attacks with a given key. Each method returns whether the attempt succeeded."""

    def __init__(self, group: ExpertGroup, key: ServiceKey | None) -> None:
        self._group = group
        self._key = key

    def request_topology(self) -> bool:
        names = sorted(self._group.ranks)[:1]
        body = json.dumps({"operation_id": "forged", "members": names}).encode()
        headers = {} if self._key is None else {"Authorization": self._key.bearer}
        url = f"http://{self._group.coordinator.address}:{COORDINATOR_HTTP_PORT}/topology"
        request = urllib.request.Request(url, body, headers, method="PUT")
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S):
                return True
        except urllib.error.HTTPError as error:
            refusal = error.code, json.load(error)["reason"]
        assert refusal == (401, "Unauthorized")
        return False

    def register_as_rank(self) -> bool:
        """Register under a member's name, which would replace the member."""
        name = min(self._group.ranks)
        forged = TopologyMember(name, "forged", self._group.coordinator.address, 1, 2, 3)
        generation = Generation(
            10**9,
            "1000000000.x",
            (forged,),
            (((*range(NUM_EXPERTS),),),) * NUM_LAYERS,
            "127.0.0.1",
            3,
        )
        status = Status(forged, RankPhase.SERVING, NUM_EXPERTS, NUM_LAYERS, generation=generation)
        return self._is_accepted(
            self._group.coordinator.address, COORDINATOR_PORT, msgspec.msgpack.encode(status)
        )

    def send_waves(self, rank: Pod) -> bool:
        ports = link_ports(rank)
        assert ports, f"{rank.name} has no link\n{rank.tail()}"
        wave = msgspec.msgpack.encode(StartWave(10**9, "1000000000.x", 1))
        accepted = [self._is_accepted(rank.address, port, wave) for port in ports]
        return any(accepted)

    def use_store(self) -> bool:
        host, port = self._group.topology().store.rsplit(":", 1)
        try:
            store = connect_store(StoreAddress(host, int(port)), 2.0, store_secret(self._key))
            store.set("forged", "1")
        except (TimeoutError, DistNetworkError):
            return False
        return bool(store.num_keys())

    def _is_accepted(self, host: str, port: int, message: bytes) -> bool:
        """Send a message, and return whether the ZeroMQ handshake succeeded."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with context, context.socket(zmq.DEALER) as attacker:
            attacker.linger = 0
            if self._key is not None:
                self._key.protect_client(attacker)
            monitor = attacker.get_monitor_socket(HANDSHAKE_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
            attacker.connect(f"tcp://{host}:{port}")
            with contextlib.suppress(zmq.Again):  # already refused
                attacker.send(message, zmq.NOBLOCK)
            assert monitor.poll(int(DEADLINE_S * 1000)), f"no handshake with {host}:{port}"
            accepted = bool(recv_monitor_message(monitor)["event"] & zmq.EVENT_HANDSHAKE_SUCCEEDED)
            attacker.disable_monitor()
            monitor.close()
        return accepted


def link_ports(rank: Pod) -> list[int]:
    """Return the ports on which a rank listens with ZeroMQ, except the engine's port."""
    listening = {
        each.laddr.port
        for each in psutil.Process(rank.process.pid).net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.ip == rank.address
    }
    ports = sorted(listening - {ENGINE_PORT})
    with ThreadPoolExecutor() as threads:
        are_links = threads.map(lambda port: _uses_zmtp(rank.address, port), ports)
        return [port for port, is_link in zip(ports, are_links, strict=True) if is_link]


def _uses_zmtp(host: str, port: int) -> bool:
    """Return whether a server sends a ZMTP greeting. gloo sends nothing."""
    silent = contextlib.suppress(TimeoutError, ConnectionError)
    with silent, socket.create_connection((host, port), 2.0) as connection:
        return connection.recv(1) == b"\xff"
    return False


class Serving:
    """A thread that sends streams through the gateway until `stop`."""

    def __init__(self, group: ExpertGroup) -> None:
        self._load = Load(
            f"http://{group.gateway.address}:8080",
            width=3,
            vocab_size=VOCAB_SIZE,
            max_tokens=(8, 40),
        )
        self._stopped = threading.Event()
        self.streams: list[Stream] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stopped.is_set():
            self.streams += asyncio.run(self._load.replay(list(range(number, number + 3)))).values()
            number += 3

    def stop(self) -> list[Stream]:
        self._stopped.set()
        self._thread.join()
        return self.streams


def test_attackers_without_the_key_are_refused_while_the_group_serves_and_grows(
    group: ExpertGroup, model: torch.nn.Module, tmp_path: Path
) -> None:
    before = group.topology()
    serving = Serving(group)
    wrong_file = write_key(tmp_path / "another-key")
    try:
        for key in (None, ServiceKey.load(wrong_file)):
            attacker = Attacker(group, key)
            assert not attacker.request_topology()
            assert not attacker.register_as_rank()
            assert not attacker.use_store()
            for rank in list(group.ranks.values()):
                assert not attacker.send_waves(rank)
        untrusted = group.add_rank(wrong_file)
        eventually(
            lambda: "the coordinator at" in group.ranks[untrusted].log.read_text(),
            timeout_s=DEADLINE_S,
            what="a rank with another key logs that it was refused",
        )
        after = group.topology()
        assert (after.generation, after.desired) == (before.generation, before.desired)
        assert {(member.name, member.instance_id, member.phase) for member in after.members} == {
            (member.name, member.instance_id, member.phase) for member in before.members
        }
        group.remove(untrusted)
        names = [*group.ranks, group.add_rank()]
        group.scale(names)
        served = len(serving.streams)
        eventually(
            lambda: len(serving.streams) > served,
            timeout_s=DEADLINE_S,
            what="streams on three ranks",
        )
    finally:
        streams = serving.stop()
    assert streams
    group.assert_all_right(streams, model, "under attack")


def test_the_same_attempts_succeed_with_the_key(group: ExpertGroup, tmp_path: Path) -> None:
    """The other attempts therefore fail only because of the key."""
    insider = Attacker(group, ServiceKey.load(str(tmp_path / "key")))
    assert insider.use_store()
    assert all(insider.send_waves(rank) for rank in group.ranks.values())
    assert insider.request_topology()
    group.wait_for(sorted(group.ranks), timeout_s=DEADLINE_S)
    assert insider.register_as_rank()


def test_a_group_without_a_key_accepts_everyone(checkpoint: Path, tmp_path: Path) -> None:
    with pods(tmp_path, 45) as processes:
        group = ExpertGroup(processes, checkpoint)
        group.start(2)
        attacker = Attacker(group, None)
        assert attacker.use_store()
        assert all(attacker.send_waves(rank) for rank in group.ranks.values())
        assert attacker.request_topology()
