"""`baton-coordinator` as a process, and simulated ranks that are connected to it over ZMQ.

For the tests of the coordinator process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from baton_protocol.service_key import ServiceKey
from baton_protocol.topology import Directive, OperationPhase, RankPhase, TopologyStatus
from support.elastic.simulated_group import SimulatedRanks
from support.elastic.simulated_rank import SimulatedRank
from support.waiting import eventually

HOST = "127.0.0.1"
DEADLINE_S = 60.0
REAL_STEP_S = 0.03
FLAGS = (
    *("--settle-s", "0.5", "--form-after-s", "3", "--wait-s", "3", "--prepare-timeout-s", "10"),
    *("--commit-timeout-s", "10", "--retry-s", "0.3", "--retry-max-s", "1"),
)


class CoordinatorProcess:
    """A coordinator process. `start()` starts another process on the same ports."""

    def __init__(self, tmp_path: Path, key_file: Path | None = None) -> None:
        self._folder = tmp_path
        self._key_file = key_file
        self.key = ServiceKey.load(str(key_file)) if key_file else None
        self._starts = 0
        self.port = self.http_port = 0
        self.start()

    def start(self) -> None:
        self._starts += 1
        self.log = self._folder / f"coordinator-{self._starts}.log"
        ports = ["--port", str(self.port), "--http-port", str(self.http_port)]
        key = ["--service-key-file", str(self._key_file)] if self._key_file else []
        command = [
            sys.executable,
            "-m",
            "baton_engine.elastic.coordinator.coordinator_cli",
            *ports,
            *key,
            *FLAGS,
        ]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, env={**os.environ, "POD_IP": HOST})
        found = eventually(
            lambda: re.search(r"port (\d+), http port (\d+)", self.log.read_text()),
            timeout_s=DEADLINE_S,
            what="the ports in the log",
            every_s=0.02,
        )
        self.port, self.http_port = int(found[1]), int(found[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def http(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, str]:
        """Send an HTTP request, and return the status code and the body.

        Args:
            headers: headers of the request; None for a header with the coordinator's key.
        """
        if headers is None:
            headers = {} if self.key is None else {"Authorization": self.key.bearer}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://{HOST}:{self.http_port}{path}", data, headers, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def ask(self, operation_id: str, *names: str) -> TopologyStatus:
        code, text = self.http("PUT", "/topology", {"operation_id": operation_id, "members": names})
        assert code == 200, text
        return msgspec.json.decode(text, type=TopologyStatus)

    def topology(self) -> TopologyStatus:
        return msgspec.json.decode(self.http("GET", "/topology")[1], type=TopologyStatus)


class LiveRanks(SimulatedRanks):
    """Simulated ranks that connect to a coordinator process, each with a ZMQ DEALER socket."""

    def __init__(self, coordinator: CoordinatorProcess) -> None:
        super().__init__()
        self.coordinator = coordinator
        self._context = zmq.Context()
        self._links: dict[str, zmq.Socket[bytes]] = {}

    def close(self) -> None:
        self._context.destroy(linger=0)

    def link(self, rank: SimulatedRank) -> zmq.Socket[bytes]:
        if rank.id not in self._links:
            link = self._links[rank.id] = self._context.socket(zmq.DEALER)
            link.setsockopt(zmq.RECONNECT_IVL, 50)
            link.setsockopt(zmq.SNDHWM, 10)
            if self.coordinator.key is not None:
                self.coordinator.key.protect_client(link)
            link.connect(f"tcp://{HOST}:{self.coordinator.port}")
        return self._links[rank.id]

    def report(self, rank: SimulatedRank) -> None:
        with contextlib.suppress(zmq.Again):  # the coordinator is down
            self.link(rank).send(msgspec.msgpack.encode(rank.status()), zmq.NOBLOCK)

    def until(
        self, condition: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            picture = "\n".join(
                f"{rank.id} {rank.phase} {rank.generation} {rank.target}"
                for rank in self.ranks.values()
            )
            assert time.monotonic() < deadline, f"{what} not within {timeout_s} s\n{picture}"
            self.step_live()

    def step_live(self) -> None:
        for rank in self.ranks.values():
            link = self.link(rank)
            while rank.runs and link.poll(0):
                rank.inbox.append(msgspec.msgpack.decode(link.recv(), type=Directive))
        self.step_ranks()
        time.sleep(REAL_STEP_S)  # interval of the simulated ranks

    def serve_together(self, *names: str) -> bool:
        serving = [rank for rank in self.alive().values() if rank.generation is not None]
        return (
            sorted(rank.member.name for rank in serving) == sorted(names)
            and all(rank.phase is RankPhase.SERVING for rank in serving)
            and len({rank.generation.nonce for rank in serving if rank.generation is not None}) == 1
            and all(
                rank.generation is not None and rank.generation.size == len(names)
                for rank in serving
            )
        )

    def phase(self) -> OperationPhase | None:
        operation = self.coordinator.topology().operation
        return None if operation is None else operation.phase

    def form(self, *names: str) -> dict[str, SimulatedRank]:
        ranks = {name: self.add(name) for name in names}
        self.coordinator.ask("first", *names)
        self.until(
            lambda: self.serve_together(*names) and self.phase() is OperationPhase.DONE,
            "the first generation",
        )
        return ranks
