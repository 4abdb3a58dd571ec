"""SIGKILL and SIGSTOP of an engine and its workers under load.

All clients receive the reason, no process survives, and ports are free again.

BATON_CHAOS_ROUNDS is the number of random rounds. BATON_CHAOS_SEED repeats them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import signal
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from baton_protocol.engine_client.engine_client import EngineClient, EngineDeadError
from baton_protocol.engine_messages import EngineCoreOutput, EngineCoreRequest
from baton_protocol.sampling_params import SamplingParams
from support.chaos.chaos_processes import (
    HOST,
    LAYOUTS,
    NOTICE_S,
    START_S,
    assert_port_is_free,
    engine_command,
    free_port,
    tree,
)
from support.waiting import until

pytestmark = pytest.mark.chaos
ROUNDS = int(os.environ.get("BATON_CHAOS_ROUNDS", "20"))
SEED = int(os.environ.get("BATON_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
WORKER = "baton_engine.executor.multiproc.worker_main"
VICTIMS = [
    ("tp2", "worker"),
    ("pp2", "worker"),
    ("uniproc", "engine"),
    ("tp2", "engine"),
    ("pp2", "engine"),
]
CASES = list(itertools.islice(itertools.cycle(VICTIMS), ROUNDS))


class Load:
    """A client that keeps `width` requests of random lengths open."""

    def __init__(self, client: EngineClient, name: str, width: int, chance: random.Random) -> None:
        self._client = client
        self._chance = chance
        self._ids = (f"{name}-{number}" for number in itertools.count())
        self.errors: list[BaseException | EngineCoreOutput] = []
        self.tokens = 0
        self.tasks = [asyncio.create_task(self._send_requests()) for _ in range(width)]

    async def _send_requests(self) -> None:
        """Send requests one after another until the engine is lost or a request fails."""
        try:
            while True:
                length = self._chance.randint(1, 300)
                prompt = [self._chance.randrange(3, 900) for _ in range(length)]
                params = SamplingParams(max_tokens=self._chance.randint(1, 200), ignore_eos=True)
                async for output in self._client.add(
                    EngineCoreRequest(next(self._ids), prompt, params)
                ):
                    self.tokens += len(output.new_token_ids)
                    if output.error:
                        self.errors.append(output)
                        return
        except EngineDeadError as error:
            self.errors.append(error)


async def start_loads(port: int, chance: random.Random) -> list[Load]:
    """Start two clients with eight requests each, and return once each has received a token."""
    loads = []
    for name in ("one", "two"):
        client = EngineClient(HOST, port, client_id=name, heartbeat_timeout_s=15.0)
        await client.connect(START_S)
        await client.wait_ready(START_S)
        loads.append(Load(client, name, 8, chance))
    await until(lambda: all(load.tokens for load in loads), "a token for each client", START_S)
    return loads


def have_more_tokens(loads: list[Load], counts: list[int]) -> bool:
    return all(load.tokens > count for load, count in zip(loads, counts, strict=True))


async def assert_all_receive(loads: list[Load], reason: str, within_s: float) -> None:
    tasks = [task for load in loads for task in load.tasks]
    _, waiting = await asyncio.wait(tasks, timeout=within_s)
    assert not waiting, (
        f"{len(waiting)} of {len(tasks)} requests are still open after {within_s:g} s"
    )
    for load in loads:
        for error in load.errors:
            assert re.search(reason, str(error)), error


@pytest.mark.parametrize(
    ("number", "layout", "victim"), [(n, *case) for n, case in enumerate(CASES)]
)
async def test_clients_receive_the_reason_of_a_kill_under_load(
    checkpoint: Path, tmp_path: Path, number: int, layout: str, victim: str
) -> None:
    chance = random.Random(SEED * 1000 + number)
    print(f"BATON_CHAOS_SEED={SEED}")
    port = free_port()
    with tree(engine_command(checkpoint, layout, port), tmp_path / "log") as engine:
        await asyncio.to_thread(engine.wait_for, "serves on port")
        loads = await start_loads(port, chance)
        await asyncio.sleep(chance.uniform(0, 1.0))
        workers = engine.find(WORKER)
        assert len(workers) == (0 if layout == "uniproc" else 2)
        if victim == "worker":
            killed = chance.choice(workers)
            signalled = rf"worker \d \(pid {killed.pid}\) was killed by signal 9"
            reason = rf"{signalled}|a member is gone|[Cc]onnection"
        else:
            killed, reason = psutil.Process(engine.process.pid), "connection lost"
        killed.kill()
        await assert_all_receive(loads, reason, NOTICE_S)
        await asyncio.to_thread(engine.assert_no_process_survives)
        assert engine.process.wait(1) == (1 if victim == "worker" else -signal.SIGKILL)
        assert_port_is_free(port)


@pytest.mark.parametrize("number", range(max(1, ROUNDS // 5)))
def test_a_kill_while_the_engine_starts_leaves_no_process(
    checkpoint: Path, tmp_path: Path, number: int
) -> None:
    chance = random.Random(SEED * 1000 + 500 + number)
    port = free_port()
    with tree(engine_command(checkpoint, "tp2", port), tmp_path / "log") as engine:
        end = time.monotonic() + chance.uniform(0.2, 5.0)
        while time.monotonic() < end:
            engine.members()
            time.sleep(0.01)
        engine.members()
        engine.process.kill()
        engine.assert_no_process_survives()
        assert_port_is_free(port)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "uniproc"])
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_stopped_worker_ends_the_engine_within_its_timeouts(
    checkpoint: Path, tmp_path: Path, layout: str, rank: int
) -> None:
    port = free_port()
    timeouts = ("--collective-timeout-s", "5", "--step-timeout-s", "8")
    with tree(engine_command(checkpoint, layout, port, *timeouts), tmp_path / "log") as engine:
        await asyncio.to_thread(engine.wait_for, "serves on port")
        loads = await start_loads(port, random.Random(rank))
        engine.find(WORKER)[rank].suspend()
        await assert_all_receive(
            loads, r"no response (from rank \d )?within 5 s|stopped \(SIGSTOP", 8 + NOTICE_S
        )
        await asyncio.to_thread(engine.assert_no_process_survives)
        assert engine.process.wait(1) == 1
        assert_port_is_free(port)


async def test_an_engine_resumes_after_sigstop_and_sigcont(
    checkpoint: Path, tmp_path: Path
) -> None:
    port = free_port()
    timeouts = ("--collective-timeout-s", "2", "--step-timeout-s", "3")
    with tree(engine_command(checkpoint, "tp2", port, *timeouts), tmp_path / "log") as engine:
        await asyncio.to_thread(engine.wait_for, "serves on port")
        loads = await start_loads(port, random.Random(7))
        all_processes = list(engine.members())
        # The engine alone, then all processes, as in a frozen container.
        for stopped in ([psutil.Process(engine.process.pid)], all_processes):
            for process in stopped:
                process.suspend()
            await asyncio.sleep(5)
            before = [load.tokens for load in loads]
            for process in reversed(stopped):
                process.resume()
            await until(partial(have_more_tokens, loads, before), "more tokens", NOTICE_S)
        assert not [error for load in loads for error in load.errors], engine.text
        engine.process.kill()
        await assert_all_receive(loads, "connection lost", NOTICE_S)
        await asyncio.to_thread(engine.assert_no_process_survives)
