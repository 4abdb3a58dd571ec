"""Measures a gateway under attack: its memory, and the latency and errors of other clients.

    make bench SUBJECT=gateway [ARGS="--seconds 20 --attackers 100"]

The engine is a stub, so that the time to the first token is the gateway's own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import aiohttp
import msgspec
import psutil

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import report  # noqa: E402 (needs the path)
from baton_engine.random_checkpoint import create_checkpoint  # noqa: E402
from baton_protocol.options.config import DiscoveryConfig, GatewayConfig, ModelConfig  # noqa: E402
from pocketkube.ports import free_ports  # noqa: E402
from support.waiting import until  # noqa: E402

#: Clients that stream short answers, one request after the other.
CLIENTS = 4
#: Pause of a client between two requests. Without it, the clients alone would fill the gateway.
THINK_S = 0.05
BODY = {"model": "m", "prompt": "hello", "max_tokens": 2, "stream": True, "ignore_eos": True}
RATIO_GOAL = 1.5
MEMORY_GOAL_MIB = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attackers", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of both phases")
    parser.add_argument("--runs", type=int, default=3, help="of both phases")
    parser.add_argument("--no-report", action="store_true", help="print only")
    args = parser.parse_args()
    rows, runs = [], []
    for number in range(1, args.runs + 1):
        with tempfile.TemporaryDirectory() as folder:
            new_rows, figures = asyncio.run(measure(args, Path(folder)))
        rows += [{"part": each.pop("part"), "run": number} | each for each in new_rows]
        runs.append(figures)
    ratios, growths, errors = zip(*runs, strict=True)
    goals = [
        report.Goal("p99 TTFT under attack / quiet", median(ratios), RATIO_GOAL, "x", at_most=True),
        report.Goal(
            "memory growth under attack", max(growths), MEMORY_GOAL_MIB, "MiB", at_most=True
        ),
        report.Goal("failed requests of clients", sum(errors), 0, "", at_most=True),
    ]
    report.print_table(rows)
    if args.no_report:
        report.show(goals)
        return
    report.write("gateway", rows, goals, attackers=args.attackers, seconds=args.seconds)


async def measure(
    args: argparse.Namespace, folder: Path
) -> tuple[list[dict[str, Any]], tuple[float, float, int]]:
    """Measure a quiet gateway, then attack it.

    Returns:
        Rows of figures; the ratio of the times to the first token, the growth of the memory in MiB
        and the number of failed requests.
    """
    port, metrics_port = free_ports(2)
    discovery = folder / "engines.json"
    config = GatewayConfig(
        model=ModelConfig(path=str(create_checkpoint(folder / "model", "llama")), served_name="m"),
        discovery=DiscoveryConfig(file=str(discovery)),
        port=port,
        metrics_port=metrics_port,
    )
    (folder / "gateway.json").write_bytes(msgspec.json.encode(config))
    with (
        process("stub_engine.py", str(discovery)),
        process("-m", "baton_gateway.cli", "--config", str(folder / "gateway.json")) as gateway,
    ):
        await until(lambda: is_ready(metrics_port), "the gateway to be ready")
        memory = psutil.Process(gateway.pid)
        await serve(port, memory, 3.0)  # warm up
        quiet = await serve(port, memory, args.seconds)
        with process("attackers.py", str(port), str(args.attackers)):
            attacked = await serve(port, memory, args.seconds)
        scraped = await scrape(metrics_port)
    growth = max(attacked["rss"]) - max(quiet["rss"])
    rows = [row("quiet", quiet), row(f"{args.attackers} attackers", attacked)]
    rows += [
        {"part": "Failed requests of clients", "error": error, "requests": count}
        for error, count in Counter(attacked["errors"]).items()
    ]
    rows += [
        {"part": "Closed connections", "reason": reason, "connections": int(scraped[name])}
        for reason in ("timeout", "evicted", "refused")
        if (name := f'baton:gateway_closed_connections_total{{reason="{reason}"}}') in scraped
    ]
    name = 'baton:http_requests_total{endpoint="/v1/completions",status="503"}'
    rows.append(
        {"part": "Closed connections", "reason": "503", "connections": int(scraped.get(name, 0))}
    )
    ratio = p99(attacked["ttft"]) / p99(quiet["ttft"])
    return rows, (ratio, growth, len(attacked["errors"]))


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a script of this folder, or a module, until the block ends."""
    arguments = list(command)
    if command[0] != "-m":
        arguments[0] = str(HERE / command[0])
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    child = subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


async def is_ready(metrics_port: int) -> bool:
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{metrics_port}/ready") as response,
        ):
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def scrape(metrics_port: int) -> dict[str, float]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{metrics_port}/metrics") as response,
    ):
        lines = (await response.text()).splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }


async def serve(port: int, gateway: psutil.Process, seconds: float) -> dict[str, list[Any]]:
    """Run the clients for `seconds`. Return times to the first token, errors and RSS in MiB."""
    found: dict[str, list[Any]] = {"ttft": [], "errors": [], "rss": []}
    ends = time.monotonic() + seconds

    async def client(session: aiohttp.ClientSession) -> None:
        while time.monotonic() < ends:
            started = time.monotonic()
            try:
                async with session.post("/v1/completions", json=BODY) as response:
                    if response.status != 200:
                        found["errors"].append(str(response.status))
                    else:
                        await response.content.readline()
                        found["ttft"].append(time.monotonic() - started)
                        await response.read()
            except (aiohttp.ClientError, TimeoutError) as error:
                found["errors"].append(repr(error))
            await asyncio.sleep(THINK_S)

    async def sample() -> None:
        while time.monotonic() < ends:
            found["rss"].append(gateway.memory_info().rss / 2**20)
            await asyncio.sleep(0.25)

    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout) as session:
        await asyncio.gather(sample(), *(client(session) for _ in range(CLIENTS)))
    return found


def row(name: str, found: dict[str, list[Any]]) -> dict[str, Any]:
    return {
        "part": "Clients beside attackers",
        "gateway": name,
        "requests": len(found["ttft"]),
        "errors": len(found["errors"]),
        "TTFT p50 ms": round(1000 * median(found["ttft"]), 1),
        "TTFT p99 ms": round(1000 * p99(found["ttft"]), 1),
        "RSS MiB": round(max(found["rss"])),
    }


def p99(values: list[float]) -> float:
    return quantiles(values, n=100)[98]


if __name__ == "__main__":
    main()
