"""Random input for a group's coordinator, and for the link of a rank.

See support/fuzz/fuzz_target.py.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
import zmq

from baton_protocol.service_key import ServiceKey
from baton_protocol.topology import (
    COORDINATOR_HTTP_PORT,
    COORDINATOR_PORT,
    Activity,
    Directive,
    ExpertLoads,
    Generation,
    RankPhase,
    StartWave,
    Status,
    TopologyMember,
    TopologyStatus,
)
from support.fuzz.fuzz_target import TIMEOUT_S, FuzzTarget
from support.fuzz.http_cases import HTTPCases
from support.fuzz.http_client import HTTPFuzzer
from support.fuzz.link_server import HONEST
from support.fuzz.raw_client import connect_tcp, send_raw, zmtp
from support.fuzz.zmq_client import (
    ANSWER_TIMEOUT_S,
    ZMQFuzzer,
    encode_msgpack,
    mutate_frames,
    mutate_message,
)
from support.pods import Pod, Pods, pods
from support.waiting import eventually

pytestmark = pytest.mark.timeout(TIMEOUT_S)
NUM_EXPERTS, NUM_LAYERS = 4, 2
#: Interval of an honest rank's statuses.
STATUS_INTERVAL_MS = 50
#: The first decision does not wait for ranks that have not reported, and loads are measured often.
FLAGS = (
    *("--settle-s", "0", "--dead-after-s", "0.5", "--suspect-dead-after-s", "0.2"),
    *("--rebalance-threshold", "1.01", "--rebalance-window-s", "0.05"),
    *("--retry-s", "0.01", "--retry-max-s", "0.01", "--wait-s", "0"),
)


def status_of(rng: random.Random) -> Status:
    """Return the status of one of three ranks, of which two serve together.

    Some statuses contradict those of the other ranks.
    """
    members = [TopologyMember(f"d-{n}", f"d-{n}#{n}", "127.0.0.1", 1, 2, 3) for n in range(3)]
    rank = rng.randrange(3)
    num_experts = _odd(NUM_EXPERTS, (0, 2, 6), rng)
    num_layers = _odd(NUM_LAYERS, (0, 1, 3), rng)
    slots = list(range(num_experts))
    if slots:
        slots[-1] = _odd(slots[-1], (99, -1, -99, 2**40), rng)
    half = num_experts // 2
    number = _odd(1, (2, 3, 1000), rng)
    generation = Generation(
        number,
        f"{number}.x",
        (members[0], _odd(members[1], (members[0],), rng)),
        ((tuple(slots[:half]), tuple(slots[half:])),) * num_layers,
        "127.0.0.1",
        3,
        "o",
        _odd(False, (True,), rng),
    )
    tokens = (_odd(rng.randrange(10**6), (-1, 2**63), rng), *[1000] * num_experts)[:num_experts]
    serves = _odd(rank < 2, (rank == 2,), rng)
    return Status(
        members[rank],
        _odd(RankPhase.SERVING if serves else RankPhase.STANDBY, list(RankPhase), rng),
        num_experts,
        num_layers,
        _odd(0, (2, 1000, -1, 2**40), rng),
        generation if serves else None,
        _odd("", (f"{number + 1}.x",), rng),
        _odd("", (f"{number}.x", "9.x"), rng),
        _odd("", (f"{number}.x", f"{number + 1}.x"), rng),
        _odd("", ("why",), rng),
        _odd((), ((members[0].instance_id,),), rng),
        loads=ExpertLoads((tokens,) * num_layers),
        leaving=_odd(False, (True,), rng),
        committed=_odd(None, (generation,), rng),
        step=rng.randrange(1000),
        activity=rng.choice(list(Activity)),
        expert_bytes=100,
    )


def _odd(usual: Any, odd: Sequence[Any], rng: random.Random) -> Any:
    """Return the usual value or, in one of twenty calls, one of the odd values."""
    return usual if rng.random() < 0.95 else rng.choice(odd)


class CoordinatorFuzzer(ZMQFuzzer):
    """Sends statuses like those of ranks, with random changes."""

    def begin_connection(self, peer: zmq.Socket[bytes], rng: random.Random) -> None:
        """Request a group of these ranks."""
        request_members(self.target.pod, self._key, "d-0", "d-1", "d-2")

    def make(self, rng: random.Random) -> list[bytes]:
        status = status_of(rng)
        if rng.random() < 0.5:
            return [encode_msgpack(status)]
        frames = [mutate_message(status, rng)]
        return mutate_frames(frames, rng) if rng.random() < 0.1 else frames

    def check(self, peer: zmq.Socket[bytes]) -> None:
        """Send the status of an honest rank until a directive answers it."""
        status = Status(
            TopologyMember("honest", "honest#0", "127.0.0.1", 1, 2, 3), RankPhase.LOADING
        )
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while not peer.poll(STATUS_INTERVAL_MS):
            assert time.monotonic() < deadline, f"no directive\n{self.target.pod.tail()}"
            peer.send(encode_msgpack(status))
        msgspec.msgpack.decode(peer.recv(), type=Directive)


class LinkFuzzer(ZMQFuzzer):
    """Sends messages like those of another rank, with random changes."""

    _num_waves = 0

    def make(self, rng: random.Random) -> list[bytes]:
        frames = [mutate_message(StartWave(rng.randrange(9), "1.x", rng.randrange(9)), rng)]
        return mutate_frames(frames, rng) if rng.random() < 0.2 else frames

    def check(self, peer: zmq.Socket[bytes]) -> None:
        """Start a wave as an honest rank, and wait until the link has delivered it."""
        self._num_waves += 1
        wave = f"wave {self._num_waves}."
        peer.send(encode_msgpack(StartWave(1, HONEST, self._num_waves)))
        pod = self.target.pod
        eventually(lambda: wave in pod.log.read_text(), "a wave of a rank", ANSWER_TIMEOUT_S)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    with pods(tmp_path_factory.mktemp("coordinators"), 24) as group:
        yield group


@pytest.fixture(scope="module")
def start(group: Pods) -> Callable[[str], Pod]:
    coordinators: dict[str, Pod] = {}

    def start(key_file: str) -> Pod:
        """Return a coordinator with this key. Coordinators are shared by the tests."""
        if key_file not in coordinators:
            name = "keyed" if key_file else "open"
            coordinators[key_file] = group.coordinator(name, key_file, FLAGS)
            coordinators[key_file].wait_ready(COORDINATOR_HTTP_PORT)
        return coordinators[key_file]

    return start


def request_members(coordinator: Pod, key: ServiceKey | None, *names: str) -> TopologyStatus:
    body = json.dumps({"operation_id": f"o{time.monotonic_ns()}", "members": names}).encode()
    url = f"http://{coordinator.address}:{COORDINATOR_HTTP_PORT}/topology"
    headers = {} if key is None else {"Authorization": key.bearer}
    request = urllib.request.Request(url, body, headers, method="PUT")
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
        return msgspec.json.decode(response.read(), type=TopologyStatus)


def check_coordinator(coordinator: Pod, key: ServiceKey | None) -> None:
    """Register an honest rank, and request a topology."""
    target = FuzzTarget(coordinator, "honest")
    honest = CoordinatorFuzzer(target, f"tcp://{coordinator.address}:{COORDINATOR_PORT}", key)
    honest.settle()
    assert request_members(coordinator, key, "honest").desired == ["honest"]
    assert coordinator.get(COORDINATOR_HTTP_PORT, "/health")[0] == 200


@pytest.mark.parametrize("is_keyed", [False, True], ids=["no key", "key"])
def test_ranks(start: Callable[[str], Pod], key_file: str, is_keyed: bool) -> None:
    """Clients that may connect: all if the server has no key, else those with the key."""
    coordinator = start(key_file if is_keyed else "")
    key = ServiceKey.load(key_file) if is_keyed else None
    target = FuzzTarget(coordinator, f"coordinator, {'keyed' if is_keyed else 'open'}")
    fuzzer = CoordinatorFuzzer(target, f"tcp://{coordinator.address}:{COORDINATOR_PORT}", key)
    with target.checking(lambda: check_coordinator(coordinator, key)):
        fuzzer.run()
    assert fuzzer.num_answers
    assert coordinator.metric("baton:topology_bad_messages_total", COORDINATOR_HTTP_PORT) > 0
    assert coordinator.metric("baton:topology_statuses_total", COORDINATOR_HTTP_PORT) > 0


def test_strangers(start: Callable[[str], Pod], key_file: str) -> None:
    """Clients without the key, which fail in ZeroMQ's handshake, are refused and counted."""
    coordinator = start(key_file)
    key = ServiceKey.load(key_file)
    target = FuzzTarget(coordinator, "coordinator, strangers")
    with target.checking(lambda: check_coordinator(coordinator, key)):
        send_raw(target, partial(connect_tcp, coordinator.address, COORDINATOR_PORT), zmtp)
    assert coordinator.metric("baton:topology_refused_total", COORDINATOR_HTTP_PORT) > 0


@pytest.mark.parametrize("is_authorized", [True, False], ids=["key", "no key"])
def test_http(start: Callable[[str], Pod], key_file: str, is_authorized: bool) -> None:
    """Requests with and without the coordinator's key."""
    coordinator = start(key_file)
    key = ServiceKey.load(key_file)
    assert key is not None
    request = {"operation_id": "o", "members": ["d-0", "d-1"]}
    bodies = [("PUT", "/topology", request), ("POST", "/rebalance", None)]
    paths = ("/topology", "/health", "/ready", "/metrics", "/rebalance", "/topology?x=1")
    headers = [(b"Authorization", key.bearer.encode())] if is_authorized else []
    target = FuzzTarget(
        coordinator, f"coordinator, HTTP, {'keyed' if is_authorized else 'strangers'}"
    )
    cases = HTTPCases(bodies, paths, headers)
    fuzzer = HTTPFuzzer(target, COORDINATOR_HTTP_PORT, cases, allowed={503, 505})
    with target.checking(lambda: check_coordinator(coordinator, key)):
        asyncio.run(fuzzer.run())
    assert fuzzer.statuses[200]
    assert fuzzer.statuses[400 if is_authorized else 401]


def test_rank_link(group: Pods) -> None:
    """The clients of this port are other ranks of the group. They start waves."""
    link = group.script("link", "support.fuzz.link_server")
    found = eventually(lambda: re.search(r"port (\d+)\.", link.log.read_text()), "the link's port")
    target = FuzzTarget(link, "rank link")
    fuzzer = LinkFuzzer(target, f"tcp://{link.address}:{found[1]}")
    with target.checking(fuzzer.settle):
        fuzzer.run()
    assert "cannot be decoded" in link.log.read_text()
