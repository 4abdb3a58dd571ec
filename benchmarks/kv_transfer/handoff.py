"""Measures two costs of a KV hand-off for a client: visible transfer time and second-token delay.

    PYTHONPATH=benchmarks python benchmarks/kv_transfer/handoff.py [--repeats 5] [--quick]

The script writes two parts of the result of `make bench SUBJECT=kv_transfer`, and keeps the others.

Engines are processes with one compute thread each. Prefill engines run on one core, decode engines
on another. The model is a Llama of 340 million parameters. Its KV block has 4 MiB, like a block of
64 layers with 8 KV heads of 128 in bfloat16. Every prompt is new.

Each hand-off has a partner: a request whose prompt has the same length and is prefilled by the same
decode engine. The partner runs just before or just after the hand-off, alternately. Figures are
medians. Shorter prompts are measured more often, because noise is a larger part of their growth.

    hidden = 1 - visible / alone
    visible          from the end of a prompt's last prefill step, which samples the first token, to
                     the verification of the last block; 0 if the verification is earlier. Prefill
                     runs in chunks of one block.
    alone            the time of a transfer that overlaps with no prefill step. Prefill runs in one
                     step, and the transfer begins after the step. The transfer ends with the
                     verification of the last block.
    growth = gap - own gap
    gap              from the first token (of the prefill engine) to the second token (of the decode
                     engine), as the client receives them
    own gap          the gap of the partner
    waited           the part of the growth before the step that computes the second token. The rest
                     of the growth is how much longer that step took than the partner's step.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import report
from baton_engine.random_checkpoint import create_checkpoint
from baton_protocol.engine_client.engine_client import EngineClient
from baton_protocol.engine_messages import (
    EngineCoreRequest,
    KVSide,
    KVTransferParams,
    PrefillResult,
)
from baton_protocol.options.config import (
    ENGINE_PORT,
    KV_PORT,
    CacheConfig,
    EngineConfig,
    KVRole,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from baton_protocol.sampling_params import SamplingParams
from report import Goal

BLOCK_SIZE = 16
PROMPT_BLOCKS = (8, 16, 32)
MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_layers": 32,
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
}
QUICK = {"num_layers": 4}
KV_BYTES = 2**28
START_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 120.0
#: Ways to prefill.
IN_CHUNKS, IN_ONE_STEP = "in chunks", "in one step"
#: In one step, and the transfer begins after it.
STEP_FIRST = "in one step, then sent"
Rows = list[dict[str, Any]]


class Engine:
    """An engine process that runs on one core, and a client of the engine."""

    def __init__(
        self,
        folder: Path,
        checkpoint: Path,
        name: str,
        host: str,
        core: int,
        role: KVRole,
        mode: str,
        chunk: int,
        *,
        step_first: bool = False,
    ) -> None:
        """Start the engine's process.

        Args:
            chunk: maximum number of prompt tokens of a step.
            step_first: whether a transfer begins only after the step that computed its blocks.
        """
        config = EngineConfig(
            model=ModelConfig(path=str(checkpoint), dtype="float32"),
            cache=CacheConfig(block_size=BLOCK_SIZE, memory_bytes=KV_BYTES),
            scheduler=SchedulerConfig(max_num_batched_tokens=chunk, max_num_seqs=1),
            kv_transfer=KVTransferConfig(role=role, mode=mode),
            parallel=ParallelConfig(worker_class="timed_worker.TimedWorker"),
            device="cpu",
            num_threads=1,
        )
        self.host = host
        self.times = folder / f"{name}.times"
        self.client = EngineClient(host, ENGINE_PORT, client_id="benchmark")
        self.log = folder / f"{name}.log"
        self._name = name
        path = folder / f"{name}.json"
        path.write_bytes(msgspec.json.encode(config))
        environment = {
            "POD_IP": host,
            "OMP_NUM_THREADS": "1",
            "BATON_TRANSFER_TIMES": str(self.times),
            "BATON_STEP_FIRST": "1" if step_first else "",
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
            ),
        }
        command = [str(Path(sys.executable).parent / "baton-engine"), "--config", str(path)]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=os.environ | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            )

    async def connect(self) -> None:
        """Connect and wait until the engine is ready.

        Raises:
            RuntimeError: the engine did not become ready. The message has the end of the engine's
                log.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                await self.client.connect(5)
                await self.client.wait_ready(START_TIMEOUT_S)
                return
            except Exception as error:  # the engine does not listen yet, or has failed
                await self.client.close()
                if self._process.poll() is not None or time.monotonic() > deadline:
                    log = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
                    raise RuntimeError(
                        f"engine {self._name} did not start: {error}\n{log}"
                    ) from error
                self.client = EngineClient(self.host, ENGINE_PORT, client_id="benchmark")
                await asyncio.sleep(0.1)

    def event(self, event: str, transfer_id: str) -> float:
        """Return the monotonic time of an event of a transfer, in seconds.

        Args:
            event: `handed`, `saved`, `loaded` or `decoded`; see timed_worker.py.

        Raises:
            RuntimeError: the transfer failed, or the event has not happened.
        """
        for line in reversed(self.times.read_text().splitlines()):
            what, whose, seconds, error = json.loads(line)
            if (what, whose) == (event, transfer_id):
                if error:
                    raise RuntimeError(
                        f"transfer {transfer_id} failed on engine {self._name}: {error}"
                    )
                return float(seconds)
        raise RuntimeError(f"engine {self._name} has not {event} transfer {transfer_id}")

    async def close(self) -> None:
        await self.client.close()
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Times:
    """Times of one request, in seconds."""

    #: From the start of the request to the first token.
    prefill: float
    #: From the first token to the second.
    gap: float
    #: From the end of the last prefill step to the verification of the last block.
    visible: float = 0.0
    #: From the event `handed` of the last blocks to the verification of the last block.
    transfer: float = 0.0
    #: From the first token to the beginning of the step that computes the second. Negative if that
    #: step began before the client received the first token.
    waited: float = 0.0


_ids = itertools.count()


async def hand_over(prefill: Engine, decode: Engine, prompt: list[int]) -> Times:
    """Run a request as the gateway does: prefill on one engine, then decode on the other."""
    name = f"handoff-{next(_ids)}"
    consume = KVTransferParams(
        side=KVSide.CONSUME,
        transfer_id=name,
        peer_instance_id=prefill.client.instance_id,
        remote_host=prefill.host,
        remote_port=KV_PORT,
    )
    produce = KVTransferParams(
        side=KVSide.PRODUCE, transfer_id=name, peer_instance_id=decode.client.instance_id
    )
    started = time.monotonic()
    rest = decode.client.add(EngineCoreRequest(name, prompt, greedy(2), kv_transfer=consume))
    stage = prefill.client.add(EngineCoreRequest(name, prompt, greedy(1), kv_transfer=produce))
    async with asyncio.timeout(REQUEST_TIMEOUT_S):
        output = await anext(stage)
        first = time.monotonic()
        decode.client.prefill_result(PrefillResult(name, output.new_token_ids))
        last = await anext(rest)
        second = time.monotonic()
    assert not output.error, output.error
    assert not last.error, last.error
    assert (len(output.new_token_ids), len(last.new_token_ids)) == (1, 1)
    loaded = decode.event("loaded", name)
    visible, transfer = (
        max(0.0, loaded - prefill.event("saved", name)),
        loaded - prefill.event("handed", name),
    )
    return Times(
        first - started, second - first, visible, transfer, decode.event("decoded", name) - first
    )


async def alone(engine: Engine, prompt: list[int]) -> Times:
    """Run a request on one engine, without a hand-off."""
    name = f"alone-{next(_ids)}"
    started = time.monotonic()
    stream = engine.client.add(EngineCoreRequest(name, prompt, greedy(2)))
    async with asyncio.timeout(REQUEST_TIMEOUT_S):
        outputs, times = [], []
        async for output in stream:
            assert not output.error, output.error
            outputs.append(output)
            times.append(time.monotonic())
    assert [len(output.new_token_ids) for output in outputs] == [1, 1]
    return Times(
        times[0] - started, times[1] - times[0], waited=engine.event("decoded", name) - times[0]
    )


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


@contextlib.asynccontextmanager
async def engines(
    folder: Path, checkpoint: Path
) -> AsyncIterator[tuple[dict[str, Engine], dict[str, Engine]]]:
    """Start all engines, and close them at the end.

    Yields:
        The prefill engines by way to prefill, and the decode engines by mode (pull, push).
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError("prefill and decode need one core each, and this process has only one")
    whole = max(PROMPT_BLOCKS) * BLOCK_SIZE
    hosts = (f"127.{os.getpid() % 200 + 20}.77.{number}" for number in itertools.count(1))
    prefills = {
        how: Engine(
            folder,
            checkpoint,
            f"prefill-{number}",
            next(hosts),
            cores[0],
            KVRole.PRODUCER,
            "pull",
            chunk,
            step_first=how == STEP_FIRST,
        )
        for number, (how, chunk) in enumerate(
            {IN_CHUNKS: BLOCK_SIZE, IN_ONE_STEP: whole, STEP_FIRST: whole}.items()
        )
    }
    decodes = {
        mode: Engine(
            folder,
            checkpoint,
            f"decode-{mode}",
            next(hosts),
            cores[1],
            KVRole.CONSUMER,
            mode,
            whole,
        )
        for mode in ("pull", "push")
    }
    every = [*prefills.values(), *decodes.values()]
    try:
        for engine in every:
            await engine.connect()
        yield prefills, decodes
    finally:
        for engine in every:
            await engine.close()


#: (way to prefill, the decode engine's mode, blocks of the prompt).
Key = tuple[str, str, int]


@dataclass(frozen=True)
class Pair:
    """A hand-off and its partner, with prompts of the same length."""

    #: The decode engine prefilled the prompt itself.
    own: Times
    #: A prefill engine handed the prompt's KV over.
    handed: Times


@dataclass(frozen=True)
class Measured:
    #: All pairs, without the way STEP_FIRST.
    pairs: dict[Key, list[Pair]]
    #: Seconds of the transfer alone, by mode and blocks of the prompt.
    alone: dict[tuple[str, int], list[float]]


async def run(checkpoint: Path, repeats: int, lengths: tuple[int, ...]) -> Measured:
    """Measure all ways to prefill and all modes in turn.

    Prompts of half the length are measured twice as often.
    """
    rng = random.Random(5)
    measured = Measured(defaultdict(list), defaultdict(list))

    def prompt(num_blocks: int) -> list[int]:
        return [rng.randrange(300, MODEL["vocab_size"]) for _ in range(num_blocks * BLOCK_SIZE)]

    async def pair(prefill: Engine, decode: Engine, num_blocks: int, *, own_first: bool) -> Pair:
        if own_first:
            own = await alone(decode, prompt(num_blocks))
        handed = await hand_over(prefill, decode, prompt(num_blocks))
        if not own_first:
            own = await alone(decode, prompt(num_blocks))
        return Pair(own, handed)

    with tempfile.TemporaryDirectory() as folder:
        async with engines(Path(folder), checkpoint) as (prefills, decodes):
            # Connect and warm up.
            for prefill, decode in itertools.product(prefills.values(), decodes.values()):
                await pair(prefill, decode, lengths[0], own_first=True)
            for repeat, num_blocks in itertools.product(range(repeats), lengths):
                for turn in range(max(lengths) // num_blocks):
                    own_first = (repeat + turn) % 2 == 0
                    ways = [(how, mode) for how in prefills for mode in decodes]
                    for how, mode in ways if own_first else reversed(ways):
                        if how == STEP_FIRST:
                            handed = await hand_over(
                                prefills[how], decodes[mode], prompt(num_blocks)
                            )
                            measured.alone[mode, num_blocks].append(handed.transfer)
                            continue
                        partners = await pair(
                            prefills[how], decodes[mode], num_blocks, own_first=own_first
                        )
                        measured.pairs[how, mode, num_blocks].append(partners)
    return measured


def figures(measured: Measured, lengths: tuple[int, ...]) -> tuple[Rows, list[Goal]]:
    pairs = measured.pairs

    def in_chunks(mode: str, num_blocks: int, field: str) -> float:
        return float(
            statistics.median(
                getattr(pair.handed, field) for pair in pairs[IN_CHUNKS, mode, num_blocks]
            )
        )

    rows: Rows = []
    hidden: dict[str, list[float]] = defaultdict(list)
    growth: dict[str, list[float]] = defaultdict(list)
    for mode in ("pull", "push"):
        for num_blocks in lengths:
            visible = in_chunks(mode, num_blocks, "visible")
            transfer = statistics.median(measured.alone[mode, num_blocks])
            hidden[mode].append(100 * (1 - visible / transfer))
            rows.append(
                {
                    "part": "transfer hidden behind prefill",
                    "mode": mode,
                    "blocks": num_blocks,
                    "prefill_ms": round(1e3 * in_chunks(mode, num_blocks, "prefill"), 1),
                    "alone_ms": round(1e3 * transfer, 2),
                    "visible_ms": round(1e3 * visible, 2),
                    "hidden_percent": round(hidden[mode][-1], 1),
                }
            )
    for mode in ("pull", "push"):
        for how in (IN_CHUNKS, IN_ONE_STEP):
            for num_blocks in lengths:
                row = growth_of(pairs[how, mode, num_blocks])
                growth[mode].append(row["growth_percent"])
                rows.append(
                    {
                        "part": "first to second token",
                        "mode": mode,
                        "prefilled": how,
                        "blocks": num_blocks,
                        **{name: round(value, 2) for name, value in row.items()},
                    }
                )
    return rows, [
        Goal(
            "transfer that push hides behind prefill, least of all prompts",
            min(hidden["push"]),
            85.0,
            "%",
        ),
        Goal(
            "growth of the second token's time with push, in prefill time",
            max(growth["push"]),
            3.0,
            "%",
            at_most=True,
        ),
        Goal(
            "growth of the second token's time with pull, in prefill time",
            max(growth["pull"]),
            3.0,
            "%",
            at_most=True,
        ),
    ]


def growth_of(pairs: list[Pair]) -> dict[str, float]:
    """Return the figures of the growth, as the module's docstring defines them."""
    prefill = statistics.median(pair.own.prefill for pair in pairs)
    differences = [pair.handed.gap - pair.own.gap for pair in pairs]
    growth = statistics.median(differences)
    # The standard error of a median of n normal values is sqrt(pi / 2 n) standard deviations.
    error = (
        0.0
        if len(pairs) < 2
        else math.sqrt(math.pi / 2 / len(pairs)) * statistics.stdev(differences)
    )
    return {
        "pairs": len(pairs),
        "own_prefill_ms": 1e3 * prefill,
        "own_gap_ms": 1e3 * statistics.median(pair.own.gap for pair in pairs),
        "gap_ms": 1e3 * statistics.median(pair.handed.gap for pair in pairs),
        "growth_ms": 1e3 * growth,
        "growth_error_ms": 1e3 * error,
        "waited_ms": 1e3
        * statistics.median(pair.handed.waited - pair.own.waited for pair in pairs),
        "growth_percent": 100 * growth / prefill,
    }


def measure(repeats: int, quick: bool = False) -> tuple[Rows, list[Goal]]:
    """Measure both costs of the hand-off. Return rows of figures, and goals."""
    lengths = (2, 4) if quick else PROMPT_BLOCKS
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = create_checkpoint(
            Path(folder) / "llama", "llama", **(MODEL | QUICK if quick else MODEL)
        )
        return figures(asyncio.run(run(checkpoint, 1 if quick else repeats, lengths)), lengths)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The hand-off between two engines, as a client sees it."
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a small model and short prompts, once; writes no result",
    )
    args = parser.parse_args()
    rows, goals = measure(args.repeats, args.quick)
    report.print_table(rows)
    if args.quick:
        report.show(goals)
    else:
        report.replace("kv_transfer", rows, goals, repeats=args.repeats)


if __name__ == "__main__":
    main()
