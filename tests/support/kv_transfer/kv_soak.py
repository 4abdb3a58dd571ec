"""A soak of the KV connectors: random transfers between processes that die, freeze and restart.

For the soak test of KV transfers.

All choices follow from one seed. The order of events also depends on the machine. Every load and
every offer must end once, with the right blocks, and release all resources. `kv_soak_engine` checks
this.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from baton_protocol.options.config import KVRole
from support.kv_transfer.kv_soak_engine import MAX_BLOCKS, Ended, EngineSpec, Report, SoakEngine

#: Reasons that must not occur between compatible engines.
UNEXPECTED = ("protocol", "refused", "defect")
START_S = 60.0
#: Longest time of a transfer: lease, load timeout, drain and a freeze, on a busy machine.
END_S = 90.0
MAX_FROZEN_S = 2.0


def _serve(pipe: Connection, specs: Sequence[EngineSpec], seed: str, ports: dict[str, int]) -> None:
    """Run engines in this process, and execute commands from `pipe` until "stop"."""
    wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
    wakeup = lambda: os.eventfd_write(wake_fd, 1)  # noqa: E731
    engines = {
        spec.name: SoakEngine(spec, f"{seed}/{spec.name}", ports.get(spec.name, 0), wakeup)
        for spec in specs
    }
    pipe.send({name: (engine.instance_id, engine.port) for name, engine in engines.items()})
    while True:
        is_active = any(engine.is_active for engine in engines.values())
        ready = connection.wait([pipe, wake_fd], 0.002 if is_active else 0.5)
        if wake_fd in ready:
            os.eventfd_read(wake_fd)
        while pipe.poll():
            method, name, arguments = pipe.recv()
            if method == "stop":
                reports = [engine.report() for engine in engines.values()]
                for engine in engines.values():
                    engine.close()
                pipe.send(reports)
                return
            answer = getattr(engines[name], method)(*arguments)
            if answer is not None:
                pipe.send([answer])
        ended = [end for engine in engines.values() for end in engine.step()]
        if ended:
            pipe.send(ended)


@dataclass
class _Process:
    specs: tuple[EngineSpec, ...]
    incarnation: int = 0
    process: Any = None
    pipe: Connection | None = None
    #: Instance id and port of started engines, by name.
    engines: dict[str, tuple[str, int]] = field(default_factory=dict)
    #: 0 if it is not frozen.
    thaws_at: float = 0.0
    started_at: float = 0.0

    @property
    def up(self) -> bool:
        return bool(self.engines)


@dataclass
class _Transfer:
    #: (name, incarnation, whether it is the producer) of engines that must report the end.
    waits_for: set[tuple[str, int, bool]]
    deadline: float
    #: The load requests other tokens than the offer has.
    other_prompt: bool
    history: list[Any] = field(default_factory=list)


class Soak:
    """A soak test.

    Args:
        processes: the engines of each process. Engines with the same transport can connect.
        num_transfers: total number of transfers.
        num_at_a_time: number of concurrent transfers.
        kills, freezes: number of kills and freezes.
    """

    def __init__(
        self,
        processes: Sequence[Sequence[EngineSpec]],
        *,
        seed: int,
        num_transfers: int,
        num_at_a_time: int = 24,
        kills: int = 0,
        freezes: int = 0,
    ) -> None:
        self._rng = random.Random(seed)
        self._seed = seed
        self._num_transfers = num_transfers
        self._num_at_a_time = num_at_a_time
        chosen = self._rng.sample(range(num_transfers // 20, num_transfers), kills + freezes)
        self._kills, self._freezes = set(chosen[:kills]), set(chosen[kills:])
        self._processes = [_Process(tuple(specs)) for specs in processes]
        self._transports = sorted({spec.transport for specs in processes for spec in specs})
        #: (time, action) of planned actions.
        self._due: list[tuple[float, Callable[[_Process], None]]] = []
        self._transfers: dict[str, _Transfer] = {}
        self._num_started = 0
        self._reports: dict[str, Report] = {}
        #: Failed rank transfers by reason, per (name, incarnation) of engines.
        self._failures: dict[tuple[str, int], dict[str, int]] = {}
        #: Counts of events by name.
        self.counts: Counter[str] = Counter()
        #: Errors of loads with a reason in UNEXPECTED.
        self.unexpected: list[str] = []
        self._context = mp.get_context("forkserver")

    def run(self) -> None:
        """Run the soak test.

        Raises:
            AssertionError: a block is wrong, a transfer ends never or twice, or resources leak.
        """
        self._context.set_forkserver_preload([__name__])
        # The server does not get sys.path.
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
            forkserver.ensure_running()
        try:
            for process in self._processes:
                self._start(process, {})
            while not all(process.up for process in self._processes):
                self._listen(0.05)
            while self._num_started < self._num_transfers or self._transfers:
                self._begin()
                self._disturb()
                self._listen(0.05 if not self._due else 0.002)
            self._settle()
        finally:
            for process in self._processes:
                process.process.kill()
                process.process.join()

    # Actions

    def _start(self, process: _Process, ports: dict[str, int]) -> None:
        process.incarnation += 1
        process.engines, process.thaws_at, process.started_at = {}, 0.0, time.monotonic()
        process.pipe, theirs = self._context.Pipe()
        seed = f"{self._seed}/{process.incarnation}"
        process.process = self._context.Process(
            target=_serve, args=(theirs, process.specs, seed, ports), daemon=True
        )
        process.process.start()
        theirs.close()

    def _begin(self) -> None:
        """Start as many transfers as allowed."""
        while (
            self._num_started < self._num_transfers and len(self._transfers) < self._num_at_a_time
        ):
            pair = self._pick()
            if pair is None:
                return
            producer, consumer = pair
            self._num_started += 1
            self._transfer(f"t{self._num_started}", *producer, *consumer)
            if self._num_started in self._kills or self._num_started in self._freezes:
                return

    def _pick(self) -> tuple[tuple[_Process, EngineSpec], tuple[_Process, EngineSpec]] | None:
        """Return a random producer and a consumer with one transport; None if none are running."""
        transport = self._rng.choice(self._transports)
        engines = [(process, spec) for process in self._processes for spec in process.specs]
        engines = [
            (process, spec)
            for process, spec in engines
            if process.up and spec.transport == transport
        ]
        producers = [engine for engine in engines if engine[1].role is KVRole.PRODUCER]
        consumers = [engine for engine in engines if engine[1].role is KVRole.CONSUMER]
        if not producers or not consumers:
            return None
        return self._rng.choice(producers), self._rng.choice(consumers)

    def _transfer(
        self,
        name: str,
        producing: _Process,
        producer: EngineSpec,
        consuming: _Process,
        consumer: EngineSpec,
    ) -> None:
        rng = self._rng
        sequence, num_blocks = rng.randrange(2**32), rng.randint(1, rng.choice([2, MAX_BLOCKS]))
        instance, port = producing.engines[producer.name]
        first = 0 if rng.random() < 0.7 else rng.randint(0, num_blocks)
        other_prompt = rng.random() >= 0.98
        wanted = sequence + other_prompt
        acts = [
            (
                producing,
                (
                    "offer",
                    producer.name,
                    (name, consuming.engines[consumer.name][0], sequence, num_blocks),
                ),
                True,
            ),
            (
                consuming,
                ("load", consumer.name, (name, port, instance, wanted, first, num_blocks - first)),
                False,
            ),
        ]
        if rng.random() < 0.02:
            del acts[rng.randrange(2)]  # only one side starts the transfer
        rng.shuffle(acts)
        waits_for = {(command[1], process.incarnation, sends) for process, command, sends in acts}
        commands = [command for _, command, _ in acts]
        self._transfers[name] = _Transfer(
            waits_for, time.monotonic() + END_S, other_prompt, commands
        )
        for process, command, _ in acts:
            self._send(process, command)
        self.counts[
            f"{producer.transport} {consumer.mode} {len(producer.heads)} to {len(consumer.heads)}"
        ] += 1

    def _disturb(self) -> None:
        now = time.monotonic()
        for process in self._processes:
            if process.thaws_at and now >= process.thaws_at:
                process.thaws_at = 0.0
                os.kill(process.process.pid, signal.SIGCONT)
        for planned, act in ((self._kills, self._kill), (self._freezes, self._freeze)):
            if self._num_started in planned:
                planned.discard(self._num_started)
                # The last transfers are in flight.
                self._due.append((now + self._rng.uniform(0.0, 0.04), act))
        for when, act in list(self._due):
            if now >= when:
                self._due.remove((when, act))
                process = self._rng.choice(self._processes)
                if process.up and not process.thaws_at:
                    act(process)

    def _freeze(self, process: _Process) -> None:
        process.thaws_at = time.monotonic() + self._rng.uniform(0.01, MAX_FROZEN_S)
        os.kill(process.process.pid, signal.SIGSTOP)
        self.counts["freezes"] += 1

    def _kill(self, process: _Process) -> None:
        """Kill a process, and start a new one with the same engines and ports."""
        process.process.kill()
        process.process.join()
        self.counts["kills"] += 1
        names = {spec.name for spec in process.specs}
        for name, transfer in list(self._transfers.items()):
            transfer.history.append(f"{names} died")
            transfer.waits_for = {wait for wait in transfer.waits_for if wait[0] not in names}
            self._forget_if_over(name)
        ports = {name: port for name, (_, port) in process.engines.items() if port}
        self._start(process, ports)

    def _send(self, process: _Process, command: tuple[str, str, tuple[Any, ...]]) -> None:
        process.pipe.send(command)

    # Reports

    def _listen(self, wait_s: float) -> None:
        pipes = {process.pipe: process for process in self._processes}
        for pipe in connection.wait([pipe for pipe in pipes if pipe is not None], wait_s):
            assert isinstance(pipe, Connection)
            process = pipes[pipe]
            try:
                heard = pipe.recv()
            except (EOFError, ConnectionError):
                process.process.join(5)
                raise AssertionError(
                    f"a process died: {[spec.name for spec in process.specs]}"
                ) from None
            if isinstance(heard, dict):
                process.engines = heard
                continue
            for item in heard:
                if isinstance(item, Report):
                    self._reports[item.name] = item
                else:
                    self._ended(process, item)
        now = time.monotonic()
        for process in self._processes:
            assert process.up or now < process.started_at + START_S, "a process does not start"
        late = {
            name: transfer for name, transfer in self._transfers.items() if now > transfer.deadline
        }
        assert not late, f"never ended: {late}"

    def _ended(self, process: _Process, ended: Ended) -> None:
        transfer = self._transfers.get(ended.transfer_id)
        wait = (ended.name, process.incarnation, ended.sent)
        assert transfer is not None, f"{ended} was not waited for"
        assert wait in transfer.waits_for, f"{ended} was not waited for: {transfer}"
        transfer.waits_for.remove(wait)
        transfer.history.append(ended)
        if not ended.sent:
            is_reported = "other tokens" in ended.error
            assert transfer.other_prompt or not is_reported, (
                f"the engines were given the same prompt: {transfer}"
            )
            self.counts["loads of another prompt"] += is_reported
            before = self._failures.get((ended.name, process.incarnation), {})
            if any(ended.failures.get(reason, 0) > before.get(reason, 0) for reason in UNEXPECTED):
                self.unexpected.append(ended.error)
            self._failures[ended.name, process.incarnation] = ended.failures
            self.counts["loads whole" if not ended.error else "loads cut short"] += 1
            self.counts["blocks right"] += ended.num_valid
        self._forget_if_over(ended.transfer_id)

    def _forget_if_over(self, name: str) -> None:
        if not self._transfers[name].waits_for:
            del self._transfers[name]

    def _settle(self) -> None:
        """Check that all resources are released after the last transfer."""
        deadline = time.monotonic() + END_S
        for process in self._processes:
            if process.thaws_at:
                os.kill(process.process.pid, signal.SIGCONT)
        # One of the last kills may be very recent.
        while not all(process.up for process in self._processes):
            self._listen(0.05)
        names = {spec.name for process in self._processes for spec in process.specs}
        while True:
            self._reports.clear()
            for process in self._processes:
                for name in process.engines:
                    self._send(process, ("report", name, ()))
            while self._reports.keys() != names:
                self._listen(0.05)
                assert time.monotonic() < deadline, f"no report of {names - self._reports.keys()}"
            problems = [problem for report in self._reports.values() for problem in report.problems]
            assert not problems, problems
            busy = {report.name: report.busy for report in self._reports.values() if report.busy}
            if not busy:
                break
            assert time.monotonic() < deadline, f"left over: {busy}"
        for report in self._reports.values():
            self.counts["checksum failures"] += report.checksum_failures
            self.counts["fences"] += report.memory_fences
            self.counts["damaged"] += report.num_damaged
        for failures in self._failures.values():
            for reason, count in failures.items():
                self.counts[f"failed: {reason}"] += count
        for process in self._processes:
            self._send(process, ("stop", "", ()))
            process.process.join(30)
            assert process.process.exitcode == 0, (
                f"{process.specs}: exit code {process.process.exitcode}"
            )
